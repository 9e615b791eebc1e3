"""Collectives on host values between processes, and the description of a step's collectives.

`broadcast`, `all_gather` and `all_reduce` take pytrees. `reduction.py` sums gradients.
"""

import json
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple, TypeVar, cast, get_args

import jax.numpy as jnp
import numpy as np

from tnt_jax.distributed.host.comparison import describe_differences
from tnt_jax.distributed.host.exchange import (
    collected,
    connect_devices,
    exclusive,
    gather,
    raise_first,
    reduced,
    sent_from,
    typed,
)
from tnt_jax.distributed.joining.process_sets import ProcessSet, members_of
from tnt_jax.distributed.joining.runtime import get_process_count
from tnt_jax.distributed.liveness.phases import calling, here
from tnt_jax.distributed.liveness.rendezvous import meet
from tnt_jax.distributed.sums.hlo import Collective, read_collectives, read_planned, split_programs

Op = Literal["sum", "mean", "min", "max", "prod"]
_NUMPY: dict[str, Callable] = {name: getattr(np, name) for name in get_args(Op)}
# Above this, 64-bit integer results are computed again with unlimited integers, because the float64
# estimate may be rounded.
_DOUBTFUL = 2.0**62
_MESSAGE_CHARACTERS = 2048
_T = TypeVar("_T")


class Description(NamedTuple):
    """The collectives of a training step; print it for a summary.

    Attributes:
        planned: Kind and bytes of each collective that the step asks for, in order: gradient
            buckets and other sums.
        compiled: What the compiler made of them, in the order in which devices run them.
        reason: Why the compiler alone chooses the collectives; None if the step asks for them.
    """

    planned: list[tuple[str, int]]
    compiled: list[Collective]
    reason: str | None = None

    def __str__(self) -> str:
        lines = [] if self.reason is None else [f"chosen by the compiler: {self.reason}"]
        for title, entries in (("planned", self.planned), ("compiled", self.compiled)):
            for kind in sorted({entry[0] for entry in entries}):
                sizes = [entry[1] for entry in entries if entry[0] == kind]
                lines.append(
                    f"{title:8} {len(sizes):4} {kind:14} {sum(sizes):13,} bytes, largest "
                    f"{max(sizes):,}"
                )
        num_asynchronous = sum(x.is_asynchronous for x in self.compiled)
        lines.append(f"asynchronous: {num_asynchronous} of {len(self.compiled)}")
        return "\n".join(lines)


def describe(trainer: Any, batch: Any) -> Description:
    """Returns the collectives of a trainer's step for a host batch of this process's rows."""
    return describe_lowered(trainer.lower_train_step(batch))


def describe_lowered(lowered: Any) -> Description:
    """Returns the collectives of a step that was lowered, such as by `jax.jit(step).lower`."""
    compiled = split_programs(lowered.compile().as_text() or "")
    return Description(
        read_planned(lowered.as_text()),
        [collective for text in compiled for collective in read_collectives(text)[0]],
    )


def broadcast(tree: Any, *, root: int = 0, process_set: ProcessSet | None = None) -> Any:
    """Returns the host values of process `root` on every process.

    Dtypes and bits are kept.

    Args:
        tree: Pytree of numbers and NumPy or JAX arrays, of the same structure, shapes and dtypes on
            every process.
        root: Process whose values are returned.
        process_set: The ranks whose processes take part; all by default.

    Returns:
        The same structure with NumPy arrays.

    Raises:
        ValueError: On every process, if structures, shapes or dtypes differ; the text names the
            leaf.
    """
    members = members_of(process_set)
    known = f"one of the processes {members} of the set"
    if process_set is None:
        known = f"a process from 0 to {len(members) - 1}"
    problem = None if root in members else ValueError(f"root must be {known}, but is {root}.")
    with exclusive("broadcast"):
        gathered = gather(f"broadcast (root={root})", tree, members, problem=problem)
        return gathered.structure.unflatten(sent_from(gathered, root))


def all_gather(tree: Any, *, process_set: ProcessSet | None = None) -> Any:
    """Returns each leaf of all processes, stacked along a new dimension `[num_processes, ...]`.

    Every process gets the result.

    Args:
        tree: Pytree of numbers and arrays, of the same structure, shapes and dtypes on every
            process; for rows of which processes have different numbers see `all_gather_rows`.
        process_set: The ranks whose processes take part; all by default.

    Raises:
        ValueError: On every process, if structures, shapes or dtypes differ; the text names the
            leaf.
    """
    members = members_of(process_set)
    with exclusive("all_gather"):
        gathered = gather("all_gather", tree, members)
        return gathered.structure.unflatten(
            typed(data, leaf.dtype, (len(members), *leaf.shape))
            for data, leaf in zip(collected(gathered), gathered.leaves, strict=True)
        )


