"""Losses on real numbers, as functions `(y_true, y_pred) -> values [batch, ...]` that reduce the last dimension."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from tnt_jax.keras_compat.losses.base import match_ranks


def mean_squared_error(y_true: jax.Array, y_pred: jax.Array) -> jax.Array:
    """Returns the mean of (y_pred - y_true)^2 over the last dimension [batch, ...]."""
    return jnp.mean(jnp.square(_error(y_true, y_pred)), axis=-1)


def mean_absolute_error(y_true: jax.Array, y_pred: jax.Array) -> jax.Array:
    """Returns the mean of |y_pred - y_true| over the last dimension [batch, ...]."""
    return jnp.mean(jnp.abs(_error(y_true, y_pred)), axis=-1)


def _error(y_true: jax.Array, y_pred: jax.Array) -> jax.Array:
    y_true, y_pred = match_ranks(y_true.astype(y_pred.dtype), y_pred)
    return y_pred - y_true
