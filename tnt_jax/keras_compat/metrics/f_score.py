"""F scores: the weighted harmonic mean of precision and recall, from counts per class."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from tnt_jax.keras_compat.losses.base import EPSILON, in_dtype
from tnt_jax.keras_compat.metrics.base import Metric
from tnt_jax.keras_compat.metrics.reduction import weigh


class FBetaScore(Metric):
    """(1 + beta^2) * precision * recall / (beta^2 * precision + recall).

    Targets and outputs are [rows, classes].

    Args:
        average: None for one score per class; `"micro"`: of the counts of all classes; `"macro"`:
            mean of the scores; `"weighted"`: their mean weighted by how often a class occurs.
        beta: Weight of recall, positive.
        threshold: Outputs above it are positive, in (0, 1]; with None, the largest output of a row
            is.
    """

    def __init__(
        self,
        average: str | None = None,
        beta: float = 1.0,
        threshold: float | None = None,
        name: str | None = "fbeta_score",
        dtype: Any = None,
    ) -> None:
        super().__init__(dtype, name)
        if average not in (None, "micro", "macro", "weighted"):
            raise ValueError(
                "Invalid `average` argument value. Expected one of: {None, 'micro', 'macro', "
                f"'weighted'}}. Received: average={average}"
            )
        _check_float("beta", beta)
        if beta <= 0.0:
            raise ValueError(
                f"Invalid `beta` argument value. It should be > 0. Received: beta={beta}"
            )
        if threshold is not None:
            _check_float("threshold", threshold)
            if not 0.0 < threshold <= 1.0:
                raise ValueError(
                    "Invalid `threshold` argument value. It should verify 0 < threshold <= 1. "
                    f"Received: threshold={threshold}"
                )
        self.average = average
        self.beta = beta
        self.threshold = threshold
        self.axis = None if average == "micro" else 0

    def increments(
        self, y_true: Any, y_pred: Any, weight: ArrayLike | None = None
    ) -> dict[str, jax.Array]:
        """Returns the weighted counts [classes], or their sums for `"micro"`."""
        y_true, y_pred = in_dtype(y_true, self.dtype), in_dtype(y_pred, self.dtype)
        if y_true.ndim != 2 or y_pred.ndim != 2:
            raise ValueError(
                "FBetaScore expects 2D inputs with shape (batch_size, output_dim), got "
                f"y_pred.shape={y_pred.shape} and y_true.shape={y_true.shape}."
            )
        weights = jnp.asarray(1 if weight is None else weight, y_pred.dtype)
        weights = jnp.broadcast_to(weights[:, None] if weights.ndim == 1 else weights, y_pred.shape)
        positive = self._decisions(jnp.where(weights == 0, 0, y_pred)).astype(y_pred.dtype)
        counts = {
            "true_positives": positive * y_true,
            "false_positives": positive * (1 - y_true),
            "false_negatives": (1 - positive) * y_true,
            "intermediate_weights": y_true,
        }
        return {
            name: jnp.sum(weigh(count, weights), axis=self.axis, dtype=jnp.float32)
            for name, count in counts.items()
        }

    def compute(self, sums: dict[str, jax.Array]) -> jax.Array:
        """Returns the score, or one score per class without an average."""
        right, support = sums["true_positives"], sums["intermediate_weights"]
        precision = right / (right + sums["false_positives"] + EPSILON)
        recall = right / (right + sums["false_negatives"] + EPSILON)
        squared = self.beta**2
        scores = precision * recall / (squared * precision + recall + EPSILON) * (1 + squared)
        if self.average == "weighted":
            scores = jnp.sum(scores * support / (jnp.sum(support) + EPSILON))
        elif self.average is not None:
            scores = jnp.mean(scores)
        return scores.astype(self.dtype)

    def _decisions(self, y_pred: jax.Array) -> jax.Array:
        if self.threshold is not None:
            return y_pred > self.threshold
        # A row of zeros decides for no class.
        return (y_pred >= jnp.max(y_pred, axis=-1, keepdims=True)) & (jnp.abs(y_pred) > 1e-9)


class F1Score(FBetaScore):
    """Harmonic mean of precision and recall, of [rows, classes]; see `FBetaScore`."""

    def __init__(
        self,
        average: str | None = None,
        threshold: float | None = None,
        name: str | None = "f1_score",
        dtype: Any = None,
    ) -> None:
        super().__init__(average, 1.0, threshold, name, dtype)


def _check_float(name: str, value: Any) -> None:
    if not isinstance(value, float):
        raise ValueError(
            f"Invalid `{name}` argument value. It should be a Python float. Received: "
            f"{name}={value} of type '{type(value)}'"
        )
