"""Random numbers per row of the global batch: dropout does not depend on the number of devices.

A key of the implementation below behaves like a threefry key, except for arrays whose leading
dimension is the number of local rows. These are filled from counters (row of the global batch,
position in the row) instead of one running counter, so rank 3 of 4 draws the numbers that a single
device draws for the same rows. Arrays with another leading dimension are the same on every rank.
"""

import math

import jax
import jax.numpy as jnp

from tnt_jax import _jax

# Words of a key: two of threefry, the rank's first row in the global batch, the rank's number of
# rows.
_KEY_WORDS = 4
_UINT = {8: jnp.uint8, 16: jnp.uint16, 32: jnp.uint32, 64: jnp.uint64}


def batch_key(
    words: jax.Array, step: jax.Array | int, num_rows: int, *, first_rank: jax.Array | int = 0
) -> jax.Array:
    """Returns this rank's key for one step, inside `shard_map` over the data axis.

    Args:
        words: Threefry key of the run, uint32 `[2]`, the same on every rank.
        step: Update count; each step draws different numbers.
        num_rows: Rows of this rank's part of the batch, padding included.
        first_rank: Ranks of other meshes that compute earlier rows of the batch.
    """
    first_row = (first_rank + jax.lax.axis_index(_jax.rank_axes())) * num_rows
    return row_key(step_key(words, step), first_row, num_rows)


def evaluation_key(num_rows: int) -> jax.Array:
    """Returns this rank's key for evaluation, inside `shard_map` over the data axis.

    It is the same for every batch and in every run.

    Args:
        num_rows: Rows of this rank's part of the batch, padding included.
    """
    return batch_key(jnp.zeros(2, jnp.uint32), 0, num_rows)


def step_key(words: jax.Array, step: jax.Array | int) -> jax.Array:
    """Returns the key of a step, the same on every rank.

    Args:
        words: Threefry key of the run, uint32 `[2]`.
        step: Update count.
    """
    return jax.random.fold_in(jax.random.wrap_key_data(words, impl="threefry2x32"), step)


def row_key(key: jax.Array, first_row: jax.Array | int, num_rows: jax.Array | int) -> jax.Array:
    """Returns a key that draws global row `first_row + i` as row `i` of an array.

    Args:
        key: Threefry key.
        first_row: Index of the first local row in the global batch.
        num_rows: Local rows: arrays with this leading dimension are drawn per row of the global
            batch.
    """
    rows = jnp.stack(_alike(jnp.asarray(first_row, jnp.uint32), jnp.asarray(num_rows, jnp.uint32)))
    words = jnp.concatenate(_alike(jax.random.key_data(key), rows))
    if _ROWS is None:  # On several devices, `_jax.shard_map` refuses to draw.
        return key
    return jax.random.wrap_key_data(words, impl=_ROWS)


def keys_of_parts(key: jax.Array, num_parts: int, part_rows: int) -> jax.Array:
    """Returns the words of keys for consecutive parts of a rank's rows, uint32 `[parts, words]`.

    Args:
        key: A key of `row_key` for all rows.
        num_parts: Number of parts.
        part_rows: Rows of each part.
    """
    words = jax.random.key_data(key)
    first = words[2] + jnp.arange(num_parts, dtype=jnp.uint32) * part_rows
    columns = [words[0], words[1], first, jnp.uint32(part_rows)]
    return jnp.stack(_alike(*(jnp.broadcast_to(x, num_parts) for x in columns)), axis=-1)


def _alike(*arrays: jax.Array) -> list[jax.Array]:
    """Makes all arrays varying if one is.

    Inside `shard_map` the operands of one operation must agree.
    """
    if any(_jax.is_varying(x) for x in arrays):
        return [_jax.make_varying(x) for x in arrays]
    return list(arrays)


def _seed(seed: jax.Array) -> jax.Array:
    # A fresh seed belongs to no batch: it has 0 rows, so its numbers are the same on every rank.
    words = _jax.threefry_prng_impl.seed(seed)
    return jnp.concatenate([words, jnp.zeros_like(words)])


def _split(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    keys = _jax.threefry_prng_impl.split(key[:2], shape)
    return jnp.concatenate(_alike(keys, jnp.broadcast_to(key[2:], (*shape, 2))), axis=-1)


def _fold_in(key: jax.Array, data: jax.Array | int) -> jax.Array:
    words = _jax.threefry_prng_impl.fold_in(key[:2], jnp.asarray(data))
    return jnp.concatenate(_alike(words, key[2:]))


def _random_bits(key: jax.Array, bit_width: int, shape: tuple[int, ...]) -> jax.Array:
    """Returns random bits from the counters (row of the global batch, position in the row)."""
    num_rows, row_size = (shape[0], math.prod(shape[1:])) if shape else (1, 1)
    first_row = jnp.where(key[3] == num_rows, key[2], jnp.zeros_like(key[2]))
    row = first_row + jax.lax.broadcasted_iota(jnp.uint32, (num_rows, row_size), 0)
    position = jax.lax.broadcasted_iota(jnp.uint32, (num_rows, row_size), 1)
    # Widths as in JAX's own partitionable threefry: both words for 64 bits, their exclusive or
    # below.
    high, low = _jax.threefry2x32_p.bind(key[0], key[1], row, position)
    if bit_width == 64:
        bits = (high.astype(jnp.uint64) << jnp.uint64(32)) | low.astype(jnp.uint64)
    else:
        bits = (high ^ low).astype(_UINT[bit_width])
    return bits.reshape(shape)


_ROWS = _jax.define_prng_impl(
    key_shape=(_KEY_WORDS,),
    seed=_seed,
    split=_split,
    random_bits=_random_bits,
    fold_in=_fold_in,
    name="tnt_rows",
    tag="tntr",
)
