"""Checksums of a training state on each device, to find replicas that differ.

The bits of every replicated array are added up as integers, so that the checksum is exact and the
same on every kind of device. CPU devices share memory with the host, which reads it directly; on
other devices a compiled program without communication returns four bytes for each array.
"""

import zlib
from collections.abc import Callable, Sequence
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from tnt_jax import _jax
from tnt_jax.job import Slot
from tnt_jax.train.state import TrainState
from tnt_jax.train.state_arrays import state_arrays

# Odd numbers whose products are spread over all 32 bits: Knuth 1998, TAOCP 3, section 6.4; and the
# second multiplier of xxHash32.
_SPREAD, _MIX = 2654435761, 2246822519
_programs = Slot[dict[Mesh, Callable]](dict)


def replicated_arrays(state: TrainState) -> dict[str, jax.Array]:
    """Returns the arrays of a state that every rank holds in full, by path.

    Sums of each rank's own gradients and a sharded optimizer state are left out.
    """
    shared = replace(state, accumulated=None, residual=None)
    return {path: x for path, x in state_arrays(shared).items() if x.is_fully_replicated}


def local_checksums(arrays: Sequence[jax.Array], mesh: Mesh) -> np.ndarray:
    """Returns the checksums of replicated arrays, uint32 `[local ranks, arrays]`.

    Nothing is communicated. It waits until the arrays are computed.

    Args:
        arrays: Arrays that are replicated over the mesh.
        mesh: The ranks.
    """
    plain = [jax.random.key_data(x) if _is_key(x) else x for x in arrays]
    if mesh.devices.flat[0].platform == "cpu":
        parts = zip(*map(_jax.local_parts, plain), strict=True)
        return np.array([[_of_host_array(x) for x in of_rank] for of_rank in parts], np.uint32)
    programs = _programs.get()
    if mesh not in programs:
        programs[mesh] = checksum_program(mesh)
    # All are started before the first is read.
    sums = [programs[mesh](x) for x in plain]
    by_array = [np.concatenate([np.asarray(x) for x in _jax.local_parts(whole)]) for whole in sums]
    return np.stack(by_array, axis=1)


def checksum_program(mesh: Mesh) -> Callable:
    """Returns a jitted function from a replicated array to uint32 `[ranks]`, of its replicas.

    One program for each shape: a single one for all arrays of a model takes longer to compile than
    the model.
    """

    def of_rank(x: jax.Array) -> jax.Array:
        return _jax.make_varying(checksum(x)[None])

    by_rank = PartitionSpec(_jax.DATA_AXIS)
    return jax.jit(_jax.shard_map(of_rank, mesh=mesh, in_specs=PartitionSpec(), out_specs=by_rank))


def checksum(x: jax.Array) -> jax.Array:
    """Returns the sum of the words of an array times odd numbers, modulo 2**32.

    An odd factor has an inverse, so a change of a single word always changes the sum; of other
    changes one in 2**32 does not.
    """
    words = _words(x)
    place = jax.lax.iota(jnp.uint32, words.size) * jnp.uint32(_SPREAD)
    factor = ((place ^ (place >> 15)) * jnp.uint32(_MIX)) | jnp.uint32(1)
    return jnp.sum(words * factor, dtype=jnp.uint32)


def _words(x: jax.Array) -> jax.Array:
    """Returns the bits of an array as uint32, one or two for each element."""
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        return jnp.concatenate([_words(x.real), _words(x.imag)])
    bits = jnp.iinfo(x.dtype).bits if jnp.issubdtype(x.dtype, jnp.integer) else 0
    if x.dtype == jnp.bool_ or 0 < bits < 8:
        return x.astype(jnp.uint32).ravel()
    unsigned = {1: jnp.uint8, 2: jnp.uint16}.get(x.dtype.itemsize, jnp.uint32)
    return jax.lax.bitcast_convert_type(x, unsigned).astype(jnp.uint32).ravel()


def _of_host_array(part: jax.Array) -> int:
    return zlib.crc32(np.ascontiguousarray(np.asarray(part)).view(np.uint8).data)


def _is_key(x: jax.Array) -> bool:
    return jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
