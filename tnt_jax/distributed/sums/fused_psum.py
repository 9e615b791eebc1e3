"""Sums over the ranks at the lowest cost."""

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import jax
import jax.numpy as jnp

from tnt_jax import _jax
from tnt_jax.distributed.shared_sums import joining as shared_sums

# Below this size, between CPU processes, a copy into a joint array costs less than a separate sum;
# see benchmarks/README.md.
_SMALL_BYTES = 2**20


def psum(tree: Any, *, join_small: bool | None = None, axis_name: str | None = None) -> Any:
    """Returns the sum over the ranks, or an axis, inside `shard_map`.

    By `join_small`, arrays below 1 MiB with the same dtype are summed as one; that is the default
    between CPU processes, where each sum waits up to milliseconds for another process's thread.
    """
    axes = _jax.rank_axes() if axis_name is None else axis_name
    # XLA's CPU compiler would keep the collective of one rank, which copies all gradients. With
    # stages, `shard_map` must see that values are the same on all ranks.
    if jax.lax.axis_size(axes) == 1 and _jax.STAGE_AXIS not in _jax.mapped_axes():
        return tree
    if not (_has_slow_starts() if join_small is None else join_small):
        return jax.lax.psum(tree, axes)
    leaves, structure = jax.tree.flatten(tree)
    # Joined with parameters of stages, those of all stages would seem to differ between stages.
    on_stages = [_jax.STAGE_AXIS in _jax.varying_axes(x) for x in leaves]
    places = groups_of_small(leaves, _SMALL_BYTES, kinds=on_stages)
    groups = [[leaves[index] for index in indices] for indices in places]
    joined = [group[0] if len(group) == 1 else flatten(group) for group in groups]
    results: dict[int, Any] = {}
    for indices, group, total in zip(places, groups, jax.lax.psum(joined, axes), strict=True):
        parts = [total] if len(group) == 1 else split_like(total, group)
        results.update(zip(indices, parts, strict=True))
    return structure.unflatten([results[index] for index in range(len(leaves))])


def groups_of_small(
    arrays: Sequence[Any], limit: int, *, kinds: Sequence[Any] | None = None
) -> list[list[int]]:
    """Returns the positions of arrays below `limit` bytes, grouped by dtype and by their `kinds`.

    Larger arrays and plain numbers are groups of their own.
    """
    groups: dict[Any, list[int]] = {}
    for index, x in enumerate(arrays):
        is_small = hasattr(x, "dtype") and x.size * x.dtype.itemsize < limit
        kind = None if kinds is None else kinds[index]
        groups.setdefault((x.dtype, kind) if is_small else index, []).append(index)
    return list(groups.values())


def flatten(arrays: Sequence[jax.Array]) -> jax.Array:
    """Returns arrays of one dtype as one array `[total size]`."""
    parts = [x.reshape(-1) for x in arrays]
    return parts[0] if len(parts) == 1 else jnp.concatenate(parts)


def split_like(flat: jax.Array, arrays: Sequence[Any]) -> list[jax.Array]:
    """Returns the pieces of `flat`, `[total size]`, in the shapes of `arrays`."""
    ends = accumulate(x.size for x in arrays)
    return [flat[end - x.size : end].reshape(x.shape) for x, end in zip(arrays, ends, strict=True)]


def _has_slow_starts() -> bool:
    is_cpu = jax.default_backend() == "cpu"
    return jax.process_count() > 1 and is_cpu and not shared_sums.are_open()
