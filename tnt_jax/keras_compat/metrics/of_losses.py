"""Metrics that are the mean of a loss over rows."""

from typing import Any

import jax
from jax.typing import ArrayLike

from tnt_jax.keras_compat import losses
from tnt_jax.keras_compat.metrics.reduction import MeanMetricWrapper


def cosine_similarity(y_true: ArrayLike, y_pred: ArrayLike, axis: int = -1) -> jax.Array:
    """Returns the cosine of the angle between vectors along `axis` [rows, ...]."""
    return -losses.cosine_similarity(y_true, y_pred, axis)


class MeanSquaredError(MeanMetricWrapper):
    """Mean of (y_pred - y_true)^2."""

    def __init__(self, name: str | None = "mean_squared_error", dtype: Any = None) -> None:
        super().__init__(losses.MeanSquaredError(), name, dtype)


class MeanAbsoluteError(MeanMetricWrapper):
    """Mean of |y_pred - y_true|."""

    def __init__(self, name: str | None = "mean_absolute_error", dtype: Any = None) -> None:
        super().__init__(losses.MeanAbsoluteError(), name, dtype)


class MeanAbsolutePercentageError(MeanMetricWrapper):
    """Mean of 100 * |y_true - y_pred| / |y_true|."""

    def __init__(
        self, name: str | None = "mean_absolute_percentage_error", dtype: Any = None
    ) -> None:
        super().__init__(losses.MeanAbsolutePercentageError(), name, dtype)


class MeanSquaredLogarithmicError(MeanMetricWrapper):
    """Mean of (log(y_pred + 1) - log(y_true + 1))^2."""

    def __init__(
        self, name: str | None = "mean_squared_logarithmic_error", dtype: Any = None
    ) -> None:
        super().__init__(losses.MeanSquaredLogarithmicError(), name, dtype)


class LogCoshError(MeanMetricWrapper):
    """Mean of log(cosh(y_pred - y_true))."""

    def __init__(self, name: str | None = "logcosh", dtype: Any = None) -> None:
        super().__init__(losses.LogCosh(), name, dtype)


class CosineSimilarity(MeanMetricWrapper):
    """Mean cosine of the angle between target and output vectors; the loss is its negative."""

    def __init__(
        self, name: str | None = "cosine_similarity", dtype: Any = None, axis: int = -1
    ) -> None:
        super().__init__(cosine_similarity, name, dtype, axis=axis)
        self.axis = axis


class Hinge(MeanMetricWrapper):
    """Mean of max(1 - y_true * y_pred, 0)."""

    def __init__(self, name: str | None = "hinge", dtype: Any = None) -> None:
        super().__init__(losses.Hinge(), name, dtype)


class SquaredHinge(MeanMetricWrapper):
    """Mean of max(1 - y_true * y_pred, 0)^2."""

    def __init__(self, name: str | None = "squared_hinge", dtype: Any = None) -> None:
        super().__init__(losses.SquaredHinge(), name, dtype)


class CategoricalHinge(MeanMetricWrapper):
    """Mean margin by which the right output fails to exceed all wrong ones by 1."""

    def __init__(self, name: str | None = "categorical_hinge", dtype: Any = None) -> None:
        super().__init__(losses.CategoricalHinge(), name, dtype)


class KLDivergence(MeanMetricWrapper):
    """Mean divergence of target distributions from output distributions."""

    def __init__(self, name: str | None = "kl_divergence", dtype: Any = None) -> None:
        super().__init__(losses.KLDivergence(), name, dtype)


class Poisson(MeanMetricWrapper):
    """Mean negative log-likelihood of counts under rates `y_pred`, up to a constant."""

    def __init__(self, name: str | None = "poisson", dtype: Any = None) -> None:
        super().__init__(losses.Poisson(), name, dtype)


class BinaryCrossentropy(MeanMetricWrapper):
    """Mean binary cross-entropy, of probabilities unless `from_logits`."""

    def __init__(
        self,
        name: str | None = "binary_crossentropy",
        dtype: Any = None,
        from_logits: bool = False,
        label_smoothing: float = 0.0,
    ) -> None:
        super().__init__(losses.BinaryCrossentropy(from_logits, label_smoothing), name, dtype)
        self.from_logits = from_logits
        self.label_smoothing = label_smoothing


class CategoricalCrossentropy(MeanMetricWrapper):
    """Mean cross-entropy of target distributions, of probabilities unless `from_logits`."""

    def __init__(
        self,
        name: str | None = "categorical_crossentropy",
        dtype: Any = None,
        from_logits: bool = False,
        label_smoothing: float = 0.0,
        axis: int = -1,
    ) -> None:
        loss = losses.CategoricalCrossentropy(from_logits, label_smoothing, axis)
        super().__init__(loss, name, dtype)
        self.from_logits = from_logits
        self.label_smoothing = label_smoothing
        self.axis = axis


class SparseCategoricalCrossentropy(MeanMetricWrapper):
    """Mean cross-entropy of integer labels, of probabilities unless `from_logits`.

    As in Keras, a value at `ignore_class` counts as 0 in the mean without weights, and is left out
    with weights. The loss of this name always leaves it out.
    """

    def __init__(
        self,
        name: str | None = "sparse_categorical_crossentropy",
        dtype: Any = None,
        from_logits: bool = False,
        ignore_class: int | None = None,
        axis: int = -1,
    ) -> None:
        loss = losses.SparseCategoricalCrossentropy(from_logits, ignore_class, axis=axis)
        super().__init__(loss, name, dtype)
        self.from_logits = from_logits
        self.ignore_class = ignore_class
        self.axis = axis
