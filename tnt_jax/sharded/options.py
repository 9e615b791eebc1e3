"""How a model is divided over a mesh, as its user chose: axes, rules for parameters, a pipeline.

A rule is a pair. `(pattern, axes)` with a tuple chooses the axis of each dimension of the
parameters whose path fits a pattern such as `"*/attention/*/kernel"`; an empty tuple leaves them
whole. `(name, axis)` chooses the axis of every dimension that a module has given that logical name.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Literal

import numpy as np
from jax.sharding import AxisType, Mesh

from tnt_jax import _jax
from tnt_jax.sharded.pipeline.pipeline import Pipeline
from tnt_jax.train.state import listed

# The devices of one process are neighbours on the last axes, which communicate most.
AXES = (_jax.DATA_AXIS, _jax.STAGE_AXIS, _jax.FSDP_AXIS, "tensor")
# One mesh axis, or none.
Axis = str | None
Rule = tuple[str, Axis | tuple[Axis, ...]]
# Of parameters by path: their shapes, and the axis, or logical name, of each dimension.
Shapes = Mapping[str, tuple[int, ...]]
Dims = Mapping[str, tuple[Axis, ...]]

# A smaller array is not worth an all-gather of its own.
_SMALL = 1024
# Options that exclude a mesh, and why.
_WAYS_OUT = {
    "reproducible": "its fixed order of additions is that of whole gradients",
    "gradient_compression": "parts of gradients are scattered, not summed on every rank",
    "ranks_per_host": "sums over hosts are those of whole gradients",
    "shard_optimizer_state": "with an axis 'fsdp' the optimizer state is sharded already",
}


@dataclass(frozen=True)
class MeshAxes:
    """Devices along each axis of a mesh; -1 for as many as are left."""

    data: int = 1  # Copies of the model, each of which trains on its rows of the global batch.
    stage: int = 1  # Stages of a pipeline.
    fsdp: int = 1  # Over which the arrays of a copy are sharded, and its rows split.
    tensor: int = 1  # Over which single operations are divided.

    @classmethod
    def of(cls, sizes: Mapping[str, int]) -> "MeshAxes":
        """Returns the axes of a mapping such as `{"data": 2, "fsdp": 4}`, which it checks."""
        if not isinstance(sizes, Mapping):
            raise TypeError(
                "mesh must map axes to numbers of devices, such as {'data': 2, 'fsdp': 4}, or be "
                f"'auto', but is {sizes!r}."
            )
        unknown = [name for name in sizes if name not in AXES]
        if unknown:
            raise ValueError(
                f"mesh has the unknown axis {unknown[0]!r}. The axes are {', '.join(AXES)}."
            )
        for name, size in sizes.items():
            is_whole = isinstance(size, (int, np.integer)) and not isinstance(size, bool)
            if not is_whole or (size < 1 and size != -1):
                raise ValueError(
                    f"mesh[{name!r}] must be a number of devices of at least 1, or -1 for those "
                    f"that are left, but is {size!r}."
                )
        if list(sizes.values()).count(-1) > 1:
            raise ValueError(f"mesh may leave one axis open with -1, but is {dict(sizes)}.")
        return cls(**{name: int(size) for name, size in sizes.items()})

    def sizes(self, num_devices: int) -> dict[str, int]:
        """Returns the size of each axis; a ValueError if they do not use just so many devices."""
        sizes = {name: getattr(self, name) for name in AXES}
        given = math.prod(size for size in sizes.values() if size != -1)
        if -1 in sizes.values():
            sizes = {name: num_devices // given if n == -1 else n for name, n in sizes.items()}
        if math.prod(sizes.values()) != num_devices:
            asked = ", ".join(f"{name} {getattr(self, name)}" for name in AXES if sizes[name] != 1)
            raise ValueError(
                f"The mesh ({asked or 'one device'}) does not fill the {num_devices} device(s) of "
                f"the job: its axes multiply to {given}. Change mesh (one axis may be -1, for "
                "the devices that are left), or choose devices with tnt_jax.init(devices=...)."
            )
        return sizes

    def build(self, devices: Mesh) -> Mesh:
        """Returns the mesh over the devices of the job, in order; of one device only `data`."""
        sizes = self.sizes(devices.size)
        named = {name: n for name, n in sizes.items() if n > 1 or name == _jax.DATA_AXIS}
        mesh = Mesh(
            devices.devices.reshape(tuple(named.values())),
            tuple(named),
            axis_types=(AxisType.Auto,) * len(named),
        )
        _check_neighbours(mesh)
        return mesh


def _check_neighbours(mesh: Mesh) -> None:
    """Raises a ValueError, alike on all, if rows of a process are no range of the global batch."""
    for process in sorted({device.process_index for device in mesh.devices.flat}):
        ranks = _jax.local_ranks(mesh, process)
        if ranks != list(range(ranks[0], ranks[-1] + 1)):
            raise ValueError(
                f"On the mesh {dict(mesh.shape)} process {process} holds the ranks {ranks}, which "
                "are not neighbours. Let the number of devices of a process divide stage * fsdp * "
                "tensor, or be a multiple of it."
            )


def checked_rules(rules: Sequence[Rule]) -> tuple[Rule, ...]:
    """Returns rules as a tuple; a TypeError or ValueError says what is wrong with one."""
    checked = []
    for rule in rules:
        is_pair = isinstance(rule, (tuple, list)) and len(rule) == 2 and isinstance(rule[0], str)
        value = rule[1] if is_pair else ()
        axes = tuple(value) if isinstance(value, (tuple, list)) else (value,)
        if not is_pair or not all(axis is None or isinstance(axis, str) for axis in axes):
            raise TypeError(
                "A sharding rule is a pair: (pattern of paths, tuple of mesh axes) or (logical "
                f"name, mesh axis), but one is {rule!r}."
            )
        known = [axis for axis in axes if axis is not None]
        unknown = [axis for axis in known if axis not in AXES[1:]]
        if unknown:
            raise ValueError(
                f"The sharding rule {rule!r} names the axis {unknown[0]!r}. Parameters can be cut "
                f"over {', '.join(AXES[1:])}."
            )
        if len(set(known)) < len(known):
            raise ValueError(f"The sharding rule {rule!r} names an axis twice.")
        checked.append((rule[0], axes if isinstance(value, (tuple, list)) else value))
    return tuple(checked)


def choose_axes(
    shapes: Shapes, names: Dims, rules: Sequence[Rule], sizes: Mapping[str, int]
) -> dict[str, tuple[Axis, ...]]:
    """Returns the mesh axis of each dimension of each parameter, by path; the first rule counts.

    What no rule cuts over `fsdp` is cut along its largest dimension that is free and that the axis
    divides (of equal ones the last), unless it has fewer than 1,024 elements. A ValueError says
    that a rule fits no parameter, or which dimension it cannot cut, and the way out.
    """
    used: set[Rule] = set()
    chosen = {
        path: _axes_of(path, shape, names.get(path, ()), rules, sizes, used)
        for path, shape in shapes.items()
    }
    unused = [rule for rule in rules if rule not in used]
    if unused:
        raise ValueError(
            f"The sharding rule {unused[0]!r} fits no parameter. {_offered(shapes, names)}"
        )
    return chosen


def _axes_of(
    path: str,
    shape: tuple[int, ...],
    names: tuple[Axis, ...],
    rules: Sequence[Rule],
    sizes: Mapping[str, int],
    used: set[Rule],
) -> tuple[Axis, ...]:
    by_path = [rule for rule in rules if isinstance(rule[1], tuple) and fnmatchcase(path, rule[0])]
    used.update(by_path)
    if by_path:
        rule = by_path[0]
        axes: Any = rule[1]
        if not axes:
            return (None,) * len(shape)
        if len(axes) != len(shape):
            raise ValueError(
                f"The sharding rule {rule!r} has {len(axes)} axes, but {path} has the shape "
                f"{list(shape)}: give one axis or None for each dimension."
            )
        chosen = tuple(axes)
    else:
        chosen = _axes_by_name(names, rules, used, len(shape))
        rule = ("the logical names of its dimensions", names)
    for dim, axis in enumerate(chosen):
        if axis is not None and shape[dim] % sizes.get(axis, 1):
            raise ValueError(
                f"{path} {list(shape)} cannot be cut along dimension {dim} over the axis {axis!r} "
                f"of {sizes[axis]} devices, which do not divide {shape[dim]} (by {rule!r}). Choose "
                f"another dimension, or leave the array whole by the rule ({path!r}, ()) before it."
            )
    present = tuple(axis if sizes.get(axis or "", 1) > 1 else None for axis in chosen)
    return with_fsdp(present, shape, sizes.get(_jax.FSDP_AXIS, 1))


def _axes_by_name(
    names: tuple[Axis, ...], rules: Sequence[Rule], used: set[Rule], num_dims: int
) -> tuple[Axis, ...]:
    """Returns the axes that rules give to logical names; an axis cuts one dimension alone."""
    chosen: list[Axis] = []
    for name in names:
        fitting = [rule for rule in rules if not isinstance(rule[1], tuple) and rule[0] == name]
        used.update(fitting)
        free = [rule[1] for rule in fitting if rule[1] is None or rule[1] not in chosen]
        chosen.append(free[0] if free else None)  # pyright: ignore[reportArgumentType]
    return tuple(chosen) or (None,) * num_dims


def with_fsdp(axes: tuple[Axis, ...], shape: tuple[int, ...], num_parts: int) -> tuple[Axis, ...]:
    """Returns axes with `fsdp` for the largest free dimension, unless it is there or useless."""
    if math.prod(shape) < _SMALL:
        return axes
    return with_axis(axes, shape, _jax.FSDP_AXIS, num_parts)


def with_axis(
    axes: tuple[Axis, ...], shape: tuple[int, ...], axis: str, num_parts: int
) -> tuple[Axis, ...]:
    """Returns axes with another one for the largest free dimension that it divides, if any."""
    free = [
        dim
        for dim, known in enumerate(axes)
        if known is None and shape[dim] and shape[dim] % num_parts == 0
    ]
    if num_parts == 1 or axis in axes or not free:
        return axes
    best = max(free, key=lambda dim: (shape[dim], dim))
    return (*axes[:best], axis, *axes[best + 1 :])


def _offered(shapes: Shapes, names: Dims) -> str:
    known = sorted({name for of_array in names.values() for name in of_array if name})
    of_names = f" Logical names are {', '.join(known)}." if known else ""
    return f"Parameters are {listed(list(shapes), most=6)}.{of_names}"


@dataclass(frozen=True)
class ShardingOptions:
    """A user's choices, checked; `is_open` if training is to choose a mesh for this one."""

    mesh: MeshAxes
    rules: tuple[Rule, ...] = ()
    pipeline: Pipeline | None = None
    is_open: bool = False

    @classmethod
    def of(
        cls,
        mesh: Mapping[str, int] | Literal["auto"] | None,
        rules: Sequence[Rule],
        pipeline: Pipeline | None = None,
        **others: Any,
    ) -> "ShardingOptions | None":
        """Returns the choices, or None if the model is not sharded.

        The mesh may be `"auto"`, to choose it by the memory of a step, or None, for data
        parallelism alone. Others are options that exclude a mesh; those that are set count.
        """
        if mesh is None:
            if rules:
                raise ValueError(
                    "sharding_rules need a mesh with the axes that they name, such as "
                    "mesh={'data': 4, 'tensor': 2}."
                )
            if pipeline is not None:
                raise ValueError(
                    "A pipeline needs a mesh with an axis 'stage', such as mesh={'data': 2, "
                    "'stage': 4}."
                )
            return None
        is_open = mesh == "auto"
        if is_open and pipeline is not None:
            raise ValueError(
                'mesh="auto" chooses between data parallelism and parts, not stages of a pipeline. '
                "Give the mesh of a pipeline, such as mesh={'data': 2, 'stage': 4}."
            )
        axes = MeshAxes(fsdp=-1) if is_open else MeshAxes.of(mesh)
        _check_stages(mesh, axes, pipeline)
        chosen = [name for name, value in others.items() if value]
        if chosen:
            raise ValueError(
                f"{chosen[0]} cannot be combined with mesh: {_WAYS_OUT[chosen[0]]}. Leave one of "
                "the two out."
            )
        return cls(axes, checked_rules(rules), pipeline, is_open)


def _check_stages(mesh: Any, axes: MeshAxes, pipeline: Any) -> None:
    if pipeline is not None and not isinstance(pipeline, Pipeline):
        raise TypeError(
            "pipeline must be a tnt_jax.Pipeline, such as Pipeline('layers', microbatches=16), but "
            f"is {pipeline!r}."
        )
    if pipeline is not None and _jax.STAGE_AXIS not in mesh:
        raise ValueError(
            f"A pipeline is divided over the axis 'stage', which mesh={dict(mesh)} lacks. Add it, "
            "such as mesh={'data': 2, 'stage': 4}, or leave pipeline out."
        )
    if pipeline is None and axes.stage != 1:
        raise ValueError(
            f"The axis 'stage' of mesh ({axes.stage} devices) needs a pipeline: "
            "pipeline=tnt_jax.Pipeline('layers', microbatches=16)."
        )