def all_reduce(tree: Any, op: Op = "sum", *, process_set: ProcessSet | None = None) -> Any:
    """Returns the sum, or another reduction, of each leaf over all processes.

    Every process gets the result, which is that of NumPy for the stacked arrays, `np.sum(stacked,
    axis=0)`. Shapes and most dtypes stay the same. Sums and products of booleans and integers are
    64 bits wide, because small integers would soon overflow; means of them are float64. Integers
    never wrap. Values are added in the order of the processes, so that all get the same bits.
    Processes that have called `join` do not count, not even in the divisor of a mean.

    Args:
        tree: Pytree of numbers and arrays, of the same structure, shapes and dtypes on every
            process.
        op: `"sum"`, `"mean"`, `"min"`, `"max"` or `"prod"`.
        process_set: The ranks whose processes take part; all by default.

    Raises:
        TypeError: If a leaf is not numeric.
        ValueError: On every process, if structures, shapes or dtypes differ (the text names the
            leaf), or `op` is unknown.
        OverflowError: On every process, if a sum or product of integers has more than 64 bits.
    """
    members = members_of(process_set)
    with exclusive("all_reduce"):
        call, check = f"all_reduce (op={op})", check_numbers("all_reduce")
        gathered = gather(call, tree, members, check, problem=problem_of(op), is_joinable=True)
        return gathered.structure.unflatten(reduced(gathered, lambda rows: reduce_rows(rows, op)))


@calling("barrier")
def barrier(*, timeout_s: int = 300, process_set: ProcessSet | None = None) -> None:
    """Waits until every process has called it.

    Args:
        timeout_s: Seconds to wait.
        process_set: The ranks whose processes take part; all by default.

    Raises:
        RuntimeError: If a process has not arrived in time, or came to another call; the text names
            it.
        ValueError: If this process is no member of the set.
    """
    meet("barrier", members=members_of(process_set), timeout_s=timeout_s)


def reduce_rows(rows: np.ndarray, op: Op) -> np.ndarray:
    """Returns the reduction of `[num_processes, size]` over the first dimension; see `all_reduce`.

    Floating numbers below 32 bits are summed and multiplied in float64 and rounded once.
    """
    dtype = rows.dtype
    reduce = _NUMPY[op]
    if op in ("min", "max"):
        return reduce(rows, axis=0)
    if dtype.kind in "biu" or jnp.issubdtype(dtype, jnp.integer):
        if dtype.kind not in "biu":
            is_unsigned = jnp.issubdtype(dtype, jnp.unsignedinteger)
            rows = rows.astype(np.uint64 if is_unsigned else np.int64)
        result = reduce(rows, axis=0)
        if op != "mean":
            _check_fits(rows, result, op)
        return result
    if dtype.itemsize < 4:
        return reduce(rows.astype(np.float64), axis=0).astype(dtype)
    return reduce(rows, axis=0)


def _check_fits(rows: np.ndarray, result: np.ndarray, op: Op) -> None:
    """Raises an OverflowError if NumPy has wrapped an element of the result."""
    with np.errstate(over="ignore"):
        estimate = _NUMPY[op](np.abs(rows.astype(np.float64)), axis=0)
    doubtful = estimate >= _DOUBTFUL
    if not doubtful.any():
        return
    exact = _NUMPY[op](rows[:, doubtful].astype(object), axis=0)
    if np.any(exact != result[doubtful].astype(object)):
        raise OverflowError(
            f"The {op} over the processes of an array of {rows.dtype} has more than 64 bits. Pass "
            "float64, or smaller numbers."
        )


def problem_of(op: Any) -> ValueError | None:
    """Returns what is wrong with the name of a reduction, or None."""
    if op in _NUMPY:
        return None
    return ValueError(f"op must be one of {', '.join(_NUMPY)}, but is {op!r}.")


def check_numbers(call: str) -> Callable[[str, np.ndarray], None]:
    """Returns what raises a TypeError for an array that is not of numbers, given its path."""

    def check(name: str, array: np.ndarray) -> None:
        # NumPy does not know bfloat16 as a number.
        if not (array.dtype.kind in "biufc" or jnp.issubdtype(array.dtype, jnp.number)):
            raise TypeError(
                f"{call} takes numbers and arrays of numbers, but {name} is {array.dtype}: "
                f"{repr(array)[:200]}."
            )

    return check


def agree(
    call: str, values: Mapping[str, Any], error: Exception | None = None, *, note: Any = None
) -> list[Any]:
    """Waits for all processes, and raises on all of them if `values` differ or one has an error.

    A process with an error raises its own; the others a `RuntimeError` that quotes the first.
    Returns the notes of all processes: JSON values, which may differ.
    """
    if get_process_count() == 1:
        if error is not None:
            raise error
        return [json.loads(json.dumps(note))]  # As it would come from another process.
    failure = "" if error is None else f"{type(error).__name__}: {error}"[:_MESSAGE_CHARACTERS]
    texts = meet(
        call, json.dumps([failure, {name: str(value) for name, value in values.items()}, note])
    )
    failures, told, notes = zip(*map(json.loads, texts), strict=True)
    raise_first(error, list(failures))
    if differences := describe_differences(told):
        raise ValueError(
            f"{call} needs the same data and arguments on every process, but {differences}."
        )
    connect_devices()
    return list(notes)


def any_process(flag: bool, *, where: str) -> bool:
    """Returns, on every process, whether a flag is set on any; `where` in the program, in words."""
    get_process_count()
    return "True" in meet(where, str(bool(flag)))


def call_on_all_processes(function: Callable[[], _T]) -> _T:
    """Returns the result of a function; if it fails on any process, all raise as below."""
    if get_process_count() == 1:
        return function()
    error, result = None, cast(_T, None)
    try:
        result = function()
    except Exception as raised:  # Raised below, on every process.
        error = raised
    raise_on_all_processes(error)
    return result


def raise_on_all_processes(error: Exception | None) -> None:
    """Raises an error on all processes if one has it, so that none waits in a collective."""
    calls = here().calls
    agree(calls[-1] if calls else "check for errors", {}, error)
