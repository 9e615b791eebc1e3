"""Bytes of several processes, carried by XLA's collectives between one device of each.

They travel in chunks, which bounds the memory, of few sizes, as each size is a program.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from tnt_jax.distributed import stall
from tnt_jax.job import once_per_job

ALIGNMENT = 32
"""In bytes, of each array among others; the itemsize of any number divides it."""

# What a process receives of all others at once.
_CHUNK_BYTES = 64 * 2**20


def starts(nbytes: Sequence[int], alignment: int) -> list[int]:
    """Returns where each array begins when they follow one another, and where the last one ends."""
    positions = [0]
    for size in nbytes:
        positions.append(-(-(positions[-1] + size) // alignment) * alignment)
    return positions


def gather_chunks(
    leaves: Sequence[np.ndarray], members: tuple[int, ...], total: int
) -> Iterator[tuple[int, np.ndarray]]:
    """Yields positions, and the bytes of all processes from there on, `[num_members, size]`.

    Args:
        leaves: This process's arrays.
        members: The processes, this one among them.
        total: Bytes of the process that has most of them.
    """
    for first, chunk in _chunks(leaves, len(members), total):
        if len(members) == 1:
            yield first, chunk[None]
        else:
            yield first, _exchanged(chunk, members, _gather)


def broadcast_bytes(
    leaves: Sequence[np.ndarray], members: tuple[int, ...], root: int, total: int
) -> np.ndarray:
    """Returns the bytes of the process `root`.

    Args:
        leaves: This process's arrays.
        members: The processes, this one among them.
        root: One of them.
        total: Bytes of each process.
    """
    received = []
    for _, chunk in _chunks(leaves, len(members), total):
        if jax.process_index() != root:
            chunk[:] = 0
        received.append(chunk if len(members) == 1 else _exchanged(chunk, members, _sum))
    return np.concatenate(received) if received else np.zeros(0, np.uint8)


def _exchanged(chunk: np.ndarray, members: tuple[int, ...], program: Any) -> np.ndarray:
    mesh = _mesh(members)
    sharding = NamedSharding(mesh, PartitionSpec("processes"))
    own = mesh.devices.flat[members.index(jax.process_index())]
    part = jax.device_put(chunk[None], own)
    rows = jax.make_array_from_single_device_arrays((len(members), chunk.size), sharding, [part])
    with stall.waiting("values of other processes"):
        return np.asarray(program(mesh)(rows).addressable_data(0))


@once_per_job
def _mesh(members: tuple[int, ...]) -> Mesh:
    """Returns a mesh of the first device of each process."""
    firsts = {device.process_index: device for device in reversed(jax.devices())}
    return Mesh(np.asarray([firsts[process] for process in members]), ("processes",))


@once_per_job
def _gather(mesh: Mesh) -> Any:
    return jax.jit(lambda rows: rows, out_shardings=NamedSharding(mesh, PartitionSpec()))


@once_per_job
def _sum(mesh: Mesh) -> Any:
    return jax.jit(
        lambda rows: jnp.sum(rows, axis=0, dtype=jnp.uint8),
        out_shardings=NamedSharding(mesh, PartitionSpec()),
    )


def _chunks(
    leaves: Sequence[np.ndarray], num_members: int, total: int
) -> Iterator[tuple[int, np.ndarray]]:
    """Yields positions and bytes of arrays that follow one another, filled up to a power of two."""
    positions = starts([leaf.nbytes for leaf in leaves], ALIGNMENT)
    largest = max(_CHUNK_BYTES >> (num_members - 1).bit_length(), 2**20)
    for first in range(0, total, largest):
        size = min(largest, 1 << max(total - first - 1, 1).bit_length())
        chunk = np.zeros(size, np.uint8)
        for leaf, start in zip(leaves, positions, strict=False):
            begin, end = max(start, first), min(start + leaf.nbytes, first + size)
            if begin < end:
                flat = leaf.reshape(-1).view(np.uint8)
                chunk[begin - first : end - first] = flat[begin - start : end - start]
        yield first, chunk
