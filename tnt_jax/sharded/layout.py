"""Where the arrays of a training state lie on a mesh, and how blocks of a list reach their stages.

In the training state each array of each block of a list is cut over the axis `stage` along a
dimension of its own, so that a device keeps 1 / stages of it and of its optimizer state. At the
start of a step the arrays of all blocks are stacked, and one all-to-all gives each stage whole
arrays of its own blocks (`at_stages`). Its transpose brings gradients back.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from tnt_jax import _jax
from tnt_jax.distributed.sums.reduction import plan_buckets
from tnt_jax.sharded.blocks.block_list import BlockList, Staged
from tnt_jax.sharded.gathering import Cut
from tnt_jax.sharded.options import Axis, Dims, Rule, Shapes, choose_axes, with_axis, with_fsdp
from tnt_jax.sharded.pipeline.pipeline import Pipeline
from tnt_jax.sharded.pipeline.schedules import STAGE_AXIS, own_part
from tnt_jax.train.state import is_array, state_arrays

# Where a boxed array of Linen lies in its box.
_VALUE = "/value"
# Axes that a step handles itself; the compiler handles the others.
_MAPPED = (_jax.FSDP_AXIS, STAGE_AXIS)
# Smaller arrays share an all-to-all.
_BUCKET_BYTES = 4 * 2**20


@dataclass(frozen=True)
class Layout:
    """Shapes and axes of parameters on a mesh, by path in the order of leaves, and `blocks`."""

    mesh: Mesh
    shapes: Shapes
    axes: Dims
    structure: Any
    blocks: BlockList | None = None

    @classmethod
    def of(
        cls,
        params: Any,
        mesh: Mesh,
        rules: Sequence[Rule] = (),
        names: Dims | None = None,
        pipeline: Pipeline | None = None,
    ) -> "Layout":
        """Returns the layout of whole parameters, or of their descriptions.

        `names` are logical names of dimensions by path, besides those in `params`.
        """
        shapes = {path: tuple(x.shape) for path, x in state_arrays(params).items()}
        known = dict(names or {}) | boxed_names(params)
        plain = {path.removesuffix(_VALUE): shape for path, shape in shapes.items()}
        chosen = choose_axes(plain, known, rules, dict(mesh.shape))
        blocks = None
        if pipeline is not None:
            num_stages = mesh.shape.get(STAGE_AXIS, 1)
            num_parts = mesh.shape.get(_jax.FSDP_AXIS, 1)
            listed = BlockList.of(params, pipeline.path)
            if listed is None:
                staged = _with_stages(chosen, plain, pipeline, num_stages, num_parts)
            else:
                staged = _with_listed_stages(chosen, plain, listed, num_stages)
            # One stage divides nothing, but the pipeline must fit the model all the same.
            if num_stages > 1:
                chosen, blocks = staged, listed
        axes = dict(zip(shapes, chosen.values(), strict=True))
        return cls(mesh, shapes, axes, jax.tree.structure(params), blocks)

    @property
    def manual_specs(self) -> Any:
        """The tree of partitions over `fsdp` and `stage` alone, for `shard_map`."""
        return self.structure.unflatten(
            PartitionSpec(*(axis if axis in _MAPPED else None for axis in axes))
            for axes in self.axes.values()
        )

    @property
    def cuts(self) -> list[Cut | None]:
        """How each leaf is cut over `fsdp`; None if it is not."""
        return [cut_of(axes) for axes in self.axes.values()]

    @property
    def shardings(self) -> Any:
        """The tree of the shardings of the parameters."""
        return self.structure.unflatten([self._sharding(axes) for axes in self.axes.values()])

    def like_params(self, tree: Any, *, before: int = 0) -> Any:
        """Returns the shardings of another tree, such as the state of an optimizer.

        An array lies like the parameter whose path is part of its own, if it has its shape after
        the first `before` dimensions; other arrays are replicated.
        """
        found = [
            self._axes_at(path, tuple(x.shape)[before:]) for path, x in state_arrays(tree).items()
        ]
        placed = [self._sharding((None,) * before + axes if axes else ()) for axes in found]
        return jax.tree.structure(tree, is_leaf=is_array).unflatten(placed)

    def _axes_at(self, path: str, shape: tuple[int, ...]) -> tuple[Axis, ...]:
        """Returns the axes of the parameter with the longest path that is part of another path."""
        keys = path.split("/")
        for length in range(len(keys), 0, -1):
            for start in range(len(keys) - length + 1):
                part = "/".join(keys[start : start + length])
                if self.shapes.get(part) == shape:
                    return self.axes[part]
        return ()

    def _sharding(self, axes: tuple[Axis, ...]) -> NamedSharding:
        return NamedSharding(self.mesh, PartitionSpec(*axes))


def boxed_names(params: Any) -> dict[str, tuple[Axis, ...]]:
    """Returns the logical names that Linen modules box their parameters with, by path."""
    nodes = jax.tree_util.tree_leaves_with_path(params, is_leaf=_is_boxed)
    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): tuple(node.names)
        for path, node in nodes
        if _is_boxed(node)
    }


def _is_boxed(node: Any) -> bool:
    return hasattr(node, "names") and hasattr(node, "unbox")


def cut_of(axes: tuple[Axis, ...]) -> Cut | None:
    """Returns how an array with such axes is cut over `fsdp`; None if it is not."""
    if _jax.FSDP_AXIS not in axes:
        return None
    others = tuple(None if axis == _jax.FSDP_AXIS else axis for axis in axes)
    return Cut(axes.index(_jax.FSDP_AXIS), others=others if any(others) else None)


def _with_stages(
    chosen: Dims, shapes: Shapes, pipeline: Pipeline, num_stages: int, num_parts: int
) -> dict[str, tuple[Axis, ...]]:
    stacked = [path for path in shapes if pipeline.holds(path)]
    if not stacked:
        known = sorted({path.rpartition("/")[0] for path in shapes if "/" in path})
        raise ValueError(
            f"A pipeline over {pipeline.path!r} needs stacked layers of this path, such as nn.scan "
            f"makes, or a list of blocks ({pipeline.path}_0, {pipeline.path}_1, ...), but there "
            f"are none. Parameters lie in {', '.join(known)}."
        )
    for path in stacked:
        if not shapes[path] or shapes[path][0] % num_stages:
            raise ValueError(
                f"{path} {list(shapes[path])} cannot be divided over the axis 'stage' of "
                f"{num_stages} devices: its first dimension, the layers, must be a multiple of "
                "them. Choose another mesh, or another number of layers."
            )
    return {
        path: _staged(path, axes, shapes[path], num_parts) if path in stacked else axes
        for path, axes in chosen.items()
    }


def _with_listed_stages(
    chosen: Dims, shapes: Shapes, blocks: BlockList, num_stages: int
) -> dict[str, tuple[Axis, ...]]:
    """Returns axes with `stage` for the largest dimension of each array that stages divide."""
    if len(blocks.names) % num_stages:
        raise ValueError(
            f"The {len(blocks.names)} block(s) of the list {', '.join(blocks.names[:2])}, ... "
            f"cannot be divided over the axis 'stage' of {num_stages} devices: their number must "
            "be a multiple of them. Choose another mesh, or another number of blocks."
        )
    paths, found = list(shapes), dict(chosen)
    for indices in blocks.indices:
        first = paths[indices[0]]
        for path in (paths[index] for index in indices):
            if chosen[path] != chosen[first]:
                raise ValueError(
                    f"Sharding rules cut {path} by {chosen[path]} and {first} by {chosen[first]}, "
                    "but the blocks of a pipeline must be cut alike. Give one rule for all blocks."
                )
            found[path] = with_axis(chosen[path], shapes[path], STAGE_AXIS, num_stages)
    return found


def _staged(
    path: str, axes: tuple[Axis, ...], shape: tuple[int, ...], num_parts: int
) -> tuple[Axis, ...]:
    """Returns the axes of stacked layers, whose first dimension the stages divide."""
    first, *others = axes
    if first not in (None, _jax.FSDP_AXIS):
        raise ValueError(
            f"A sharding rule cuts the first dimension of {path} {list(shape)} over the axis "
            f"{first!r}, but these are the layers, which the stages of a pipeline divide. Give "
            "None for it."
        )
    if first == _jax.FSDP_AXIS:
        others = with_fsdp(tuple(others), shape[1:], num_parts)
    return STAGE_AXIS, *others


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
        is_cut_further = any(axis not in (None, *_MAPPED) for axis in axes[index])
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
