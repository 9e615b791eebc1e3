"""Host values of several processes, byte for byte: as JAX arrays, 64-bit ones would be narrowed.

Processes first compare what they send, without a device. Small values travel with that; larger
ones by XLA's collectives between one device of each process, in chunks, which bounds the memory, of
few sizes, as each size is a program.
"""

import base64
import hashlib
import json
import math
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import core
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from tnt_jax import _jax
from tnt_jax.distributed.liveness import phases
from tnt_jax.distributed.liveness.rendezvous import Role, meet
from tnt_jax.job import Slot, once_per_job


def _as_arrays(
    call: str, tree: Any, check: Callable[[str, np.ndarray], None] | None, is_ragged: bool
) -> Iterator[tuple[str, np.ndarray]]:
    """Yields the path of each leaf of a tree, and the leaf as an array; see `gather`."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        name = jax.tree_util.keystr(path) or "the value"
        _check_leaf(call, name, leaf)
        # In C order, and not by ascontiguousarray, which gives a scalar a dimension.
        array = np.asarray(leaf, order="C")
        if array.dtype.hasobject:
            raise TypeError(
                f"{call} takes numbers and arrays, but {name} is {type(leaf).__name__}: "
                f"{repr(leaf)[:200]}. tnt.all_gather_object and tnt.broadcast_object take objects."
            )
        if check is not None:
            check(name, array)
        if is_ragged and array.ndim == 0:
            raise ValueError(
                f"{call} takes arrays of rows, but {name} is {array.dtype}[], without a dimension. "
                "Give it one, for instance by numpy.atleast_1d."
            )
        yield name, array


def _check_leaf(call: str, name: str, leaf: Any) -> None:
    if not isinstance(leaf, jax.Array):
        return
    if isinstance(leaf, core.Tracer):
        raise TypeError(
            f"{call} exchanges values between processes, outside of jit, but {name} is traced. In "
            f"a step use jax.lax.psum and its like over the axis {_jax.DATA_AXIS!r}."
        )
    if _jax.is_key(leaf):
        raise TypeError(
            f"{call} takes numbers and arrays, but {name} is a PRNG key. Pass "
            f"jax.random.key_data of it."
        )
    if not (leaf.is_fully_addressable or leaf.is_fully_replicated):
        raise TypeError(
            f"{call} takes values that this process holds, but {name} is sharded over several "
            f"processes ({leaf.sharding}). It is one array of the whole job already."
        )


def _type_of(leaf: np.ndarray, is_ragged: bool) -> str:
    """Returns dtype and shape in words; of a ragged leaf without its number of rows."""
    order = " (big endian)" if leaf.dtype.str.startswith(">") else ""
    shape = ["rows", *leaf.shape[1:]] if is_ragged else leaf.shape
    return f"{leaf.dtype}{order}[{', '.join(map(str, shape))}]"


def _raise_difference(call: str, told: dict[int, list[str]]) -> None:
    """Raises a ValueError on the first difference of two processes' structures and leaves."""
    reference = next(iter(told))
    process = next(number for number in told if told[number] != told[reference])
    first, other = told[reference], told[process]
    pairs = [(a, b) for a, b in zip(first[1:], other[1:], strict=False) if a != b]
    if first[0] == other[0] and pairs:
        found = f"{pairs[0][0]} on process {reference}, {pairs[0][1]} on process {process}"
    else:
        found = (
            f"{len(first) - 1} leaves in {first[0]} on process {reference}, {len(other) - 1} "
            f"leaves in {other[0]} on process {process}"
        )
    raise ValueError(
        f"{call} needs the same structure, shapes and dtypes on every process, but got {found}."
    )


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

    `total` is the bytes of the process that has most of them.
    """
    for first, chunk in _chunks(leaves, len(members), total):
        yield first, chunk[None] if len(members) == 1 else _exchanged(chunk, members, jnp.asarray)


def _exchanged(
    chunk: np.ndarray, members: tuple[int, ...], combine: Callable[..., jax.Array]
) -> np.ndarray:
    """Returns what a function, of the module, makes of the chunks `[members, size]` of all."""
    mesh = _mesh(members)
    sharding = NamedSharding(mesh, PartitionSpec("processes"))
    own = mesh.devices.flat[members.index(jax.process_index())]
    part = jax.device_put(chunk[None], own)
    rows = jax.make_array_from_single_device_arrays((len(members), chunk.size), sharding, [part])
    with phases.waiting("values of other processes"):
        return np.asarray(_program(combine, mesh)(rows).addressable_data(0))


@once_per_job
def _mesh(members: tuple[int, ...]) -> Mesh:
    firsts = {device.process_index: device for device in reversed(jax.devices())}
    return Mesh(np.asarray([firsts[process] for process in members]), ("processes",))


_sum = partial(jnp.sum, axis=0, dtype=jnp.uint8)


@once_per_job
def _program(combine: Callable[..., jax.Array], mesh: Mesh) -> Any:
    return jax.jit(combine, out_shardings=NamedSharding(mesh, PartitionSpec()))


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


# With the comparison; more would burden the coordinator of a large job.
_SMALL_BYTES = 1024
# Processes cannot tell which of two calls of a process at the same time is which of another's.
_turn = Slot(threading.Lock)


@contextmanager
def exclusive(call: str) -> Iterator[None]:
    """Notes that a public call runs within, which no other thread may make meanwhile."""
    turn = _turn.get()
    if not turn.acquire(blocking=False):
        raise RuntimeError(
            f"{call} was called in the thread {threading.current_thread().name!r} while another "
            "thread of this process exchanges values with other processes. They could not tell "
            "the calls apart: make all of them in one thread, or one after the other."
        )
    try:
        with phases.calling(call):
            yield
    finally:
        turn.release()


class Gathered(NamedTuple):
    """A pytree in pieces, the same on every process but for the values and the leading dimensions.

    Attributes:
        leaves: The arrays of this process.
        present: Positions among the members of those that have sent values.
        shapes: Shapes of the arrays, by process in `present`.
        total: Bytes of the process that sends most, aligned.
        small: The concatenated bytes of the arrays, by process in `present`, or None if too many.
    """

    leaves: list[np.ndarray]
    structure: Any
    members: tuple[int, ...]
    present: list[int]
    shapes: list[list[tuple[int, ...]]]
    total: int
    small: list[bytes] | None

    @property
    def own(self) -> int:
        """Position of this process among those in `present`."""
        return [self.members[position] for position in self.present].index(jax.process_index())

    def nbytes(self, position: int) -> list[int]:
        """Returns the size of each array of a process, in bytes."""
        return [
            math.prod(shape) * leaf.itemsize
            for shape, leaf in zip(self.shapes[position], self.leaves, strict=True)
        ]

    def starts(self, position: int) -> list[int]:
        """Returns where each array of a process begins among its bytes."""
        return starts(self.nbytes(position), 1 if self.small is not None else ALIGNMENT)


def gather(
    call: str,
    tree: Any,
    members: tuple[int, ...],
    check: Callable[[str, np.ndarray], None] | None = None,
    *,
    problem: Exception | None = None,
    is_ragged: bool = False,
    is_joinable: bool = False,
) -> Gathered:
    """Returns a pytree of host values as arrays, once all `members` have sent theirs.

    `check` raises if an array, of which it gets the path, cannot be used. `problem` is what is
    wrong with the call on this process; it is raised once the others have heard of it. Ragged
    arrays may differ in their leading dimensions; processes that have joined may be without values.
    If structure, shapes or dtypes differ, all raise a ValueError that names processes and path.
    """
    named, error = [], problem
    if error is None:
        try:
            named = list(_as_arrays(call, tree, check, is_ragged))
        except Exception as raised:  # Raised below, so that the other processes do not wait.
            error = raised
    leaves = [leaf for _, leaf in named]
    structure = jax.tree.structure(tree)
    description = [
        # Functions and objects in it print where they lie in the memory of a process.
        re.sub(r" at 0x[0-9a-f]+", "", str(structure)),
        *(f"{path} is {_type_of(leaf, is_ragged)}" for path, leaf in named),
    ]
    values = None
    if sum(leaf.nbytes for leaf in leaves) <= _small_bytes(len(members)):
        values = base64.b64encode(b"".join(leaf.tobytes() for leaf in leaves)).decode()
    told = {
        "error": "" if error is None else f"{type(error).__name__}: {error}",
        "digest": hashlib.sha256(json.dumps(description).encode()).hexdigest(),
        "total": starts([leaf.nbytes for leaf in leaves], ALIGNMENT)[-1],
        "rows": [len(leaf) for leaf in leaves] if is_ragged else None,
        "values": values,
    }
    role: Role = "joinable" if is_joinable else "alone"
    texts = meet(call, json.dumps(told), members=members, role=role)
    entries = [json.loads(text) for text in texts]
    present = agree_on_exchange(call, entries, members, error=error, description=description)
    gathered = [entries[position] for position in present]
    return Gathered(
        leaves,
        structure,
        members,
        present,
        [
            [leaf.shape for leaf in leaves]
            if entry["rows"] is None
            else [(rows, *leaf.shape[1:]) for rows, leaf in zip(entry["rows"], leaves, strict=True)]
            for entry in gathered
        ],
        max(entry["total"] for entry in gathered),
        [base64.b64decode(entry["values"]) for entry in gathered] if are_small(entries) else None,
    )


def _small_bytes(num_members: int) -> int:
    # Each process receives those of all from the coordinator.
    return max(_SMALL_BYTES, min(16 * _SMALL_BYTES, 2**20 // num_members**2))


def agree_on_exchange(
    call: str,
    entries: list[dict[str, Any]],
    members: tuple[int, ...],
    *,
    error: Exception | None = None,
    description: Sequence[str] = (),
) -> list[int]:
    """Returns the positions of the processes that have sent values, once all can exchange them.

    `entries` are what each process told, of one that has joined `{"joined": ...}`; `error` and
    `description` are this process's.
    """
    present = [position for position, entry in enumerate(entries) if "joined" not in entry]
    raise_first(error, [entry.get("error", "") for entry in entries], members)
    if len({entries[position]["digest"] for position in present}) > 1:
        texts = meet(call, json.dumps(description), members=members, role="joins")
        told = {members[position]: json.loads(texts[position]) for position in present}
        _raise_difference(call, told)
    if len(members) == jax.process_count():
        connect_devices()
    return present


def are_small(entries: list[dict[str, Any]]) -> bool:
    """Returns whether the values of all processes came with what they told."""
    return all("joined" in entry or entry["values"] is not None for entry in entries)


def raise_first(
    error: Exception | None, texts: list[str], members: Sequence[int] | None = None
) -> None:
    """Raises this process's error, or a RuntimeError that quotes another's; nothing without any."""
    if error is not None:
        raise error
    for process, text in zip(members or range(len(texts)), texts, strict=True):
        if text:
            raise RuntimeError(f"Process {process} failed: {text}")


@once_per_job
def connect_devices() -> None:
    """Runs a first collective on all processes, to be called when they have just met."""
    # Gloo connects CPU processes in their first collective, and gives up if one of them comes 30 s
    # after another.
    if jax.process_count() > 1 and jax.devices()[0].platform == "cpu":
        with phases.waiting("the first collective"):
            mesh = _jax.make_data_mesh(jax.devices())
            ones = _jax.shard_rows(np.ones(mesh.size, np.int32), mesh)
            total = jax.jit(jnp.sum, out_shardings=NamedSharding(mesh, PartitionSpec()))(ones)
            jax.block_until_ready(total)


def collected(
    gathered: Gathered, part: Callable[[int, int], tuple[int, int]] | None = None
) -> list[np.ndarray]:
    """Returns for each array the concatenated bytes that the processes have sent of it.

    `part` maps the position of a process and the index of an array to the first byte that this
    process needs, and the end; all by default.
    """
    num_present = len(gathered.present)
    positions = [gathered.starts(position) for position in range(num_present)]
    wanted = [
        [
            (0, size) if part is None else part(position, index)
            for index, size in enumerate(gathered.nbytes(position))
        ]
        for position in range(num_present)
    ]
    lengths = [[end - begin for begin, end in ranges] for ranges in wanted]
    ends = np.cumsum(lengths, axis=0, dtype=np.int64)
    results = [np.empty(total, np.uint8) for total in (ends[-1] if len(ends) else [])]
    for first, rows in _all_rows(gathered):
        for position, row in enumerate(rows):
            for index, (begin, end) in enumerate(wanted[position]):
                begin, end = positions[position][index] + begin, positions[position][index] + end
                low, high = max(begin, first), min(end, first + len(row))
                if low < high:
                    place = ends[position][index] - lengths[position][index] + low - begin
                    results[index][place : place + high - low] = row[low - first : high - first]
    return results


def typed(data: np.ndarray, dtype: np.dtype, shape: tuple[int, ...]) -> np.ndarray:
    """Returns bytes as an array of a dtype and a shape."""
    return data.view(dtype).reshape(shape) if data.size else np.empty(shape, dtype)


def reduced(gathered: Gathered, reduce: Callable[[np.ndarray], np.ndarray]) -> list[np.ndarray]:
    """Returns arrays by `reduce` from those of all, `[num_processes, size]` to `[size]`."""
    num_present = len(gathered.present)
    parts = [
        [reduce(np.empty((num_present, 0), leaf.dtype))] for leaf in gathered.leaves
    ]  # Gives arrays without elements their dtype.
    begins = gathered.starts(0)
    for first, rows in _all_rows(gathered):
        stacked = np.stack(rows)
        for index, leaf in enumerate(gathered.leaves):
            begin = max(begins[index], first)
            end = min(begins[index] + leaf.nbytes, first + stacked.shape[1])
            if begin < end:
                piece = stacked[:, begin - first : end - first]
                parts[index].append(reduce(np.ascontiguousarray(piece).view(leaf.dtype)))
    return [
        np.concatenate(pieces).reshape(leaf.shape)
        for leaf, pieces in zip(gathered.leaves, parts, strict=True)
    ]


def sent_from(gathered: Gathered, root: int) -> list[np.ndarray]:
    """Returns the arrays of process `root`."""
    members = gathered.members
    if gathered.small is not None:
        data = gathered.small[members.index(root)]
    else:
        received = []
        for _, chunk in _chunks(gathered.leaves, len(members), gathered.total):
            if jax.process_index() != root:
                chunk[:] = 0
            received.append(chunk if len(members) == 1 else _exchanged(chunk, members, _sum))
        data = np.concatenate(received)
    return [
        np.frombuffer(data, leaf.dtype, leaf.size, start).reshape(leaf.shape).copy()
        if leaf.nbytes
        else leaf.copy()
        for leaf, start in zip(gathered.leaves, gathered.starts(0), strict=False)
    ]


def _all_rows(gathered: Gathered) -> Iterator[tuple[int, Sequence[np.ndarray]]]:
    """Yields positions, and the bytes of each process in `present` from there on."""
    if gathered.small is not None:
        yield 0, [np.frombuffer(data, np.uint8) for data in gathered.small]
        return
    for first, rows in gather_chunks(gathered.leaves, gathered.members, gathered.total):
        yield first, [rows[position] for position in gathered.present]
