"""Collectives outside steps for arrays of rows: gathered, sent to one another, or reduced in parts.

A row is an entry of an array's leading dimension. Processes follow one another in rising order.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from tnt_jax.distributed.host.collectives import check_numbers, problem_of
from tnt_jax.distributed.host.exchange import Brought, bring, collected, exclusive, reduced, typed
from tnt_jax.distributed.host.reduction import Op, reduce_rows
from tnt_jax.distributed.joining.process_sets import ProcessSet, members_of


def all_gather_rows(tree: Any, *, process_set: ProcessSet | None = None) -> Any:
    """Returns the rows of all processes concatenated, `[total rows, ...]`, on every process.

    Processes may have different numbers of rows, also none; those that have called `join` have
    none.

    Args:
        tree: Pytree of arrays `[rows, ...]`, of the same structure and dtypes on every process, and
            of the same shapes but for the number of rows.
        process_set: The ranks among whose processes this happens; all by default.

    Raises:
        ValueError: On every process, if structures, dtypes or shapes of rows differ; the text names
            the leaf.
    """
    members = members_of(process_set)
    with exclusive("all_gather_rows"):
        brought = bring("all_gather_rows", tree, members, is_ragged=True, is_joinable=True)
        num_rows = [
            sum(shapes[index][0] for shapes in brought.shapes)
            for index in range(len(brought.leaves))
        ]
        return _unflatten(brought, collected(brought), num_rows)


def all_to_all(
    tree: Any, splits: Sequence[int] | None = None, *, process_set: ProcessSet | None = None
) -> Any:
    """Sends rows to each process, and returns those that the processes have sent to this one.

    How many rows come from each process, `all_to_all(np.asarray(splits))` tells.

    Args:
        tree: Pytree of arrays `[rows, ...]`, of the same structure and dtypes on every process, and
            of the same shapes but for the number of rows.
        splits: How many rows go to each process, the first ones to the first; equally many by
            default.
        process_set: The ranks among whose processes this happens; all by default.

    Returns:
        Arrays `[received rows, ...]`, by process that sent them.

    Raises:
        ValueError: On every process, if structures, dtypes or shapes of rows differ, or if the rows
            of a process are not what its splits add up to, or cannot be split equally.
    """
    members = members_of(process_set)

    def check(name: str, array: np.ndarray) -> None:
        if array.ndim:
            _shares(name, len(array), splits, len(members))

    with exclusive("all_to_all"):
        brought = bring("all_to_all", tree, members, check, is_ragged=True)
        told = [] if splits is None else [int(number) for number in splits]
        every = bring("all_to_all", np.asarray(told, np.int64), members, is_ragged=True)
        tables = np.split(
            collected(every)[0].view(np.int64), np.cumsum([rows[0][0] for rows in every.shapes])
        )

        received = [
            [
                _own_range(rows, tables[position].tolist(), len(members), brought.own)
                for rows, *_ in shapes
            ]
            for position, shapes in enumerate(brought.shapes)
        ]

        def part(position: int, index: int) -> tuple[int, int]:
            leaf, (begin, end) = brought.leaves[index], received[position][index]
            row_bytes = math.prod(leaf.shape[1:]) * leaf.itemsize
            return begin * row_bytes, end * row_bytes

        num_rows = [
            sum(end - begin for begin, end in ranges) for ranges in zip(*received, strict=True)
        ]
        return _unflatten(brought, collected(brought, part), num_rows)


def reduce_scatter(tree: Any, op: Op = "sum", *, process_set: ProcessSet | None = None) -> Any:
    """Returns this process's part of the rows of a reduction over all processes.

    The reduction is that of `all_reduce`. Rows are divided in order; where they cannot be divided
    equally, the first processes have one more.

    Args:
        tree: Pytree of arrays `[rows, ...]`, of the same structure, shapes and dtypes on every
            process.
        op: `"sum"`, `"mean"`, `"min"`, `"max"` or `"prod"`.
        process_set: The ranks among whose processes this happens; all by default.

    Raises:
        TypeError: If a leaf is not numeric.
        ValueError: On every process, if structures, shapes or dtypes differ, if an array has no
            dimension, or `op` is unknown.
        OverflowError: On every process, if a sum or product of integers has more than 64 bits.
    """
    members = members_of(process_set)
    call = f"reduce_scatter (op={op})"
    numbers = check_numbers("reduce_scatter")

    def check(name: str, array: np.ndarray) -> None:
        numbers(name, array)
        if array.ndim == 0:
            raise ValueError(f"{call} takes arrays of rows, but {name} is {array.dtype}[].")

    with exclusive("reduce_scatter"):
        brought = bring(call, tree, members, check, problem=problem_of(op))
        totals = reduced(brought, lambda rows: reduce_rows(rows, op))
        return brought.structure.unflatten(
            np.array_split(total, len(members))[brought.own].copy() for total in totals
        )


def _unflatten(brought: Brought, data: list[np.ndarray], num_rows: list[int]) -> Any:
    """Returns the tree of arrays `[num_rows, ...]` that bytes are."""
    return brought.structure.unflatten(
        typed(part, leaf.dtype, (rows, *leaf.shape[1:]))
        for part, rows, leaf in zip(data, num_rows, brought.leaves, strict=True)
    )


def _own_range(rows: int, splits: list[int], num_members: int, own: int) -> tuple[int, int]:
    """Returns the first of a process's rows that go to the process at `own`, and the end."""
    shares = _shares("", rows, splits or None, num_members)
    begin = sum(shares[:own])
    return begin, begin + shares[own]


def _shares(name: str, rows: int, splits: Sequence[int] | None, num_members: int) -> list[int]:
    """Returns how many rows go to each process."""
    if splits is None:
        if rows % num_members:
            raise ValueError(
                f"all_to_all sends equally many rows to {num_members} processes, but {name} has "
                f"{rows}. Pass splits=, the number of rows for each process."
            )
        return [rows // num_members] * num_members
    if len(splits) != num_members or min(splits) < 0 or sum(splits) != rows:
        raise ValueError(
            f"splits must be {num_members} numbers of rows, one for each process, that add up to "
            f"the {rows} rows of {name}, but is {list(splits)}."
        )
    return [int(number) for number in splits]
