"""Processes a global batch in a fixed number of chunks and sums them in a fixed order.

A global batch is split into V chunks, one per virtual rank; a device processes V / R neighbouring
chunks, one after another. The results of the chunks are added in one binary tree, neighbours first:

    ((0 + 1) + (2 + 3)) + ((4 + 5) + (6 + 7))

A device adds the results of its own chunks; then neighbouring devices add their sums, then
neighbouring pairs, and so on (recursive doubling). The addition of two numbers is commutative to
the last bit, so all devices end with the same bits.

The program for a chunk is compiled for one device and runs on each device of a mesh
(`device_program`): its instructions are the same for any number of devices. A program compiled for
several devices is optimized differently from one for a single device, with other fusions and
therefore other roundings. These programs cannot communicate; their results can be summed over ranks
afterwards.
"""

import os
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from tnt_jax import _jax
from tnt_jax.data.layout import RankSlice
from tnt_jax.distributed.sums.hlo import join_programs
from tnt_jax.log import logger
from tnt_jax.train.state import descriptions

BY_RANK = PartitionSpec(_jax.DATA_AXIS)
REPLICATED = PartitionSpec()
# Functions are traced once for all devices, as the only rank of a mesh, so that models find their
# mesh axis.
_ALONE = _jax.abstract_data_mesh(1)


class Programs(NamedTuple):
    """The programs of a step, traced, lowered or compiled, by name."""

    by_name: dict[str, Any]

    def as_text(self) -> str:
        """Returns the texts one after another, each after a line with its name."""
        return join_programs({name: program.as_text() for name, program in self.by_name.items()})

    def lower(self) -> "Programs":
        """Lowers traced programs."""
        return Programs({name: program.lower() for name, program in self.by_name.items()})

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


