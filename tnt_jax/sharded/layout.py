"""Where the arrays of a training state lie on a mesh."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from tnt_jax import _jax
from tnt_jax.sharded.blocks.block_list import BlockList
from tnt_jax.sharded.gathering import Cut
from tnt_jax.sharded.pipeline.pipeline import Pipeline
from tnt_jax.sharded.rules import Axis, Rule, choose_axes, with_axis, with_fsdp
from tnt_jax.train.state_arrays import is_array, state_arrays

# Where a boxed array of Linen lies in its box.
_VALUE = "/value"
# Axes that a step handles itself; the compiler handles the others.
_MAPPED = (_jax.FSDP_AXIS, _jax.STAGE_AXIS)


@dataclass(frozen=True)
class Layout:
    """Shapes and axes of parameters on a mesh, by path in the order of leaves, and `blocks`."""

    mesh: Mesh
    shapes: Mapping[str, tuple[int, ...]]
    axes: Mapping[str, tuple[Axis, ...]]
    structure: Any
    blocks: BlockList | None = None

    @classmethod
    def of(
        cls,
        params: Any,
        mesh: Mesh,
        rules: Sequence[Rule] = (),
        names: Mapping[str, tuple[Axis, ...]] | None = None,
        pipeline: Pipeline | None = None,
    ) -> "Layout":
        """Returns the layout of whole parameters, or of their descriptions.

        `names` are logical names of dimensions by path, besides those in `params`. A ValueError is
        as of `choose_axes`, or says that the stages do not divide the layers.
        """
        shapes = {path: tuple(x.shape) for path, x in state_arrays(params).items()}
        known = dict(names or {}) | boxed_names(params)
        plain = {path.removesuffix(_VALUE): shape for path, shape in shapes.items()}
        chosen = choose_axes(plain, known, rules, dict(mesh.shape))
        blocks = None
        if pipeline is not None:
            num_stages = mesh.shape.get(_jax.STAGE_AXIS, 1)
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
    chosen: Mapping[str, tuple[Axis, ...]],
    shapes: Mapping[str, tuple[int, ...]],
    pipeline: Pipeline,
    num_stages: int,
    num_parts: int,
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
    chosen: Mapping[str, tuple[Axis, ...]],
    shapes: Mapping[str, tuple[int, ...]],
    blocks: BlockList,
    num_stages: int,
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
            found[path] = with_axis(chosen[path], shapes[path], _jax.STAGE_AXIS, num_stages)
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
    return _jax.STAGE_AXIS, *others
