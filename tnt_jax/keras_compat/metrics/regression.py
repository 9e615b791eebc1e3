"""Metrics of real numbers that are not the mean of a loss: RMSE, R2 score and correlations."""

import warnings
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from tnt_jax.keras_compat.losses.base import EPSILON, divide_no_nan, in_dtype, of_one_dtype
from tnt_jax.keras_compat.metrics.base import Metric, Sums
from tnt_jax.keras_compat.metrics.means import MeanMetricWrapper, mean_sums, sum_of, weigh
from tnt_jax.train.steps.epoch_sums import match_ranks


class RootMeanSquaredError(Metric):
    """Square root of the mean of (y_pred - y_true)^2 over all rows."""

    def __init__(self, name: str | None = "root_mean_squared_error", dtype: Any = None) -> None:
        super().__init__(dtype, name)
        self._declare({"total": (), "count": ()})

    def increments(self, y_true: Any, y_pred: Any, weight: ArrayLike | None = None) -> Sums:
        """Returns the weighted sum of squared errors and the sum of the weights."""
        y_true, y_pred = match_ranks(in_dtype(y_true, self.dtype), in_dtype(y_pred, self.dtype))
        return mean_sums(jnp.square(y_pred - y_true), weight)

    def compute(self, sums: Sums) -> jax.Array:
        """Returns the square root of the mean."""
        return jnp.sqrt(divide_no_nan(sums["total"], sums["count"])).astype(self.dtype)


class R2Score(Metric):
    """1 - (sum of squared errors) / (sum of squared deviations from the mean), [rows, outputs].

    Args:
        class_aggregation: `"uniform_average"` of the outputs, `"variance_weighted_average"`, or
            None for one score per output.
        num_regressors: Number of independent regressors of the adjusted score; 0 for the plain one.
            The adjusted score counts every value as a sample, as in Keras, but leaves out rows with
            weight 0.
    """

    def __init__(
        self,
        class_aggregation: str | None = "uniform_average",
        num_regressors: int = 0,
        name: str | None = "r2_score",
        dtype: Any = None,
    ) -> None:
        super().__init__(dtype, name)
        known = (None, "uniform_average", "variance_weighted_average")
        if class_aggregation not in known:
            raise ValueError(
                f"Invalid value for argument `class_aggregation`: expected one of {known}, got "
                f"{class_aggregation!r}."
            )
        if num_regressors < 0:
            raise ValueError(
                "Invalid value for argument `num_regressors`: expected a value >= 0, got "
                f"{num_regressors}."
            )
        self.class_aggregation = class_aggregation
        self.num_regressors = num_regressors

    def increments(self, y_true: Any, y_pred: Any, weight: ArrayLike | None = None) -> Sums:
        """Returns weighted sums [outputs] and the number of values."""
        y_true, y_pred = match_ranks(in_dtype(y_true, self.dtype), in_dtype(y_pred, self.dtype))
        y_true, y_pred = (y[:, None] if y.ndim == 1 else y for y in (y_true, y_pred))
        if y_true.ndim != 2 or y_pred.ndim != 2:
            raise ValueError(
                "R2Score expects 2D inputs with shape (batch_size, output_dim), got "
                f"y_pred.shape={y_pred.shape} and y_true.shape={y_true.shape}."
            )
        weights = jnp.asarray(1 if weight is None else weight, y_true.dtype)
        weights = jnp.broadcast_to(weights[:, None] if weights.ndim == 1 else weights, y_true.shape)
        parts = {
            "squared_sum": y_true**2,
            "sum": y_true,
            "total_mse": (y_true - y_pred) ** 2,
            "count": jnp.ones_like(y_true),
        }
        sums = {name: jnp.sum(weigh(part, weights), axis=0) for name, part in parts.items()}
        return {"num_samples": sum_of((weights != 0).astype(jnp.float32)), **sums}

    def compute(self, sums: Sums) -> jax.Array:
        """Returns the score; an output whose targets are all equal scores 0 unless it is exact."""
        deviations = sums["squared_sum"] - sums["sum"] ** 2 / sums["count"]
        scores = 1 - sums["total_mse"] / deviations
        scores = jnp.where(jnp.isinf(scores), 0, scores)
        if self.class_aggregation == "uniform_average":
            scores = jnp.mean(scores)
        elif self.class_aggregation is not None:
            scores = jnp.sum(deviations * scores) / jnp.sum(deviations)
        return self._adjusted(scores, sums["num_samples"]) if self.num_regressors else scores

    def _adjusted(self, score: jax.Array, num_samples: jax.Array) -> jax.Array:
        degrees = float(num_samples) - self.num_regressors - 1
        if degrees > 0:
            return 1 - (1 - score) * (num_samples - 1) / degrees
        reason = "More independent predictors than datapoints in adjusted R2 score"
        if degrees == 0:
            reason = "Division by zero in Adjusted R2 score"
        warnings.warn(f"{reason}. Falling back to standard R2 score.", stacklevel=3)
        return score


def pearson_correlation(y_true: ArrayLike, y_pred: ArrayLike, axis: int = -1) -> jax.Array:
    """Returns the correlation of targets and outputs along `axis` [rows, ...]."""
    y_true, y_pred = match_ranks(*of_one_dtype(y_true, y_pred))
    standard = [
        (array - jnp.mean(array, axis, keepdims=True)) / jnp.std(array, axis, keepdims=True)
        for array in (y_true, y_pred)
    ]
    return jnp.mean(standard[0] * standard[1], axis=axis)


def concordance_correlation(y_true: ArrayLike, y_pred: ArrayLike, axis: int = -1) -> jax.Array:
    """Returns the concordance of targets and outputs along `axis` [rows, ...] (Lin 1989).

    As in Keras, both factors of the covariance deviate from the mean of the outputs.
    """
    y_true, y_pred = match_ranks(*of_one_dtype(y_true, y_pred))
    mean_true, mean_pred = (jnp.mean(array, axis, keepdims=True) for array in (y_true, y_pred))
    variances = jnp.var(y_true, axis, keepdims=True) + jnp.var(y_pred, axis, keepdims=True)
    covariances = (y_true - mean_pred) * (y_pred - mean_pred)
    spread = variances + jnp.square(mean_true - mean_pred)
    return jnp.mean(2 * covariances / (spread + EPSILON), axis=axis)


class PearsonCorrelation(MeanMetricWrapper):
    """Mean over rows of the correlation of targets and outputs along `axis`."""

    def __init__(
        self, name: str | None = "pearson_correlation", dtype: Any = None, axis: int = -1
    ) -> None:
        super().__init__(pearson_correlation, name, dtype, axis=axis)
        self.axis = axis


class ConcordanceCorrelation(MeanMetricWrapper):
    """Mean over rows of the concordance along `axis`; see `metrics.concordance_correlation`."""

    def __init__(
        self, name: str | None = "concordance_correlation", dtype: Any = None, axis: int = -1
    ) -> None:
        super().__init__(concordance_correlation, name, dtype, axis=axis)
        self.axis = axis
