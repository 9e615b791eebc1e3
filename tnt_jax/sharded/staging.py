"""Brings the arrays of a list of blocks to the stages that compute with them, and back.

In the training state each array of each block is cut over the axis `stage` along a dimension of its
own, so that a device keeps 1 / stages of it and of its optimizer state. At the start of a step the
arrays of all blocks are stacked, and one all-to-all gives each stage whole arrays of its own
blocks. Its transpose brings gradients back.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from tnt_jax import _jax
from tnt_jax.distributed.sums.reduction import plan_buckets
from tnt_jax.sharded.blocks.block_list import Staged
from tnt_jax.sharded.gathering import Cut
from tnt_jax.sharded.layout import Layout, cut_of
from tnt_jax.sharded.pipeline.schedules import STAGE_AXIS, own_part
from tnt_jax.sharded.rules import Axis

# Smaller arrays share an all-to-all.
_BUCKET_BYTES = 4 * 2**20
_NO_STAGE = (None, STAGE_AXIS)


class AtStages(NamedTuple):
    """Parameters, with stacked layers of this stage; each leaf's `fsdp` cut and whole shape."""

    params: Any
    cuts: list[Cut | None]
    shapes: list[tuple[int, ...]]


def at_stages(params: Any, layout: Layout) -> AtStages:
    """Returns parameters with blocks of a list, if any, at their stages; inside `shard_map`."""
    shapes, blocks = list(layout.shapes.values()), layout.blocks
    if blocks is None:
        return AtStages(params, layout.cuts, shapes)
    axes = list(layout.axes.values())
    leaves = jax.tree.leaves(params)
    of_blocks = [axes[indices[0]] for indices in blocks.indices]
    stacks = [jnp.stack([leaves[i] for i in indices]) for indices in blocks.indices]
    staged = Staged.of(params, blocks, _exchanged(stacks, of_blocks))
    num_blocks = len(blocks.names)
    stacked_shapes = [(num_blocks, *shapes[indices[0]]) for indices in blocks.indices]
    in_blocks = {index for indices in blocks.indices for index in indices}
    others = [index for index in range(len(shapes)) if index not in in_blocks]
    cuts = [layout.cuts[index] for index in others] + [cut_of(_stacked(x)) for x in of_blocks]
    return AtStages(staged, cuts, [shapes[index] for index in others] + stacked_shapes)


def _stacked(axes: Sequence[Axis]) -> tuple[Axis, ...]:
    """Returns the axes of the stacked arrays of blocks with some axes, at their stages."""
    return STAGE_AXIS, *(None if axis == STAGE_AXIS else axis for axis in axes)


def _exchanged(stacks: Sequence[jax.Array], axes: Sequence[Sequence[Axis]]) -> list[jax.Array]:
    """Returns the stacked arrays of this stage's blocks."""
    found = [
        None if STAGE_AXIS in of_array else own_part(x)
        for x, of_array in zip(stacks, axes, strict=True)
    ]
    cut = [index for index, x in enumerate(found) if x is None]
    sizes, kinds = [], []
    for index in cut:
        x = stacks[index]
        # Joined, an array would lose its cut over an axis that the compiler handles.
        is_cut_further = any(axis not in (*_NO_STAGE, _jax.FSDP_AXIS) for axis in axes[index])
        sizes.append(x.size * x.dtype.itemsize)
        kinds.append(index if is_cut_further else (x.dtype, _jax.varying_axes(x)))
    for bucket in plan_buckets(sizes, _BUCKET_BYTES, kinds=kinds):
        indices = [cut[number] for number in bucket]
        dims = [list(axes[index]).index(STAGE_AXIS) for index in indices]
        results = _all_to_all([stacks[index] for index in indices], dims)
        for index, x in zip(indices, results, strict=True):
            found[index] = x
    return [x for x in found if x is not None]


def _all_to_all(stacks: Sequence[jax.Array], dims: Sequence[int]) -> list[jax.Array]:
    """Returns whole arrays of this stage's blocks, from parts of those of all blocks."""
    if len(stacks) == 1:
        return [
            jax.lax.all_to_all(
                stacks[0], STAGE_AXIS, split_axis=0, concat_axis=dims[0] + 1, tiled=True
            )
        ]
    num_stages = jax.lax.axis_size(STAGE_AXIS)
    joined = jnp.concatenate([x.reshape(num_stages, -1) for x in stacks], axis=1)
    received = jax.lax.all_to_all(joined, STAGE_AXIS, split_axis=0, concat_axis=0, tiled=True)
    results, start = [], 0
    for x, dim in zip(stacks, dims, strict=True):
        shape = (x.shape[0] // num_stages, *x.shape[1:])
        size = math.prod(shape)
        parts = received[:, start : start + size].reshape(num_stages, *shape)
        start += size
        whole = (*shape[: dim + 1], num_stages * shape[dim + 1], *shape[dim + 2 :])
        results.append(jnp.moveaxis(parts, 0, dim + 1).reshape(whole))
    return results
