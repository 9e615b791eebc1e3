"""Sums over the ranks, where each costs as little as it can."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from tnt_jax import _jax

# Below this size the copy into a common array costs less than a sum of its own between processes on CPUs, see docs/performance.md.
_SMALL_BYTES = 2**20


def psum(tree: Any, *, join_small: bool | None = None) -> Any:
    """Returns the sum over the ranks, inside `shard_map`.

    XLA's CPU compiler keeps the collective of a single rank, which copies all gradients; here one rank keeps what it has.

    Args:
        tree: Arrays that vary over the ranks, and numbers that do not.
        join_small: Whether arrays of less than 1 MiB and of one dtype are summed as one; by default between processes on CPUs, where
            each sum waits, up to milliseconds, for a thread of another process to wake up.
    """
    if jax.lax.axis_size(_jax.DATA_AXIS) == 1:
        return tree
    if not (_has_slow_starts() if join_small is None else join_small):
        return jax.lax.psum(tree, _jax.DATA_AXIS)
    leaves, structure = jax.tree.flatten(tree)
    joined, take_apart = join_small_ones(leaves)
    return structure.unflatten(take_apart(jax.lax.psum(joined, _jax.DATA_AXIS)))


def join_small_ones(arrays: Sequence[Any]) -> tuple[list[Any], Callable[[Sequence[Any]], list[Any]]]:
    """Returns arrays, those of less than 1 MiB and of one dtype as one, and what takes such a list apart again.

    Args:
        arrays: Arrays and plain numbers.
    """
    places = groups_of_small(arrays, _SMALL_BYTES)
    groups = [[arrays[index] for index in indices] for indices in places]

    def take_apart(joined: Sequence[Any]) -> list[Any]:
        results: dict[int, Any] = {}
        for indices, group, whole in zip(places, groups, joined, strict=True):
            results.update(zip(indices, [whole] if len(group) == 1 else split_like(whole, group), strict=True))
        return [results[index] for index in range(len(arrays))]

    return [group[0] if len(group) == 1 else flatten(group) for group in groups], take_apart


def groups_of_small(arrays: Sequence[Any], limit: int) -> list[list[int]]:
    """Returns positions of arrays, those of one dtype and fewer than `limit` bytes together; others, and plain numbers, alone."""
    groups: dict[Any, list[int]] = {}
    for index, x in enumerate(arrays):
        is_small = hasattr(x, "dtype") and x.size * x.dtype.itemsize < limit
        groups.setdefault(x.dtype if is_small else index, []).append(index)
    return list(groups.values())


def flatten(arrays: Sequence[jax.Array]) -> jax.Array:
    """Returns arrays of one dtype as one, `[total size]`."""
    return arrays[0].reshape(-1) if len(arrays) == 1 else jnp.concatenate([x.reshape(-1) for x in arrays])


def split_like(flat: jax.Array, arrays: Sequence[Any]) -> list[jax.Array]:
    """Returns the parts of `flat`, `[total size]`, in the shapes of `arrays`, of which nothing else is used."""
    parts, start = [], 0
    for x in arrays:
        parts.append(flat[start : start + x.size].reshape(x.shape))
        start += x.size
    return parts


def _has_slow_starts() -> bool:
    return jax.process_count() > 1 and jax.default_backend() == "cpu"
