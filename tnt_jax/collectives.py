"""Sums over ranks: gradients in fused buckets inside a step, and pytrees of host values between processes."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils

from tnt_jax import _jax
from tnt_jax.runtime import init

# Measured for 8 modelled H100s, chained and last layer first; Horovod and DDP use 128 and 25 MiB.
DEFAULT_BUCKET_BYTES = 25 * 2**20
_MESSAGE_BYTES = 2048


def plan_buckets(nbytes: Sequence[int], threshold: int, *, kinds: Sequence[Any] | None = None) -> list[list[int]]:
    """Groups consecutive arrays into buckets by Tarantella's greedy rule.

    A bucket takes further arrays as long as it holds fewer than `threshold` bytes; so a bucket can exceed the threshold by its last
    array, and no array is split.

    Args:
        nbytes: Size of each array, in bytes, in the order in which they will be reduced.
        threshold: Size, in bytes, from which a bucket is full; 0 gives each array a bucket of its own.
        kinds: What must be equal within a bucket, one value for each array (its dtype); everything fits together by default.

    Returns:
        Indices into `nbytes`, one list per bucket; concatenated they are `range(len(nbytes))`.

    Raises:
        ValueError: If `threshold` is negative.

    Example:
        >>> plan_buckets([376, 68, 8, 324], threshold=40)
        [[0], [1], [2, 3]]
    """
    if threshold < 0:
        raise ValueError(f"The threshold of gradient buckets must be at least 0 bytes, but is {threshold}.")
    buckets: list[list[int]] = []
    size = threshold
    for index, bytes_ in enumerate(nbytes):
        if size >= threshold or (kinds is not None and kinds[index] != kinds[index - 1]):
            buckets.append([])
            size = 0
        buckets[-1].append(index)
        size += bytes_
    return buckets


def sum_in_buckets(tree: Any, *, threshold: int, in_order: bool) -> Any:
    """Returns the sum of `tree` over the ranks, inside `shard_map` over the data axis.

    Leaves are reduced from the last to the first: backpropagation finishes the last layers first.

    Args:
        tree: Arrays that vary over the ranks, usually gradients.
        threshold: Bucket threshold in bytes, see `plan_buckets`.
        in_order: Whether each bucket waits for the one before. On a GPU this keeps the compiler from merging the buckets again and
            from sending first layers first; a CPU ignores it.
    """
    leaves, structure = jax.tree.flatten(tree)
    backwards = leaves[::-1]
    plan = plan_buckets([x.size * x.dtype.itemsize for x in backwards], threshold, kinds=[x.dtype for x in backwards])
    summed: list[jax.Array] = []
    for bucket in plan:
        arrays = [backwards[index] for index in bucket]
        if in_order and summed:
            arrays, _ = jax.lax.optimization_barrier((arrays, summed[-1]))
        summed.extend(jax.lax.psum(arrays, _jax.DATA_AXIS))
    return jax.tree.unflatten(structure, summed[::-1])


def average_model_state(tree: Any, share: jax.Array | None) -> Any:
    """Returns model state that is the same on every rank: floating leaves that differ between ranks are averaged.

    Args:
        tree: Model state after a step, inside `shard_map`. A leaf that is the same everywhere is kept as it is.
        share: This rank's part of the global batch's real rows, a scalar that sums to 1 over the ranks; None for equal parts.

    Raises:
        TypeError: If a leaf that is not floating differs between ranks.
    """

    def average(path: Any, leaf: jax.Array) -> jax.Array:
        if not _jax.is_varying(leaf):
            return leaf
        if not jnp.issubdtype(leaf.dtype, jnp.inexact):
            raise TypeError(
                f"Model state {jax.tree_util.keystr(path)} ({leaf.dtype}) differs between ranks and cannot be averaged. "
                "Only floating state may depend on the batch; make this state the same on every rank, for instance with "
                f"jax.lax.psum(..., {_jax.DATA_AXIS!r})."
            )
        if share is None:
            return jax.lax.pmean(leaf, _jax.DATA_AXIS)
        return jax.lax.psum(leaf * share.astype(leaf.dtype), _jax.DATA_AXIS)

    return jax.tree_util.tree_map_with_path(average, tree)


def broadcast(tree: Any, *, root: int = 0) -> Any:
    """Returns the host values that process `root` passes, on every process.

    Args:
        tree: Pytree of numbers and NumPy or JAX arrays, of the same structure and shapes on every process.
        root: Process whose values win.

    Returns:
        The same structure with NumPy arrays.
    """
    if init() and jax.process_count() == 1:
        return jax.tree.map(np.asarray, tree)
    return multihost_utils.broadcast_one_to_all(tree, is_source=jax.process_index() == root)


def all_gather(tree: Any) -> Any:
    """Returns each leaf of all processes stacked along a leading dimension `[num_processes, ...]`, on every process.

    Args:
        tree: Pytree of numbers and arrays, of the same structure and shapes on every process.
    """
    if init() and jax.process_count() == 1:
        return jax.tree.map(lambda x: np.asarray(x)[None], tree)
    return multihost_utils.process_allgather(jax.tree.map(np.asarray, tree))


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
