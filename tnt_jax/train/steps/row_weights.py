"""Weights of rows: how they align with values of more dimensions, and masks of padded rows."""

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike


def match_ranks(left: jax.Array, right: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Adds or removes a last dimension of size one if that makes the ranks of two arrays equal.

    A vector is expanded rather than the other array squeezed, as in Keras: `[b, 1], [b]` gives `[b,
    1], [b, 1]`.
    """
    if left.ndim == right.ndim + 1 and left.shape[-1] == 1:
        return (left, right[..., None]) if right.ndim == 1 else (left[..., 0], right)
    if right.ndim == left.ndim + 1 and right.shape[-1] == 1:
        return (left[..., None], right) if left.ndim == 1 else (left, right[..., 0])
    return left, right


def where_rows(mask: ArrayLike, leaf: jax.Array, otherwise: float) -> jax.Array:
    """Returns `leaf` [rows, ...] with the rows whose mask is 0 replaced by `otherwise`."""
    mask = jnp.asarray(mask) != 0
    return jnp.where(
        mask.reshape(mask.shape + (1,) * (leaf.ndim - 1)), leaf, jnp.asarray(otherwise, leaf.dtype)
    )


def weighted(
    values: jax.Array,
    sample_weight: ArrayLike | None,
    valid: jax.Array | None,
    mask: ArrayLike | None,
) -> tuple[jax.Array, jax.Array | None]:
    """Returns values and weights of matching ranks, which are 0 on padding and invalid values."""
    weight = None
    if sample_weight is not None:
        values, weight = _aligned(values, jnp.asarray(sample_weight).astype(values.dtype))
        weight = weight if mask is None else where_rows(mask, weight, 0)
    if valid is not None:
        valid = jnp.reshape(valid, values.shape).astype(values.dtype)
        weight = valid if weight is None else weight * valid
    return values, weight


def _aligned(values: jax.Array, weight: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns both with equal ranks; weights of fewer dimensions weigh whole slices."""
    original = weight.shape
    if weight.ndim == 0 or values.ndim == 0:
        return values, weight
    values, weight = match_ranks(values, weight)
    weight = weight.reshape(weight.shape + (1,) * (values.ndim - weight.ndim))
    if weight.ndim > values.ndim or any(
        w not in (1, v) for w, v in zip(weight.shape, values.shape, strict=True)
    ):
        raise ValueError(
            f"sample_weight of shape {original} does not fit loss values of shape {values.shape}. "
            f"Pass one weight per row, shape {values.shape[:1]}, or one per value, shape "
            f"{values.shape}."
        )
    return values, weight
