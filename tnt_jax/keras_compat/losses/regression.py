"""Losses on real numbers: functions `(y_true, y_pred) -> values [batch, ...]`, and their classes.

The functions reduce the last dimension; a last dimension of size one is added to or removed from
either argument to match.

Targets of hinge losses are -1 and 1, or 0 and 1. Keras decides which from the whole batch; here a 0
always means -1, which is the same unless zeros and negative numbers are mixed
(`losses.check_labels` refuses that), and does not depend on how a batch is split.
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike

from tnt_jax.keras_compat.losses.base import EPSILON, LossFunctionWrapper, of_one_dtype
from tnt_jax.train.steps.epoch_sums import match_ranks


def mean_squared_error(y_true: ArrayLike, y_pred: ArrayLike) -> jax.Array:
    """Returns the mean of (y_pred - y_true)^2 [batch, ...]."""
    y_true, y_pred = _matched(y_true, y_pred)
    return jnp.mean(jnp.square(y_pred - y_true), axis=-1)


def mean_absolute_error(y_true: ArrayLike, y_pred: ArrayLike) -> jax.Array:
    """Returns the mean of |y_pred - y_true| [batch, ...]."""
    y_true, y_pred = _matched(y_true, y_pred)
    return jnp.mean(jnp.abs(y_pred - y_true), axis=-1)


def mean_absolute_percentage_error(y_true: ArrayLike, y_pred: ArrayLike) -> jax.Array:
    """Returns the mean of 100 * |y_true - y_pred| / max(|y_true|, 1e-7) [batch, ...]."""
    y_true, y_pred = _matched(y_true, y_pred)
    errors = jnp.abs((y_true - y_pred) / jnp.maximum(jnp.abs(y_true), EPSILON))
    return 100 * jnp.mean(errors, axis=-1)


def mean_squared_logarithmic_error(y_true: ArrayLike, y_pred: ArrayLike) -> jax.Array:
    """Returns the mean of (log(y_pred + 1) - log(y_true + 1))^2 [batch, ...].

    Numbers below 1e-7 count as 1e-7.
    """
    y_true, y_pred = _matched(y_true, y_pred)
    log_true, log_pred = (jnp.log(jnp.maximum(y, EPSILON) + 1) for y in (y_true, y_pred))
    return jnp.mean(jnp.square(log_pred - log_true), axis=-1)


def huber(y_true: ArrayLike, y_pred: ArrayLike, delta: float = 1.0) -> jax.Array:
    """Returns the mean [batch, ...] of e^2 / 2, or delta * (|e| - delta / 2) if |e| > delta."""
    # Huber 1964.
    y_true, y_pred = _matched(y_true, y_pred)
    return jnp.mean(optax.huber_loss(y_pred, y_true, delta=delta), axis=-1)


def log_cosh(y_true: ArrayLike, y_pred: ArrayLike) -> jax.Array:
    """Returns the mean of log(cosh(y_pred - y_true)) [batch, ...]."""
    y_true, y_pred = _matched(y_true, y_pred)
    return jnp.mean(optax.log_cosh(y_pred, y_true), axis=-1)


def cosine_similarity(y_true: ArrayLike, y_pred: ArrayLike, axis: int = -1) -> jax.Array:
    """Returns minus the cosine of the angle between vectors along `axis` [batch, ...]."""
    y_true, y_pred = _matched(y_true, y_pred)
    return -jnp.sum(_unit(y_true, axis) * _unit(y_pred, axis), axis=axis)


def poisson(y_true: ArrayLike, y_pred: ArrayLike) -> jax.Array:
    """Returns the mean of y_pred - y_true * log(y_pred + 1e-7) [batch, ...], y_pred >= 0."""
    y_true, y_pred = _matched(y_true, y_pred)
    return jnp.mean(y_pred - y_true * jnp.log(y_pred + EPSILON), axis=-1)


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


def _matched(y_true: ArrayLike, y_pred: ArrayLike) -> tuple[jax.Array, jax.Array]:
    return match_ranks(*of_one_dtype(y_true, y_pred))


def _unit(vectors: jax.Array, axis: int) -> jax.Array:
    """Returns unit vectors; those shorter than 1e-7 stay shorter, so that zero has a gradient."""
    squares = jnp.sum(jnp.square(vectors), axis=axis, keepdims=True)
    return vectors * jax.lax.rsqrt(jnp.maximum(squares, EPSILON**2))


def _signs(y_true: ArrayLike, y_pred: ArrayLike) -> tuple[jax.Array, jax.Array]:
    y_true, y_pred = of_one_dtype(y_true, y_pred)
    return jnp.where(y_true == 0, -1, y_true), y_pred


class MeanSquaredError(LossFunctionWrapper):
    """Mean of (y_pred - y_true)^2 over the last dimension."""

    targets = "like_outputs"

    def __init__(
        self,
        reduction: str | None = "sum_over_batch_size",
        name: str | None = "mean_squared_error",
        dtype: Any = None,
    ) -> None:
        super().__init__(mean_squared_error, reduction, name, dtype)


class MeanAbsoluteError(LossFunctionWrapper):
    """Mean of |y_pred - y_true| over the last dimension."""

    targets = "like_outputs"

    def __init__(
        self,
        reduction: str | None = "sum_over_batch_size",
        name: str | None = "mean_absolute_error",
        dtype: Any = None,
    ) -> None:
        super().__init__(mean_absolute_error, reduction, name, dtype)


class MeanAbsolutePercentageError(LossFunctionWrapper):
    """Mean of 100 * |y_true - y_pred| / |y_true| over the last dimension."""

    targets = "like_outputs"

    def __init__(
        self,
        reduction: str | None = "sum_over_batch_size",
        name: str | None = "mean_absolute_percentage_error",
        dtype: Any = None,
    ) -> None:
        super().__init__(mean_absolute_percentage_error, reduction, name, dtype)


class MeanSquaredLogarithmicError(LossFunctionWrapper):
    """Mean of (log(y_pred + 1) - log(y_true + 1))^2 over the last dimension."""

    targets = "like_outputs"

    def __init__(
        self,
        reduction: str | None = "sum_over_batch_size",
        name: str | None = "mean_squared_logarithmic_error",
        dtype: Any = None,
    ) -> None:
        super().__init__(mean_squared_logarithmic_error, reduction, name, dtype)


class Huber(LossFunctionWrapper):
    """Squared error for errors up to `delta` and absolute error beyond; see `losses.huber`."""

    targets = "like_outputs"

    def __init__(
        self,
        delta: float = 1.0,
        reduction: str | None = "sum_over_batch_size",
        name: str | None = "huber_loss",
        dtype: Any = None,
    ) -> None:
        super().__init__(huber, reduction, name, dtype, delta=delta)
        self.delta = delta


class LogCosh(LossFunctionWrapper):
    """Mean of log(cosh(y_pred - y_true)) over the last dimension."""

    targets = "like_outputs"

    def __init__(
        self,
        reduction: str | None = "sum_over_batch_size",
        name: str | None = "log_cosh",
        dtype: Any = None,
    ) -> None:
        super().__init__(log_cosh, reduction, name, dtype)


class CosineSimilarity(LossFunctionWrapper):
    """Negative cosine of the angle between target and output vectors, in [-1, 1]."""

    targets = "like_outputs"

    def __init__(
        self,
        axis: int = -1,
        reduction: str | None = "sum_over_batch_size",
        name: str | None = "cosine_similarity",
        dtype: Any = None,
    ) -> None:
        super().__init__(cosine_similarity, reduction, name, dtype, axis=axis)
        self.axis = axis


class Poisson(LossFunctionWrapper):
    """Negative log-likelihood of counts under rates, up to a constant; see `losses.poisson`."""

    targets = "like_outputs"

    def __init__(
        self,
        reduction: str | None = "sum_over_batch_size",
        name: str | None = "poisson",
        dtype: Any = None,
    ) -> None:
        super().__init__(poisson, reduction, name, dtype)


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
