"""Which arrays travel together, after which steps, and as which bytes.

A message is the number of rows, float32, and then the arrays: as float32, or, if compressed, the
scale of each followed by a byte, or half a byte, for each element.
"""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from tnt_jax.train.local.groups import Compression

# The largest of 8-bit integers that has a negative.
_LARGEST = 127.0
# Powers of two that three bits of exponent and no mantissa write besides 0, up to 1 (E3M0, which
# Streaming DiLoCo sends, section 2.4), and what float32 adds to their exponents, 1 to 7.
_POWERS, _BIAS = 7, 120
_MANTISSA_BITS = 23


def plan_fragments(nbytes: Sequence[int], fragments: int) -> list[list[int]]:
    """Cuts consecutive arrays into parts of about equal size, none of which is empty.

    Returns the indices of the arrays of each fragment. A ValueError says that there are fewer
    arrays than fragments.

    >>> plan_fragments([4, 4, 100, 4], 2)
    [[0, 1], [2, 3]]
    """
    if len(nbytes) < fragments:
        raise ValueError(
            f"fragments ({fragments}) must be at most the number of parameter arrays, which is "
            f"{len(nbytes)}: an array is not divided."
        )
    parts, first, sent = [], 0, 0
    for number in range(fragments):
        last = len(nbytes) - (fragments - number - 1)
        goal = (sum(nbytes) - sent) / (fragments - number)
        end, size = first + 1, nbytes[first]
        while end < last and size + nbytes[end] / 2 <= goal:
            size += nbytes[end]
            end += 1
        end = len(nbytes) if number == fragments - 1 else end
        parts.append([*range(first, end)])
        first, sent = end, sent + size
    return parts


def sent_after(step: int, *, every: int, fragments: int) -> list[int]:
    """Returns the fragments that are sent after `step` steps; the last after each `every`.

    >>> [sent_after(step, every=4, fragments=2) for step in range(1, 5)]
    [[], [0], [], [1]]
    """
    return [
        number
        for number in range(fragments)
        if (step - (number + 1) * every // fragments) % every == 0
    ]


def packed(rows: Any, arrays: Sequence[jax.Array], compress: Compression) -> jax.Array:
    """Returns the message of arrays in float32, uint8 `[bytes]`, in a traced program."""
    parts = [_bytes(jnp.asarray(rows, jnp.float32)[None])]
    for array in arrays:
        if compress == "none":
            parts.append(_bytes(array.ravel()))
            continue
        is_int8 = compress == "int8"
        scale = jnp.max(jnp.abs(array), initial=0.0) / (_LARGEST if is_int8 else 1.0)
        scaled = (array / jnp.where(scale > 0, scale, 1.0)).ravel()
        own = _bytes(jnp.round(scaled).astype(jnp.int8)) if is_int8 else _packed_float4(scaled)
        parts += [_bytes(scale[None]), own]
    return jnp.concatenate(parts)


def unpacked(
    message: jax.Array, shapes: Sequence[tuple[int, ...]], compress: Compression
) -> tuple[jax.Array, list[jax.Array]]:
    """Returns the rows and the arrays of a message, in a traced program."""
    rows, message = _floats(message, 1)[0], message[4:]
    arrays = []
    for shape in shapes:
        size, end = math.prod(shape), _array_bytes(shape, compress)
        if compress == "none":
            values = _floats(message, size)
        elif compress == "int8":
            whole = jax.lax.bitcast_convert_type(message[4:end], jnp.int8)
            values = whole.astype(jnp.float32) * _floats(message, 1)
        else:
            values = _unpacked_float4(message[4:end], size) * _floats(message, 1)
        arrays.append(values.reshape(shape))
        message = message[end:]
    return rows, arrays


def message_bytes(shapes: Sequence[tuple[int, ...]], compress: Compression) -> int:
    """Returns the size of a message."""
    return 4 + sum(_array_bytes(shape, compress) for shape in shapes)


def _array_bytes(shape: tuple[int, ...], compress: Compression) -> int:
    size = math.prod(shape)
    return {"none": 4 * size, "int8": 4 + size, "float4": 4 + (size + 1) // 2}[compress]


def _packed_float4(scaled: jax.Array) -> jax.Array:
    """Returns two elements in each byte, the first in its lower half."""
    size = jnp.abs(scaled)
    bits = jax.lax.bitcast_convert_type(size, jnp.uint32)
    # Half of a mantissa, which makes the nearest power of two of the exponent.
    half = jnp.uint32(1 << (_MANTISSA_BITS - 1))
    exponents = jnp.clip((bits + half) >> _MANTISSA_BITS, _BIAS + 1, _BIAS + _POWERS) - _BIAS
    # The least power is nearer than 0 from its half on.
    codes = jnp.where(size >= 2.0**-_POWERS, exponents, 0) | ((scaled < 0) << 3)
    codes = codes.astype(jnp.uint8)
    pairs = jnp.pad(codes, (0, codes.size % 2)).reshape(-1, 2)
    return pairs[:, 0] | (pairs[:, 1] << 4)


def _unpacked_float4(message: jax.Array, size: int) -> jax.Array:
    codes = jnp.stack([message & 15, message >> 4], axis=1).ravel()[:size].astype(jnp.uint32)
    exponents = codes & _POWERS
    bits = jnp.where(exponents > 0, (exponents + _BIAS) << _MANTISSA_BITS, 0) | (codes >> 3 << 31)
    return jax.lax.bitcast_convert_type(bits, jnp.float32)


def _bytes(array: jax.Array) -> jax.Array:
    return jax.lax.bitcast_convert_type(array, jnp.uint8).ravel()


def _floats(message: jax.Array, size: int) -> jax.Array:
    return jax.lax.bitcast_convert_type(message[: 4 * size].reshape(size, 4), jnp.float32)
