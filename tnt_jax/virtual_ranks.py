"""Work on a global batch in a fixed number of chunks, and its sums in a fixed order, whatever the number of devices.

A global batch is cut into V chunks, one for each virtual rank; a device works on V / R neighbouring chunks, one after the other. The
results of the chunks are added in one binary tree, neighbours first:

    ((0 + 1) + (2 + 3)) + ((4 + 5) + (6 + 7))

A device adds the chunks that it has; then devices that are neighbours exchange their sums, then neighbouring pairs, and so on
(recursive doubling). Addition is commutative to the last bit, so every device ends with the same bits.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from tnt_jax import _jax
from tnt_jax.data.layout import Place


class VirtualRanks:
    """Virtual ranks on the devices of a mesh.

    Args:
        count: Number of virtual ranks, a power of two.
        mesh: Devices, over the axis `data`; their number must divide `count`.

    Attributes:
        count: Number of virtual ranks, V.
        mesh: The devices.
        per_rank: Chunks of each device, V / R.
        first: First chunk of each rank, int32 `[ranks]`, sharded by rank.
        number: `per_rank` as an int32 scalar on the devices. Both are arguments of programs, because a compiler that knew them would
            unroll loops and compile another program for each number of devices.

    Raises:
        ValueError: If `count` is no power of two, or the number of devices does not divide it; the message lists what is allowed.
    """

    def __init__(self, count: int, mesh: Mesh) -> None:
        check_count(count, num_ranks=mesh.size)
        self.count, self.mesh = count, mesh
        self.per_rank = count // mesh.size
        firsts = np.arange(0, count, self.per_rank, dtype=np.int32)
        sharding = NamedSharding(mesh, PartitionSpec(_jax.DATA_AXIS))
        self.first = jax.make_array_from_callback(firsts.shape, sharding, lambda index: firsts[index])
        self.number = _jax.replicate(np.int32(self.per_rank), mesh)

    def place(self, local_ranks: list[int]) -> Place:
        """Returns the virtual ranks of a process that has the given ranks."""
        return Place(self.count, local_ranks[0] * self.per_rank, len(local_ranks) * self.per_rank)


def check_count(count: int, *, num_ranks: int = 1) -> None:
    """Raises a ValueError if `num_ranks` devices cannot work as `count` virtual ranks."""
    if count < 1 or count & (count - 1):
        raise ValueError(
            f"virtual_ranks must be a power of two (1, 2, 4, 8, ...), but is {count}: then every device adds a whole subtree of the "
            "same binary tree. Take the next larger one."
        )
    if count % num_ranks:
        allowed = [2**power for power in range(count.bit_length())]
        raise ValueError(
            f"With virtual_ranks={count}, training with reproducible=True runs on {', '.join(map(str, allowed))} device(s), but there "
            f"are {num_ranks}. Use that many with tnt_jax.init(devices=...) or fewer processes, or a multiple of {num_ranks} as "
            "virtual_ranks if that is a power of two (which changes the results)."
        )


def chunk_of(data: Any, index: jax.Array | int, *, per_rank: int) -> Any:
    """Returns rows of chunk `index` of a device's rows; the last chunk for an index beyond it.

    Args:
        data: Pytree of arrays `[per_rank * rows, ...]`.
        index: Number of the chunk on this device.
        per_rank: Chunks of the device.
    """

    def part(x: jax.Array) -> jax.Array:
        rows = x.shape[0] // per_rank
        return jax.lax.dynamic_slice_in_dim(x, jnp.minimum(index, per_rank - 1) * rows, rows)

    return jax.tree.map(part, data)


def _next_chunk(data: Any, index: jax.Array, number: jax.Array, *, per_rank: int) -> Any:
    """Returns rows of chunk `index`, or zeros beyond the last chunk.

    Without the zeros a device's only chunk would be the same in every turn of the loop: the compiler would move the work on it out
    of the loop, where it is compiled otherwise.
    """
    is_there = index < number
    return jax.tree.map(lambda x: jnp.where(is_there, x, jnp.zeros_like(x)), chunk_of(data, index, per_rank=per_rank))


def sum_chunks(
    measure: Callable[[Any, jax.Array], tuple[Any, Any]],
    data: Any,
    *,
    first: jax.Array,
    number: jax.Array,
    per_rank: int,
) -> tuple[Any, Any]:
    """Returns the sum of `measure` over the chunks of a rank, in the order of the binary tree; inside `shard_map`.

    Args:
        measure: From a chunk and its number in the global batch to two pytrees: numbers to be summed, and values that are the same
            for every chunk.
        data: This rank's rows: pytree of arrays `[per_rank * rows, ...]`.
        first: Number of this rank's first chunk.
        number: `per_rank` as a value that the compiler does not know.
        per_rank: Chunks of a rank, a power of two.

    Returns:
        The sums, and the values that are the same for every chunk.
    """
    shapes, same_shapes = jax.eval_shape(measure, chunk_of(data, 0, per_rank=per_rank), first)
    depth = per_rank.bit_length()
    # Sum number d of the stack is one of 2**d chunks, so that memory holds no more than depth + 1 results.
    stack = _jax.make_varying(jax.tree.map(lambda x: jnp.zeros((depth, *x.shape), x.dtype), shapes))

    same = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), same_shapes)

    def body(index: jax.Array, carry: tuple[Any, Any, Any]) -> tuple[Any, Any, Any]:
        # The rows come from the turn before: all that `measure` is compiled with is the same for every number of chunks.
        chunk, stack, _ = carry
        result, same = measure(chunk, first + index)
        result = _jax.make_varying(result)
        level = jax.lax.population_count(index ^ (index + 1)) - 1
        # A loop, because XLA fuses an addition with the multiplication before it (one rounding instead of two), but not across
        # the border of a loop.
        result = jax.lax.fori_loop(0, level, lambda d, x: jax.tree.map(lambda s, y: s[d] + y, stack, x), result)
        stack = jax.tree.map(lambda s, x: jax.lax.dynamic_update_index_in_dim(s, x, level, 0), stack, result)
        return _next_chunk(data, index + 1, number, per_rank=per_rank), stack, same

    _, stack, same = jax.lax.fori_loop(0, number, body, (chunk_of(data, 0, per_rank=per_rank), stack, same))
    return jax.tree.map(lambda s: s[depth - 1], stack), same


def make_rank_sum(mesh: Mesh) -> Callable[[Any], Any]:
    """Returns the jitted function from arrays `[ranks, ...]`, sharded by rank, to their sums `[1, ...]`, the same bits on each rank."""

    def add(tree: Any) -> Any:
        # One vector for each dtype: on a CPU every exchange holds a thread until its partner comes, and many would hold all threads.
        vectors, unpack = _packed(tree)
        for power in range(mesh.size.bit_length() - 1):
            pairs = [(rank, rank ^ (1 << power)) for rank in range(mesh.size)]
            vectors = [x + jax.lax.ppermute(x, _jax.DATA_AXIS, pairs) for x in vectors]
        return unpack(vectors)

    if mesh.size == 1:
        return lambda tree: tree
    return jax.jit(_jax.shard_map_to_equals(add, mesh=mesh, in_specs=PartitionSpec(_jax.DATA_AXIS)))


def _packed(tree: Any) -> tuple[list[jax.Array], Callable[[list[jax.Array]], Any]]:
    """Returns arrays as one vector for each dtype, and the function that turns such vectors into arrays of the old shapes."""
    leaves, structure = jax.tree.flatten(tree)
    dtypes = sorted({x.dtype for x in leaves}, key=str)

    def unpack(vectors: list[jax.Array]) -> Any:
        rest = dict(zip(dtypes, vectors, strict=True))
        arrays = []
        for leaf in leaves:
            own, rest[leaf.dtype] = jnp.split(rest[leaf.dtype], [leaf.size])
            arrays.append(own.reshape(leaf.shape))
        return structure.unflatten(arrays)

    return [jnp.concatenate([x.ravel() for x in leaves if x.dtype == dtype]) for dtype in dtypes], unpack


def map_chunks(function: Callable[[Any], Any], data: Any, *, number: jax.Array, per_rank: int) -> Any:
    """Returns the rows of `function` over this rank's chunks, one after the other, inside `shard_map`.

    Args:
        function: From a chunk to a pytree of arrays `[rows, ...]` that vary over the ranks.
        data: This rank's rows: pytree of arrays `[per_rank * rows, ...]`.
        number: `per_rank` as a value that the compiler does not know.
        per_rank: Chunks of a rank.
    """
    shapes = jax.eval_shape(function, chunk_of(data, 0, per_rank=per_rank))
    results = _jax.make_varying(jax.tree.map(lambda x: jnp.zeros((per_rank * x.shape[0], *x.shape[1:]), x.dtype), shapes))

    def body(index: jax.Array, carry: tuple[Any, Any]) -> tuple[Any, Any]:
        chunk, results = carry
        rows = function(chunk)
        results = jax.tree.map(lambda a, x: jax.lax.dynamic_update_slice_in_dim(a, x, index * x.shape[0], 0), results, rows)
        return _next_chunk(data, index + 1, number, per_rank=per_rank), results

    return jax.lax.fori_loop(0, number, body, (chunk_of(data, 0, per_rank=per_rank), results))[1]