class VirtualRanks:
    """`count` virtual ranks on the devices of a mesh of the axis `data`, `per_rank` on each."""

    def __init__(self, count: int, mesh: Mesh) -> None:
        check_count(count, num_ranks=mesh.size)
        self.count = count
        self.mesh = mesh
        self.per_rank = count // mesh.size
        # Of the sums of chunks on a device, so many wait for the next chunk at most.
        self.num_waiting = self.per_rank.bit_length() - 1
        self._local_ranks = _jax.local_ranks(mesh)
        # Only slices, additions and copies: they round alike however they are compiled.
        self._cut = (
            jax.jit(self._chunk, static_argnums=1)
            if self.per_rank > 1
            else lambda data, index: data
        )
        self._add = jax.jit(lambda x, y: jax.tree.map(jnp.add, x, y), donate_argnums=0)
        self._concatenate = jax.jit(
            lambda parts: jax.tree.map(lambda *x: jnp.concatenate(x), *parts)
        )
        self._add_ranks = _sums_of_pairs(mesh)

    @property
    def rank_slice(self) -> RankSlice:
        """The virtual ranks of this process."""
        return RankSlice(
            self.count,
            self._local_ranks[0] * self.per_rank,
            len(self._local_ranks) * self.per_rank,
            are_virtual=True,
        )

    def sum(self, program: Callable, batch: Any, *shared: Any) -> tuple[Any, Any]:
        """Returns the sum of a program's results over all chunks of the global batch.

        The program for one device maps a chunk, its index in the global batch, and `shared` to two
        pytrees: arrays `[1, ...]`, to be summed with the same bits on every rank, and arrays that
        are the same for every chunk. Batches are sharded by rank; all others are replicated.
        """
        batches, others = split(batch, self.mesh), split(shared, self.mesh)
        stacks: list[list[Any]] = [[] for _ in batches]
        same: list[Any] = [None for _ in batches]
        for index in range(self.per_rank):
            for number, rank in enumerate(self._local_ranks):
                chunk = self._cut(batches[number], index)
                result, same[number] = program(chunk, rank * self.per_rank + index, *others[number])
                self._push(stacks[number], result, index)
        sums = join([stack[0] for stack in stacks], self.mesh, BY_RANK)
        for add in self._add_ranks:
            sums = add(sums)
        return sums, join(same, self.mesh, PartitionSpec())

    def map(self, program: Callable, batch: Any, *shared: Any) -> Any:
        """Returns the rows of `program(chunk, index, *shared)` for all chunks in order, sharded."""
        batches, others = split(batch, self.mesh), split(shared, self.mesh)
        rows = [
            [
                program(self._cut(own, index), rank * self.per_rank + index, *other)
                for index in range(self.per_rank)
            ]
            for own, other, rank in zip(batches, others, self._local_ranks, strict=True)
        ]
        return join([self._concatenate(parts) for parts in rows], self.mesh, BY_RANK)

    def trace_sum(self, shapes: Any) -> dict[str, Any]:
        """Returns the traced programs, by name, that add results of shapes `[1, ...]`."""
        programs = {}
        if self.per_rank > 1:
            programs["sum of chunks"] = self._add.trace(shapes, shapes)
        by_rank = NamedSharding(self.mesh, BY_RANK)
        sums = descriptions(shapes, rows=self.mesh.size, sharding=by_rank)
        for power, add in enumerate(self._add_ranks):
            programs[f"sum {power + 1} of ranks"] = traced = add.trace(sums)
            sums = traced.out_info
        return programs

    def chunk_shapes(self, batch: Any) -> Any:
        """Returns the shapes of a chunk of a global batch."""
        return descriptions(batch, rows=jax.tree.leaves(batch)[0].shape[0] // self.count)

    def _chunk(self, data: Any, index: int) -> Any:
        return jax.tree.map(lambda x: jnp.split(x, self.per_rank)[index], data)

    def _push(self, stack: list[Any], result: Any, index: int) -> None:
        """Adds the result of chunk `index` to a device's at most log2(V / R) + 1 sums."""
        while index & 1:
            result = self._add(stack.pop(), result)
            index >>= 1
        stack.append(result)


def check_count(count: int, *, num_ranks: int = 1) -> None:
    """Raises a ValueError if `num_ranks` devices cannot work as `count` virtual ranks."""
    if count < 1 or count & (count - 1):
        raise ValueError(
            f"virtual_ranks must be a power of two (1, 2, 4, 8, ...), but is {count}: then every "
            "device adds a whole subtree of the same binary tree. Take the next larger one."
        )
    if count % num_ranks:
        allowed = [2**power for power in range(count.bit_length())]
        raise ValueError(
            f"With virtual_ranks={count}, training with reproducible=True runs on "
            f"{', '.join(map(str, allowed))} device(s), but there are {num_ranks}. Use that many, "
            "with tnt_jax.init(devices=...) or another number of processes, or choose another "
            "power of two as virtual_ranks (which changes the results)."
        )


def check_reproducible(
    virtual_ranks: int, gradient_compression: str | None, shard_optimizer_state: bool
) -> None:
    """Raises a ValueError if options exclude one another; prepares JAX, if it is not in use yet."""
    check_count(virtual_ranks)
    for name, value in (
        ("gradient_compression", gradient_compression),
        ("shard_optimizer_state", shard_optimizer_state),
    ):
        if value:
            raise ValueError(
                f"{name}={value!r} changes how gradients are summed, which reproducible=True "
                f"fixes. Leave one of them out."
            )
    _fix_cpu_threads(virtual_ranks)


def _fix_cpu_threads(virtual_ranks: int) -> None:
    """Sets the size of JAX's pool of CPU threads, which rounds large products; may only warn."""
    threads = str(2 * virtual_ranks)
    if not _jax.backends_are_initialized():
        os.environ["PJRT_NPROC"] = threads
    elif jax.default_backend() == "cpu" and os.environ.get("PJRT_NPROC") != threads:
        logger.warning(
            "JAX was in use before the reproducible model was made, so its pool of CPU threads "
            "keeps its size (PJRT_NPROC=%s): results "
            "equal those of runs with the same size only. Make the model first, or set "
            "PJRT_NPROC=%s before the start.",
            os.environ.get("PJRT_NPROC", "unset"),
            threads,
        )


def _sums_of_pairs(mesh: Mesh) -> list[Any]:
    """Returns jitted functions that together sum arrays `[ranks, ...]`, by rank, to `[1, ...]`.

    The first function adds neighbours, `[ranks / 2, ...]`, the next neighbouring pairs, and so on.
    A sum over two devices has no order that a collective library could choose. Each function is a
    program of its own, because XLA's GPU compiler would merge consecutive sums into one over all
    devices.
    """
    num_axes = mesh.size.bit_length() - 1
    names = tuple(f"bit{power}" for power in reversed(range(num_axes)))
    cube = Mesh(
        mesh.devices.reshape((2,) * num_axes), names, axis_types=(AxisType.Auto,) * num_axes
    )

    def sum_over(position: int) -> Any:
        mapped = _jax.shard_map(
            lambda tree: jax.lax.psum(tree, names[position]),
            mesh=cube,
            in_specs=PartitionSpec(names[: position + 1]),
            out_specs=PartitionSpec(names[:position]),
        )
        return jax.jit(mapped, donate_argnums=0)

    return [sum_over(position) for position in reversed(range(num_axes))]
