"""Programs that are compiled for one device and started on each device of a mesh: the same instructions, however many there are.

A program that is compiled for several devices takes another way through the compiler than one for a single device, and comes out
with other fusions and so with other roundings. These programs cannot communicate; what they return can be summed over ranks
afterwards.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from tnt_jax import _jax
from tnt_jax.hlo import join_programs

BY_RANK = PartitionSpec(_jax.DATA_AXIS)
REPLICATED = PartitionSpec()
# Functions are traced as the rank of a mesh of one, so that models find the axis that they know, and once for all devices.
_ALONE = AbstractMesh((1,), (_jax.DATA_AXIS,), axis_types=(AxisType.Auto,))


class Programs(NamedTuple):
    """The programs of a step, lowered or compiled.

    Attributes:
        by_name: What `jax.jit` gives for each of them.
    """

    by_name: dict[str, Any]

    def as_text(self) -> str:
        """Returns the texts one after the other, each behind a line with its name."""
        return join_programs({name: program.as_text() for name, program in self.by_name.items()})

    def compile(self) -> "Programs":
        """Compiles lowered programs."""
        return Programs({name: program.compile() for name, program in self.by_name.items()})


def device_program(function: Callable, mesh: Mesh, *, in_specs: Any, out_specs: Any, donate: tuple[int, ...] = ()) -> Callable:
    """Returns `function` as a jitted program for one device, whichever its arguments are on.

    It is compiled once for each device of the process and each shape; the launcher gives every process one device.

    Args:
        function: Called inside a `shard_map` over a `data` axis of size 1.
        mesh: Devices that it will run on.
        in_specs: For each argument `BY_RANK` if it differs between ranks, else `REPLICATED`; or a tree of them.
        out_specs: The same for the result.
        donate: Positions of arguments whose memory the results may use.
    """
    mapped = jax.shard_map(function, mesh=_ALONE, in_specs=in_specs, out_specs=out_specs, check_vma=True)
    # No options that follow from the number of devices or cores: other libraries give other bits.
    return jax.jit(mapped, donate_argnums=donate, compiler_options=_jax.deterministic_options(mesh))


def split(tree: Any, mesh: Mesh) -> list[Any]:
    """Returns what each device of this process, in the order of ranks, holds of global arrays; Python numbers go to each."""
    here = jax.process_index()
    number = sum(device.process_index == here for device in mesh.devices.flat)
    leaves, structure = jax.tree.flatten(tree)
    if not leaves:
        return [tree] * number
    return [structure.unflatten(part) for part in zip(*(_parts(x, number) for x in leaves), strict=True)]


def join(parts: list[Any], mesh: Mesh, spec: PartitionSpec) -> Any:
    """Returns global arrays of what each device of this process holds.

    Args:
        parts: For each device a tree of arrays; equal ones if `spec` is `REPLICATED`, which is not checked.
        mesh: Devices, over the axis `data`.
        spec: `BY_RANK` to put rows of ranks one after the other, or `REPLICATED`.
    """
    sharding = NamedSharding(mesh, spec)

    def whole(*column: jax.Array) -> jax.Array:
        shape = column[0].shape
        if spec == BY_RANK:
            shape = (shape[0] * mesh.size, *shape[1:])
        return _jax.from_local_parts(column, shape, sharding)

    return jax.tree.map(whole, *parts)


def _parts(x: Any, number: int) -> Sequence[Any]:
    assert isinstance(x, (jax.Array, int, float)), f"Arrays must be placed on the devices first, but one is a {type(x).__name__}."
    return _jax.local_parts(x) if isinstance(x, jax.Array) else [x] * number
