"""Programs that are compiled for one device and run on each device of a mesh.

The instructions are the same for any number of devices. A program compiled for several devices is
optimized differently from one for a single device, with other fusions and therefore other
roundings. These programs cannot communicate; their results can be summed over ranks afterwards.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from tnt_jax import _jax
from tnt_jax.distributed.sums.hlo import join_programs

BY_RANK = PartitionSpec(_jax.DATA_AXIS)
REPLICATED = PartitionSpec()
# Functions are traced once for all devices, as the only rank of a mesh, so that models find their
# mesh axis.
_ALONE = _jax.abstract_data_mesh(1)


class Programs(NamedTuple):
    """The programs of a step, lowered or compiled, by name."""

    by_name: dict[str, Any]

    def as_text(self) -> str:
        """Returns the texts one after another, each after a line with its name."""
        return join_programs({name: program.as_text() for name, program in self.by_name.items()})

    def compile(self) -> "Programs":
        """Compiles lowered programs."""
        return Programs({name: program.compile() for name, program in self.by_name.items()})


def device_program(
    function: Callable, mesh: Mesh, *, in_specs: Any, out_specs: Any, donate: tuple[int, ...] = ()
) -> Callable:
    """Returns `function` as a jitted program for one device, the device of its arguments.

    It is compiled once per shape and per device of the process; the launcher gives each process one
    device. The function is called inside a `shard_map` over a `data` axis of size 1. Specs are
    `BY_RANK` for what differs between ranks, else `REPLICATED`; or trees of them.
    """
    mapped = jax.shard_map(
        function, mesh=_ALONE, in_specs=in_specs, out_specs=out_specs, check_vma=True
    )
    # No options that depend on the number of devices or cores: other libraries give other bits.
    return jax.jit(mapped, donate_argnums=donate, compiler_options=_jax.deterministic_options(mesh))


def split(tree: Any, mesh: Mesh) -> list[Any]:
    """Returns, for each device of this process by rank, its part of global arrays, or a number."""
    number = len(_jax.local_ranks(mesh))
    leaves, structure = jax.tree.flatten(tree)
    if not leaves:
        return [tree] * number
    return [
        structure.unflatten(part) for part in zip(*(_parts(x, number) for x in leaves), strict=True)
    ]


def join(parts: list[Any], mesh: Mesh, spec: PartitionSpec) -> Any:
    """Returns global arrays: the rows of ranks concatenated, or equal arrays if `REPLICATED`."""
    sharding = NamedSharding(mesh, spec)

    def whole(*column: jax.Array) -> jax.Array:
        shape = column[0].shape
        if spec == BY_RANK:
            shape = (shape[0] * mesh.size, *shape[1:])
        return _jax.from_local_parts(column, shape, sharding)

    return jax.tree.map(whole, *parts)


def _parts(x: Any, number: int) -> Sequence[Any]:
    assert isinstance(x, (jax.Array, int, float)), (
        f"Arrays must be put on the devices first, but one is a {type(x).__name__}."
    )
    return _jax.local_parts(x) if isinstance(x, jax.Array) else [x] * number
