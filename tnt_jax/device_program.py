"""Programs that are compiled for one device and started on each device of a mesh: the same instructions, however many there are.

A program that is compiled for several devices takes another way through the compiler than one for a single device, and comes out
with other fusions and so with other roundings. These programs cannot communicate; what they return can be summed over ranks
afterwards.
"""

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from tnt_jax import _jax

BY_RANK = PartitionSpec(_jax.DATA_AXIS)
REPLICATED = PartitionSpec()
# `function` is traced as a rank of a mesh of one, so that models find the axis that they know, and once for all devices.
_ALONE = AbstractMesh((1,), (_jax.DATA_AXIS,), axis_types=(AxisType.Auto,))


class DeviceProgram:
    """A function as a program for one device, applied to global arrays: each device works on its own part.

    It is compiled once for each device of the process and each shape; the launcher gives every process one device.

    Args:
        function: What a rank computes of its parts, inside a `shard_map` over a `data` axis of size 1.
        mesh: Devices, over the axis `data`.
        in_specs: For each argument `REPLICATED` or `BY_RANK`, or a tree of them, as for `shard_map`.
        out_specs: The same for the result. `REPLICATED` results must be equal on all ranks, which is not checked.
        donate: Positions of arguments whose memory the results may use.
    """

    def __init__(self, function: Callable, mesh: Mesh, *, in_specs: Any, out_specs: Any, donate: tuple[int, ...] = ()) -> None:
        mapped = jax.shard_map(function, mesh=_ALONE, in_specs=in_specs, out_specs=out_specs, check_vma=True)
        self._program = jax.jit(mapped, donate_argnums=donate, compiler_options=_jax.deterministic_options(mesh))
        self._mesh, self._out_specs = mesh, out_specs
        here = jax.process_index()
        self._num_local = sum(device.process_index == here for device in mesh.devices.flat)

    def __call__(self, *args: Any) -> Any:
        """Starts the program on every device of this process with its parts of `args`, and returns global arrays."""
        leaves, structure = jax.tree.flatten(args)
        # All parts are taken first: an array of which one part was donated gives no other.
        columns = zip(*(_parts(x, self._num_local) for x in leaves), strict=True)
        parts = [self._program(*structure.unflatten(column)) for column in columns]
        structure = jax.tree.structure(parts[0])
        specs = jax.tree.leaves(jax.tree.map(_spread, self._out_specs, parts[0], is_leaf=_is_spec), is_leaf=_is_spec)
        columns = zip(specs, *(jax.tree.leaves(part) for part in parts), strict=True)
        return structure.unflatten([self._whole(spec, column) for spec, *column in columns])

    def eval_shape(self, *args: Any) -> Any:
        """Traces the program for the first device's parts of `args` and returns the shapes of its results there."""
        return jax.eval_shape(self._program, *jax.tree.map(lambda x: _parts(x, 1)[0], args))

    def lower(self, *args: Any) -> Any:
        """Returns the lowered program for the first device's parts of `args`."""
        return self._program.lower(*jax.tree.map(lambda x: _parts(x, 1)[0], args))

    def _whole(self, spec: PartitionSpec, column: list[jax.Array]) -> jax.Array:
        shape = column[0].shape
        if spec == BY_RANK:
            shape = (shape[0] * self._mesh.size, *shape[1:])
        return jax.make_array_from_single_device_arrays(shape, NamedSharding(self._mesh, spec), column)


def _parts(x: Any, number: int) -> list[Any]:
    """Returns the parts of an array on each device, or a Python number for each of them."""
    assert isinstance(x, (jax.Array, int, float)), f"Arrays must be placed on the devices first, but one is a {type(x).__name__}."
    return _jax.local_parts(x) if isinstance(x, jax.Array) else [x] * number


def _is_spec(x: Any) -> bool:
    return isinstance(x, PartitionSpec)


def _spread(spec: PartitionSpec, tree: Any) -> Any:
    return jax.tree.map(lambda _: spec, tree)
