"""Metrics that are the mean of a loss over rows, and those close to it."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from tnt_jax.keras_compat import losses
from tnt_jax.keras_compat.losses.base import at_least_float32, divide_no_nan, match_ranks
from tnt_jax.keras_compat.metrics.base import MeanMetricWrapper, Metric, mean_sums


class MeanSquaredError(MeanMetricWrapper):
    """Mean of (y_pred - y_true)^2."""

    def __init__(self, name: str = "mean_squared_error") -> None:
        super().__init__(losses.MeanSquaredError(), name)


class MeanAbsoluteError(MeanMetricWrapper):
    """Mean of |y_pred - y_true|."""

    def __init__(self, name: str = "mean_absolute_error") -> None:
        super().__init__(losses.MeanAbsoluteError(), name)


class RootMeanSquaredError(Metric):
    """Square root of the mean of (y_pred - y_true)^2 over all rows."""

    def __init__(self, name: str = "root_mean_squared_error") -> None:
        super().__init__(name)

    def increments(self, y_true: Any, y_pred: Any, weight: ArrayLike | None = None) -> dict[str, jax.Array]:
        """Returns the weighted sum of squared errors and the sum of the weights."""
        y_true, y_pred = match_ranks(at_least_float32(y_true), at_least_float32(y_pred))
        return mean_sums(jnp.square(y_pred - y_true), weight)

    def compute(self, sums: dict[str, jax.Array]) -> jax.Array:
        """Returns the square root of the mean."""
        return jnp.sqrt(divide_no_nan(sums["total"], sums["count"]))


class BinaryCrossentropy(MeanMetricWrapper):
    """Mean binary cross-entropy, of probabilities unless `from_logits`."""

    def __init__(self, name: str = "binary_crossentropy", *, from_logits: bool = False, label_smoothing: float = 0.0) -> None:
        super().__init__(losses.BinaryCrossentropy(from_logits, label_smoothing=label_smoothing), name)


class CategoricalCrossentropy(MeanMetricWrapper):
    """Mean cross-entropy of target distributions, of probabilities unless `from_logits`."""

    def __init__(
        self,
        name: str = "categorical_crossentropy",
        *,
        from_logits: bool = False,
        label_smoothing: float = 0.0,
        axis: int = -1,
    ) -> None:
        super().__init__(losses.CategoricalCrossentropy(from_logits, label_smoothing=label_smoothing, axis=axis), name)


class SparseCategoricalCrossentropy(MeanMetricWrapper):
    """Mean cross-entropy of integer labels, of probabilities unless `from_logits`.

    A value at `ignore_class` counts as 0 and is part of the mean, as Keras's metric does without weights (its loss leaves
    such values out of the mean).
    """

    def __init__(
        self,
        name: str = "sparse_categorical_crossentropy",
        *,
        from_logits: bool = False,
        ignore_class: int | None = None,
        axis: int = -1,
    ) -> None:
        super().__init__(losses.SparseCategoricalCrossentropy(from_logits, ignore_class=ignore_class, axis=axis), name)
