"""Which arrays travel together, after which steps, and as which bytes.

A message is the number of rows, float32, and then the arrays: as float32, or, with int8, the scale
of each followed by a byte for each element.
"""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from tnt_jax.train.local.groups import Compression

# The largest of 8-bit integers that has a negative.
_LARGEST = 127.0


def plan_fragments(nbytes: Sequence[int], fragments: int) -> list[list[int]]:
    """Cuts consecutive arrays into `fragments` parts of about equal size; none is empty.

    >>> plan_fragments([4, 4, 100, 4], 2)
    [[0, 1], [2, 3]]

    Args:
        nbytes: Size of each array.
        fragments: Number of parts.

    Returns:
        Indices into `nbytes`, one list for each fragment.

    Raises:
        ValueError: If there are fewer arrays than fragments.
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
        else:
            scale = jnp.max(jnp.abs(array), initial=0.0) / _LARGEST
            whole = jnp.round(array / jnp.where(scale > 0, scale, 1.0))
            parts += [_bytes(scale[None]), _bytes(whole.astype(jnp.int8).ravel())]
    return jnp.concatenate(parts)


def unpacked(
    message: jax.Array, shapes: Sequence[tuple[int, ...]], compress: Compression
) -> tuple[jax.Array, list[jax.Array]]:
    """Returns the rows and the arrays of a message, in a traced program."""
    rows, message = _floats(message, 1)[0], message[4:]
    arrays = []
    for shape in shapes:
        size = math.prod(shape)
        if compress == "none":
            values, message = _floats(message, size), message[4 * size :]
        else:
            scale, message = _floats(message, 1)[0], message[4:]
            whole = jax.lax.bitcast_convert_type(message[:size], jnp.int8)
            values, message = whole.astype(jnp.float32) * scale, message[size:]
        arrays.append(values.reshape(shape))
    return rows, arrays


def message_bytes(shapes: Sequence[tuple[int, ...]], compress: Compression) -> int:
    """Returns the size of a message."""
    sizes = [math.prod(shape) for shape in shapes]
    return 4 + sum(4 * size if compress == "none" else 4 + size for size in sizes)


def _bytes(array: jax.Array) -> jax.Array:
    return jax.lax.bitcast_convert_type(array, jnp.uint8).ravel()


def _floats(message: jax.Array, size: int) -> jax.Array:
    return jax.lax.bitcast_convert_type(message[: 4 * size].reshape(size, 4), jnp.float32)
