"""Hinge losses: functions `(y_true, y_pred) -> values [batch, ...]`, and their classes.

Targets are -1 and 1, or 0 and 1. Keras decides which from the whole batch; here a 0 always means -1, which is the same unless
zeros and negative numbers are mixed (`losses.check_labels` refuses that), and does not depend on how a batch is cut.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from tnt_jax.keras_compat.losses.base import LossFunctionWrapper


def hinge(y_true: jax.Array, y_pred: jax.Array) -> jax.Array:
    """Returns the mean of max(1 - y_true * y_pred, 0) over the last dimension [batch, ...]."""
    return jnp.mean(jnp.maximum(1 - _signs(y_true, y_pred) * y_pred, 0), axis=-1)


def squared_hinge(y_true: jax.Array, y_pred: jax.Array) -> jax.Array:
    """Returns the mean of max(1 - y_true * y_pred, 0)^2 over the last dimension [batch, ...]."""
    return jnp.mean(jnp.square(jnp.maximum(1 - _signs(y_true, y_pred) * y_pred, 0)), axis=-1)


def categorical_hinge(y_true: jax.Array, y_pred: jax.Array) -> jax.Array:
    """Returns max(largest wrong output - right output + 1, 0) for one-hot targets [batch, ..., classes]."""
    y_true = jnp.asarray(y_true, y_pred.dtype)
    right = jnp.sum(y_true * y_pred, axis=-1)
    wrong = jnp.max((1 - y_true) * y_pred, axis=-1)
    return jnp.maximum(wrong - right + 1, 0)


def _signs(y_true: jax.Array, y_pred: jax.Array) -> jax.Array:
    y_true = jnp.asarray(y_true, y_pred.dtype)
    return jnp.where(y_true == 0, -1, y_true)


class Hinge(LossFunctionWrapper):
    """Mean of max(1 - y_true * y_pred, 0) over the last dimension."""

    targets = "sign"

    def __init__(self, reduction: str | None = "sum_over_batch_size", *, name: str = "hinge") -> None:
        super().__init__(hinge, reduction, name=name)


class SquaredHinge(LossFunctionWrapper):
    """Mean of max(1 - y_true * y_pred, 0)^2 over the last dimension."""

    targets = "sign"

    def __init__(self, reduction: str | None = "sum_over_batch_size", *, name: str = "squared_hinge") -> None:
        super().__init__(squared_hinge, reduction, name=name)


class CategoricalHinge(LossFunctionWrapper):
    """By how much the right output fails to beat every wrong one by 1, for one-hot targets."""

    targets = "distribution"

    def __init__(self, reduction: str | None = "sum_over_batch_size", *, name: str = "categorical_hinge") -> None:
        super().__init__(categorical_hinge, reduction, name=name)
