"""Collectives outside steps for arrays of rows: gathered, exchanged, or reduced and scattered.

A row is an entry of an array's leading dimension. Processes follow one another in rising order.
"""

import json
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from tnt_jax.distributed.host.collectives import Op, check_numbers, problem_of, reduce_rows
from tnt_jax.distributed.host.exchange import (
    Gathered,
    agree_on_exchange,
    are_small,
    collected,
    exclusive,
    gather,
    gather_chunks,
    reduced,
    typed,
)
from tnt_jax.distributed.joining.process_sets import ProcessSet, members_of
from tnt_jax.distributed.liveness.rendezvous import meet


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
        gathered = gather("all_gather_rows", tree, members, is_ragged=True, is_joinable=True)
        num_rows = [
            sum(rows for rows, *_ in of_leaf) for of_leaf in zip(*gathered.shapes, strict=True)
        ]
        return _unflatten(gathered, collected(gathered), num_rows)


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
        gathered = gather("all_to_all", tree, members, check, is_ragged=True)
        told = [] if splits is None else [int(number) for number in splits]
        every = gather("all_to_all", np.asarray(told, np.int64), members, is_ragged=True)
        ends = np.cumsum([rows[0][0] for rows in every.shapes])
        tables = np.split(collected(every)[0].view(np.int64), ends)[:-1]
        received = [
            [_own_range(rows, table.tolist(), len(members), gathered.own) for rows, *_ in shapes]
            for table, shapes in zip(tables, gathered.shapes, strict=True)
        ]

        def part(position: int, index: int) -> tuple[int, int]:
            leaf, (begin, end) = gathered.leaves[index], received[position][index]
            row_bytes = math.prod(leaf.shape[1:]) * leaf.itemsize
            return begin * row_bytes, end * row_bytes

        num_rows = [
            sum(end - begin for begin, end in ranges) for ranges in zip(*received, strict=True)
        ]
        return _unflatten(gathered, collected(gathered, part), num_rows)


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
        gathered = gather(call, tree, members, check, problem=problem_of(op))
        totals = reduced(gathered, lambda rows: reduce_rows(rows, op))
        return gathered.structure.unflatten(
            np.array_split(total, len(members))[gathered.own].copy() for total in totals
        )


def join(*, process_set: ProcessSet | None = None) -> int:
    """Waits until every process has called `join`.

    Meanwhile this process takes part, without values, in the others' `all_reduce` and
    `all_gather_rows`. It is for loops that exchange host values batch by batch, where processes
    have different numbers of batches. A jitted step runs on all ranks or on none; there
    `tnt.distribute` hands out uneven data, with masks.

    Args:
        process_set: The ranks among whose processes this happens; all by default.

    Returns:
        The number of the process that joined last; of several the highest.

    Raises:
        RuntimeError: On every process, if one that has not joined makes another call that needs all
            processes.
    """
    members = members_of(process_set)
    num_calls = 0
    with exclusive("join"):
        while True:
            texts = meet("join", json.dumps({"joined": num_calls}), members=members, role="joins")
            entries = [json.loads(text) for text in texts]
            if all("joined" in entry for entry in entries):
                # Whoever has followed the fewest calls has joined last.
                told = zip(entries, members, strict=True)
                return min(told, key=lambda x: (x[0]["joined"], -x[1]))[1]
            present = agree_on_exchange("join", entries, members)
            if not are_small(entries):
                total = max(entries[position]["total"] for position in present)
                for _ in gather_chunks([], members, total):
                    pass  # Each chunk is a collective that needs this process.
            num_calls += 1


def _unflatten(gathered: Gathered, data: list[np.ndarray], num_rows: list[int]) -> Any:
    """Returns the tree of arrays `[num_rows, ...]` that bytes are."""
    return gathered.structure.unflatten(
        typed(part, leaf.dtype, (rows, *leaf.shape[1:]))
        for part, rows, leaf in zip(data, num_rows, gathered.leaves, strict=True)
    )


def _own_range(rows: int, splits: list[int], num_members: int, own: int) -> tuple[int, int]:
    """Returns the first of a process's rows that go to the process at `own`, and the end."""
    shares = _shares("", rows, splits or None, num_members)
    begin = sum(shares[:own])
    return begin, begin + shares[own]


def _shares(name: str, rows: int, splits: Sequence[int] | None, num_members: int) -> list[int]:
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
