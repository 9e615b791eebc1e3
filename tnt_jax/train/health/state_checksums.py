"""Checksums of a training state on each device, to find replicas that differ.

CPU devices share memory with the host, which reads the bits directly. On other devices a compiled
program adds them up as integers, in which order does not matter, and returns four bytes for each
array. Nothing is communicated.
"""

import zlib
from collections.abc import Callable, Sequence
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from tnt_jax import _jax
from tnt_jax.job import once_per_job
from tnt_jax.train.state import TrainState, state_arrays

# Knuth 1998, TAOCP 3, section 6.4; and the two factors of MurmurHash3's fmix32.
_SPREAD, _FIRST, _SECOND = 2654435761, 0x85EBCA6B, 0xC2B2AE35


def replicated_arrays(state: TrainState) -> list[jax.Array]:
    """Returns the arrays of a state that every rank holds in full."""
    return [x for x in jax.tree.leaves(_shared(state)) if x.is_fully_replicated]


def replicated_paths(state: TrainState) -> list[str]:
    """Returns the paths of `replicated_arrays`, which take longer than their checksums."""
    return [path for path, x in state_arrays(_shared(state)).items() if x.is_fully_replicated]


def local_checksums(arrays: Sequence[jax.Array], mesh: Mesh) -> np.ndarray:
    """Returns the checksums of replicated arrays, uint32 `[local ranks, arrays]`, once computed."""
    plain = list(map(_jax.key_words, arrays))
    if mesh.devices.flat[0].platform == "cpu":
        parts = zip(*map(_jax.local_parts, plain), strict=True)
        return np.array([[_of_host_array(x) for x in of_rank] for of_rank in parts], np.uint32)
    # All are started before the first is read.
    sums = [checksum_program(mesh)(x) for x in plain]
    by_array = [np.concatenate([np.asarray(x) for x in _jax.local_parts(whole)]) for whole in sums]
    return np.stack(by_array, axis=1)


@once_per_job
def checksum_program(mesh: Mesh) -> Callable:
    """Returns a jitted function from a replicated array to uint32 `[ranks]`, of its replicas.

    One program for each shape: a single one for all arrays of a model takes longer to compile than
    the model.
    """

    def of_rank(x: jax.Array) -> jax.Array:
        return _jax.make_varying(checksum(x)[None])

    by_rank = PartitionSpec(_jax.rank_axes(mesh))
    return jax.jit(_jax.shard_map(of_rank, mesh=mesh, in_specs=PartitionSpec(), out_specs=by_rank))


def checksum(x: jax.Array) -> jax.Array:
    """Returns the sum of the mixed words of an array, modulo 2**32.

    The mixture depends on the place of a word and is one to one, so a change of a single word
    always changes the sum; of other changes about one in 2**32 does not.
    """
    words = _words(x)
    mixed = words ^ (jax.lax.iota(jnp.uint32, words.size) * jnp.uint32(_SPREAD))
    # fmix32 of MurmurHash3, https://github.com/aappleby/smhasher, MurmurHash3.cpp.
    mixed = (mixed ^ (mixed >> 16)) * jnp.uint32(_FIRST)
    mixed = (mixed ^ (mixed >> 13)) * jnp.uint32(_SECOND)
    return jnp.sum(mixed ^ (mixed >> 16), dtype=jnp.uint32)


def _words(x: jax.Array) -> jax.Array:
    """Returns the bits of an array as uint32, one or two for each element."""
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        return jnp.concatenate([_words(x.real), _words(x.imag)])
    bits = jnp.iinfo(x.dtype).bits if jnp.issubdtype(x.dtype, jnp.integer) else 0
    if x.dtype == jnp.bool_ or 0 < bits < 8:
        return x.astype(jnp.uint32).ravel()
    unsigned = {1: jnp.uint8, 2: jnp.uint16}.get(x.dtype.itemsize, jnp.uint32)
    return jax.lax.bitcast_convert_type(x, unsigned).astype(jnp.uint32).ravel()


def _shared(state: TrainState) -> TrainState:
    return replace(state, accumulated=None, residual=None)


def _of_host_array(part: jax.Array) -> int:
    return zlib.crc32(np.ascontiguousarray(np.asarray(part)).view(np.uint8).data)
