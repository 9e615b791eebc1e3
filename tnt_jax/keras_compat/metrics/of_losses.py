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


class MeanAbsolutePercentageError(MeanMetricWrapper):
    """Mean of 100 * |y_true - y_pred| / |y_true|."""

    def __init__(self, name: str = "mean_absolute_percentage_error") -> None:
        super().__init__(losses.MeanAbsolutePercentageError(), name)


class MeanSquaredLogarithmicError(MeanMetricWrapper):
    """Mean of (log(y_pred + 1) - log(y_true + 1))^2."""

    def __init__(self, name: str = "mean_squared_logarithmic_error") -> None:
        super().__init__(losses.MeanSquaredLogarithmicError(), name)


class LogCoshError(MeanMetricWrapper):
    """Mean of log(cosh(y_pred - y_true))."""

    def __init__(self, name: str = "logcosh") -> None:
        super().__init__(losses.LogCosh(), name)


class CosineSimilarity(MeanMetricWrapper):
    """Mean cosine of the angle between target and output vectors; the loss of that name is minus it."""

    def __init__(self, name: str = "cosine_similarity", *, axis: int = -1) -> None:
        super().__init__(lambda y_true, y_pred: -losses.cosine_similarity(y_true, y_pred, axis), name)


class Hinge(MeanMetricWrapper):
    """Mean of max(1 - y_true * y_pred, 0)."""

    def __init__(self, name: str = "hinge") -> None:
        super().__init__(losses.Hinge(), name)


class SquaredHinge(MeanMetricWrapper):
    """Mean of max(1 - y_true * y_pred, 0)^2."""

    def __init__(self, name: str = "squared_hinge") -> None:
        super().__init__(losses.SquaredHinge(), name)


class CategoricalHinge(MeanMetricWrapper):
    """By how much the right output fails to beat every wrong one by 1, on average."""

    def __init__(self, name: str = "categorical_hinge") -> None:
        super().__init__(losses.CategoricalHinge(), name)


class KLDivergence(MeanMetricWrapper):
    """Mean divergence of target distributions from output distributions."""

    def __init__(self, name: str = "kl_divergence") -> None:
        super().__init__(losses.KLDivergence(), name)


class Poisson(MeanMetricWrapper):
    """Mean negative log-likelihood of counts under rates `y_pred`, up to a constant."""

    def __init__(self, name: str = "poisson") -> None:
        super().__init__(losses.Poisson(), name)


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


class R2Score(Metric):
    """1 - (sum of squared errors) / (sum of squared deviations from the mean), for outputs [rows, outputs].

    Args:
        class_aggregation: `"uniform_average"` of the outputs, or `"variance_weighted_average"`.
        name: Name of the metric.
    """

    def __init__(self, class_aggregation: str = "uniform_average", *, name: str = "r2_score") -> None:
        super().__init__(name)
        if class_aggregation not in ("uniform_average", "variance_weighted_average"):
            raise ValueError(
                f"class_aggregation must be 'uniform_average' or 'variance_weighted_average', got {class_aggregation!r}."
            )
        self.class_aggregation = class_aggregation

    def increments(self, y_true: Any, y_pred: Any, weight: ArrayLike | None = None) -> dict[str, jax.Array]:
        """Returns weighted sums of the targets, their squares, squared errors and ones [outputs]."""
        y_true, y_pred = match_ranks(at_least_float32(y_true), at_least_float32(y_pred))
        y_true, y_pred = (array[:, None] if array.ndim == 1 else array for array in (y_true, y_pred))
        weights = jnp.ones(y_true.shape[:1]) if weight is None else jnp.asarray(weight, jnp.float32)
        weights = jnp.broadcast_to(weights[:, None] if weights.ndim == 1 else weights, y_true.shape)
        parts = {"total": y_true, "squares": y_true**2, "errors": (y_true - y_pred) ** 2, "count": jnp.ones_like(y_true)}
        return {key: jnp.sum(jnp.where(weights == 0, 0, part * weights), axis=0) for key, part in parts.items()}

    def compute(self, sums: dict[str, jax.Array]) -> jax.Array:
        """Returns the score; an output whose targets are all equal scores 0 unless it is exact."""
        deviations = sums["squares"] - sums["total"] ** 2 / sums["count"]
        scores = 1 - sums["errors"] / deviations
        scores = jnp.where(jnp.isinf(scores), 0, scores)
        if self.class_aggregation == "uniform_average":
            return jnp.mean(scores)
        return jnp.sum(deviations * scores) / jnp.sum(deviations)
