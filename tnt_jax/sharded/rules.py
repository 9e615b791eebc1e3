"""Which dimension of a parameter is cut over which axis of a mesh, by rules of a user.

A rule is a pair. `(pattern, axes)` with a tuple chooses the axis of each dimension of the
parameters whose path fits a pattern such as `"*/attention/*/kernel"`; an empty tuple leaves them
whole. `(name, axis)` chooses the axis of every dimension that a module has given that logical name.
"""

import math
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from tnt_jax import _jax
from tnt_jax.sharded.mesh_axes import AXES
from tnt_jax.train.state_arrays import listed

# One mesh axis, or none.
Axis = str | None
Rule = tuple[str, Axis | tuple[Axis, ...]]

# A smaller array is not worth an all-gather of its own.
_SMALL = 1024


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
    shapes: Mapping[str, tuple[int, ...]],
    names: Mapping[str, tuple[Axis, ...]],
    rules: Sequence[Rule],
    sizes: Mapping[str, int],
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


def _offered(shapes: Mapping[str, Any], names: Mapping[str, tuple[Axis, ...]]) -> str:
    known = sorted({name for of_array in names.values() for name in of_array if name})
    of_names = f" Logical names are {', '.join(known)}." if known else ""
    return f"Parameters are {listed(list(shapes), most=6)}.{of_names}"
