"""Hinge losses: functions `(y_true, y_pred) -> values [batch, ...]`, and their classes.

Targets are -1 and 1, or 0 and 1. Keras decides which from the whole batch; here a 0 always means
-1, which is the same unless zeros and negative numbers are mixed (`losses.check_labels` refuses
that), and does not depend on how a batch is split.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from tnt_jax.keras_compat.losses.base import LossFunctionWrapper, of_one_dtype


def hinge(y_true: ArrayLike, y_pred: ArrayLike) -> jax.Array:
    """Returns the mean of max(1 - y_true * y_pred, 0) over the last dimension [batch, ...]."""
    signs, y_pred = _signs(y_true, y_pred)
    return jnp.mean(jnp.maximum(1 - signs * y_pred, 0), axis=-1)


def squared_hinge(y_true: ArrayLike, y_pred: ArrayLike) -> jax.Array:
    """Returns the mean of max(1 - y_true * y_pred, 0)^2 over the last dimension [batch, ...]."""
    signs, y_pred = _signs(y_true, y_pred)
    return jnp.mean(jnp.square(jnp.maximum(1 - signs * y_pred, 0)), axis=-1)


def categorical_hinge(y_true: ArrayLike, y_pred: ArrayLike) -> jax.Array:
    """Returns max(largest wrong output - right one + 1, 0) for one-hot [batch, ..., classes]."""
    y_true, y_pred = of_one_dtype(y_true, y_pred)
    right = jnp.sum(y_true * y_pred, axis=-1)
    wrong = jnp.max((1 - y_true) * y_pred, axis=-1)
    return jnp.maximum(wrong - right + 1, 0)


def _signs(y_true: ArrayLike, y_pred: ArrayLike) -> tuple[jax.Array, jax.Array]:
    y_true, y_pred = of_one_dtype(y_true, y_pred)
    return jnp.where(y_true == 0, -1, y_true), y_pred


class Hinge(LossFunctionWrapper):
    """Mean of max(1 - y_true * y_pred, 0) over the last dimension."""

    targets = "sign"

    def __init__(
        self,
        reduction: str | None = "sum_over_batch_size",
        name: str | None = "hinge",
        dtype: Any = None,
    ) -> None:
        super().__init__(hinge, reduction, name, dtype)


class SquaredHinge(LossFunctionWrapper):
    """Mean of max(1 - y_true * y_pred, 0)^2 over the last dimension."""

    targets = "sign"

    def __init__(
        self,
        reduction: str | None = "sum_over_batch_size",
        name: str | None = "squared_hinge",
        dtype: Any = None,
    ) -> None:
        super().__init__(squared_hinge, reduction, name, dtype)


class CategoricalHinge(LossFunctionWrapper):
    """Margin by which the right output, of one-hot targets, fails to exceed all wrong ones by 1."""

    targets = "distribution"

    def __init__(
        self,
        reduction: str | None = "sum_over_batch_size",
        name: str | None = "categorical_hinge",
        dtype: Any = None,
    ) -> None:
        super().__init__(categorical_hinge, reduction, name, dtype)
