"""Sums over ranks and processes: model state inside a step, pytrees of host values between processes; `reduction.py` sums gradients."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils

from tnt_jax import _jax
from tnt_jax.all_reduce import psum
from tnt_jax.hlo import Collective, read_collectives, read_planned, split_programs
from tnt_jax.runtime import Runtime, barrier, init

_MESSAGE_BYTES = 2048
# A process may read and prepare its data for long before it needs the others.
_FIRST_MEETING_S = 3600


def average_model_state(tree: Any, share: jax.Array | None) -> Any:
    """Returns model state that is the same on every rank: floating leaves that differ between ranks are averaged.

    Args:
        tree: Model state after a step, inside `shard_map`. A leaf that is the same everywhere is kept as it is.
        share: This rank's part of the global batch's real rows, a scalar that sums to 1 over the ranks; None for equal parts.

    Raises:
        TypeError: If a leaf that is not floating differs between ranks.
    """
    return with_averages(tree, psum(parts_of_averages(tree, share)), share)


def parts_of_averages(tree: Any, share: jax.Array | None) -> list[jax.Array]:
    """Returns what this rank adds to the averages of `average_model_state`, for those leaves that differ between ranks."""
    paths_and_leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    varying = [(path, leaf) for path, leaf in paths_and_leaves if _jax.is_varying(leaf)]
    for path, leaf in varying:
        check_can_be_averaged(path, leaf)
    return [leaf if share is None else leaf * share.astype(leaf.dtype) for _, leaf in varying]


def with_averages(tree: Any, totals: list[jax.Array], share: jax.Array | None) -> Any:
    """Returns model state whose leaves that differ between ranks are replaced by their averages.

    Args:
        tree: Model state after a step.
        totals: Sums over ranks of `parts_of_averages`.
        share: As in `average_model_state`.
    """
    num_ranks, remaining = jax.lax.axis_size(_jax.DATA_AXIS), iter(totals)

    def average(leaf: jax.Array) -> jax.Array:
        if not _jax.is_varying(leaf):
            return leaf
        return next(remaining) / num_ranks if share is None else next(remaining)

    return jax.tree.map(average, tree)


def check_can_be_averaged(path: Any, leaf: jax.Array) -> None:
    """Raises a TypeError if a leaf of the model state that differs between ranks is not floating.

    Args:
        path: Key path of the leaf.
        leaf: The leaf.
    """
    if not jnp.issubdtype(leaf.dtype, jnp.inexact):
        raise TypeError(
            f"Model state {jax.tree_util.keystr(path)} ({leaf.dtype}) differs between ranks and cannot be averaged. "
            "Only floating state may depend on the batch; make this state the same on every rank, for instance with "
            f"jax.lax.psum(..., {_jax.DATA_AXIS!r})."
        )


class Description(NamedTuple):
    """What ranks send one another in a training step; print it for a summary.

    Attributes:
        planned: Kind and bytes of each collective that the step asks for, in order: buckets of gradients, and other sums.
        compiled: What the compiler made of them, in the order in which devices run them.
    """

    planned: list[tuple[str, int]]
    compiled: list[Collective]

    def __str__(self) -> str:
        """Returns a line for each kind, planned and compiled."""
        lines = []
        for title, entries in (("planned", self.planned), ("compiled", self.compiled)):
            for kind in sorted({entry[0] for entry in entries}):
                sizes = [entry[1] for entry in entries if entry[0] == kind]
                lines.append(f"{title:8} {len(sizes):4} {kind:14} {sum(sizes):13,} bytes, largest {max(sizes):,}")
        return "\n".join([*lines, f"asynchronous: {sum(x.is_asynchronous for x in self.compiled)} of {len(self.compiled)}"])


def describe(model: Any, x: Any, y: Any = None, batch_size: int | None = None) -> Description:
    """Returns what the training step of a model sends between ranks: as planned, and as compiled for the devices at hand.

    Args:
        model: A compiled `tnt_jax.Model`.
        x: Data as in `Model.fit`.
        y: Targets as in `Model.fit`.
        batch_size: As in `Model.fit`.

    Raises:
        RuntimeError: If the model was not compiled.
    """
    planned = read_planned(model.lowered_text(x, y, batch_size))
    compiled = split_programs(model.lowered_text(x, y, batch_size, optimized=True))
    return Description(planned, [collective for text in compiled for collective in read_collectives(text)[0]])


def broadcast(tree: Any, *, root: int = 0) -> Any:
    """Returns the host values that process `root` passes, on every process.

    Args:
        tree: Pytree of numbers and NumPy or JAX arrays, of the same structure and shapes on every process.
        root: Process whose values win.

    Returns:
        The same structure with NumPy arrays.
    """
    if _meet_first(init()) == 1:
        return jax.tree.map(np.asarray, tree)
    return multihost_utils.broadcast_one_to_all(tree, is_source=jax.process_index() == root)


def all_gather(tree: Any) -> Any:
    """Returns each leaf of all processes stacked along a leading dimension `[num_processes, ...]`, on every process.

    Args:
        tree: Pytree of numbers and arrays, of the same structure and shapes on every process.
    """
    if _meet_first(init()) == 1:
        return jax.tree.map(lambda x: np.asarray(x)[None], tree)
    return multihost_utils.process_allgather(jax.tree.map(np.asarray, tree))


@functools.cache
def _meet_first(runtime: Runtime) -> int:
    """Returns the number of processes, once all of them have come here: before their first collective."""
    # Gloo connects CPU processes in their first collective, and gives up if one of them comes 30 s after another.
    if runtime.platform == "cpu":
        barrier(timeout_s=_FIRST_MEETING_S)
    return jax.process_count()


def all_reduce(tree: Any) -> Any:
    """Returns the sum of each leaf over all processes, on every process; dtypes and shapes are kept.

    Args:
        tree: Pytree of numbers and arrays, of the same structure and shapes on every process.

    Raises:
        TypeError: If a leaf is not numeric.
    """
    for leaf in jax.tree.leaves(tree):
        if np.asarray(leaf).dtype.kind not in "biufc" and not jnp.issubdtype(np.asarray(leaf).dtype, jnp.number):
            raise TypeError(f"all_reduce sums numbers and arrays of numbers, but got {type(leaf).__name__}: {leaf!r}.")
    return jax.tree.map(lambda stacked: np.sum(stacked, axis=0, dtype=stacked.dtype), all_gather(tree))


def raise_together(error: Exception | None) -> None:
    """Raises on every process, if an error occurred on any, so that none waits for another in a collective.

    A process with an error raises its own; the others raise a `RuntimeError` that quotes the first one.

    Args:
        error: What went wrong on this process, or None.
    """
    if init() and jax.process_count() == 1:
        if error is not None:
            raise error
        return
    text = "" if error is None else f"{type(error).__name__}: {error}"
    encoded = np.zeros(_MESSAGE_BYTES, np.uint8)
    message = np.frombuffer(text.encode(errors="replace")[:_MESSAGE_BYTES], np.uint8)
    encoded[: len(message)] = message
    messages = [bytes(row).rstrip(b"\0").decode(errors="replace") for row in all_gather(encoded)]
    if error is not None:
        raise error
    for process, other in enumerate(messages):
        if other:
            raise RuntimeError(f"Process {process} failed: {other}")
