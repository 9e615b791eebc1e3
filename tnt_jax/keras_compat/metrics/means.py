"""Means and sums over rows: of values, of accuracies, and of losses.

An accuracy is a function that returns 0 or 1 for each prediction [rows, ...].
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from tnt_jax.keras_compat import losses
from tnt_jax.keras_compat.keras_objects import mask_of_outputs
from tnt_jax.keras_compat.losses.base import (
    Loss,
    divide_no_nan,
    in_dtype,
    of_one_dtype,
    standardized,
)
from tnt_jax.keras_compat.metrics.base import Metric, Sums
from tnt_jax.train.loops.context import weight_of_real_rows
from tnt_jax.train.steps.epoch_sums import match_ranks


class Mean(Metric):
    """Weighted mean of values: `Mean().update_state(values, sample_weight=None)`."""

    def __init__(self, name: str | None = "mean", dtype: Any = None) -> None:
        super().__init__(dtype, name)
        self._declare({"total": (), "count": ()})

    def increments(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, values: Any, weight: ArrayLike | None = None
    ) -> Sums:
        """Returns the weighted sum of values [rows, ...] or a scalar, and that of the weights."""
        return mean_sums(jnp.atleast_1d(in_dtype(values, self.dtype)), weight)

    def compute(self, sums: Sums) -> jax.Array:
        """Returns total / count, 0 if the count is 0."""
        return divide_no_nan(sums["total"], sums["count"]).astype(self.dtype)

    def update_state(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, values: Any, sample_weight: ArrayLike | None = None
    ) -> None:
        """Adds values [rows, ...] to the state."""
        self._add(self.increments(values, weight_of_real_rows(sample_weight, values)))


class Sum(Metric):
    """Weighted sum of values: `Sum().update_state(values, sample_weight=None)`."""

    def __init__(self, name: str | None = "sum", dtype: Any = None) -> None:
        super().__init__(dtype, name)
        self._declare({"total": ()})

    def increments(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, values: Any, weight: ArrayLike | None = None
    ) -> Sums:
        """Returns the weighted sum of values [rows, ...]."""
        values = jnp.atleast_1d(in_dtype(values, self.dtype))
        values, weight = align(values, weight, jnp.sum)
        return {"total": sum_of(values if weight is None else weigh(values, weight))}

    def compute(self, sums: Sums) -> jax.Array:
        """Returns the sum."""
        return jnp.asarray(sums["total"]).astype(self.dtype)

    def update_state(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, values: Any, sample_weight: ArrayLike | None = None
    ) -> None:
        """Adds values [rows, ...] to the state."""
        self._add(self.increments(values, weight_of_real_rows(sample_weight, values)))


class MeanMetricWrapper(Mean):
    """Mean over rows of a function `fn(y_true, y_pred, **kwargs) -> values [rows, ...]`.

    Dimensions after the first are averaged within a row, as in Keras. `loss` is that whose values
    are averaged, or None.
    """

    def __init__(
        self,
        fn: Callable[..., Any] | Loss,
        name: str | None = None,
        dtype: Any = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(name or getattr(fn, "name", None) or getattr(fn, "__name__", None), dtype)
        self.loss = fn if isinstance(fn, Loss) else None
        self.fn = fn.call if isinstance(fn, Loss) else fn
        self.fn_kwargs = kwargs

    def increments(self, y_true: Any, y_pred: Any, weight: ArrayLike | None = None) -> Sums:
        """Returns the weighted sum of the values [rows, ...] and the sum of the weights."""
        values = self._values(y_true, y_pred)
        rows = jnp.shape(jax.tree.leaves(y_pred)[0])[:1]
        if values.ndim == 0 or values.shape[:1] != rows:
            raise ValueError(
                f"Metric {self.name!r} returned values of shape {values.shape} for outputs of "
                f"{rows[0]} rows. A mean over parts of a batch needs one value per row: return "
                "[batch, ...] and leave the mean over the batch to the metric."
            )
        return mean_sums(values, weight)

    def update_state(
        self, y_true: Any, y_pred: Any, sample_weight: ArrayLike | None = None
    ) -> None:
        """Adds rows to the state, except values that a Keras mask on `y_pred` excludes."""
        weight = weight_of_real_rows(self.without_ignored(y_true, y_pred, sample_weight))
        weight = and_valid(weight, mask_of_outputs(y_pred))
        # A whole batch may have a single value, which training refuses; see `increments`.
        self._add(mean_sums(jnp.atleast_1d(self._values(y_true, y_pred)), weight))

    def without_ignored(self, y_true: Any, y_pred: Any, sample_weight: ArrayLike | None) -> Any:
        """Returns the user's weights, with 0 for values that the loss ignores.

        As in Keras, these count as 0 without weights, and not at all with weights.
        """
        if sample_weight is None or self.loss is None:
            return sample_weight
        return and_valid(sample_weight, self.loss.valid(*standardized(y_true, y_pred)))

    def _values(self, y_true: Any, y_pred: Any) -> jax.Array:
        arrays = standardized(y_true, y_pred, self.dtype)
        return in_dtype(self.fn(*arrays, **self.fn_kwargs), self.dtype)


def mean_sums(values: jax.Array, weight: ArrayLike | None) -> Sums:
    """Returns the weighted sum of values [rows, ...] averaged within rows, and that of weights."""
    values, weight = align(values, weight, jnp.mean)
    if weight is None:
        total = sum_of(_within_rows(values))
        return {"total": total, "count": jnp.full((), values.shape[0], total.dtype)}
    total = sum_of(_within_rows(weigh(values, weight)))
    return {"total": total, "count": sum_of(_within_rows(weight))}


def sum_of(values: jax.Array) -> jax.Array:
    """Returns the sum in integers or at least float32: half precision is too coarse for sums."""
    if jnp.issubdtype(values.dtype, jnp.integer):
        return jnp.sum(values, dtype=values.dtype)
    return jnp.sum(values, dtype=jnp.promote_types(values.dtype, jnp.float32))


def align(
    values: jax.Array, weight: ArrayLike | None, reduce: Callable[..., jax.Array]
) -> tuple[jax.Array, jax.Array | None]:
    """Returns values and weights of one shape, where a scalar weight applies to all rows.

    `reduce` removes the dimensions that the weights do not have.
    """
    if weight is None:
        return values, None
    given = jnp.asarray(weight)
    shape = values.shape
    values, weight = match_ranks(values, jnp.atleast_1d(given.astype(values.dtype)))
    if values.ndim > weight.ndim:
        values = reduce(values, axis=tuple(range(weight.ndim, values.ndim)))
    if weight.ndim != values.ndim or any(
        w not in (1, v) for w, v in zip(weight.shape, values.shape, strict=True)
    ):
        raise ValueError(
            f"Weights of shape {given.shape} do not fit values of shape {shape}: pass one per row, "
            f"{shape[:1]}, or one per value."
        )
    return values, jnp.broadcast_to(weight, values.shape)


def and_valid(weight: ArrayLike | None, valid: ArrayLike | None) -> Any:
    """Returns weights, of values or of rows, that are 0 for invalid values."""
    if valid is None:
        return weight
    valid = jnp.asarray(valid).astype(jnp.float32)
    if weight is None:
        return valid
    valid, weight = match_ranks(valid, jnp.asarray(weight))
    return valid * weight.reshape(*weight.shape, *(1,) * (valid.ndim - weight.ndim))


def weigh(values: jax.Array, weight: jax.Array) -> jax.Array:
    """Returns values * weight, and 0 if the weight is 0, even if the value is NaN or infinite."""
    return jnp.where(weight == 0, 0, values * weight)


def _within_rows(values: jax.Array) -> jax.Array:
    return jnp.mean(values, axis=tuple(range(1, values.ndim)))


def accuracy(y_true: ArrayLike, y_pred: ArrayLike) -> jax.Array:
    """Returns where `y_pred` equals `y_true`, as float32 [rows, ...]."""
    y_true, y_pred = match_ranks(*of_one_dtype(y_true, y_pred))
    return (y_true == y_pred).astype(jnp.float32)


def binary_accuracy(y_true: ArrayLike, y_pred: ArrayLike, threshold: float = 0.5) -> jax.Array:
    """Returns where (y_pred > threshold) equals the 0/1 targets, as float32 [rows, ...]."""
    y_true, y_pred = match_ranks(jnp.asarray(y_true), jnp.asarray(y_pred))
    return (y_true == (y_pred > threshold).astype(y_true.dtype)).astype(jnp.float32)


def categorical_accuracy(y_true: ArrayLike, y_pred: ArrayLike) -> jax.Array:
    """Returns where the largest output is the largest target, of [rows, ..., classes]."""
    largest = [jnp.argmax(jnp.asarray(array), axis=-1) for array in (y_true, y_pred)]
    return (largest[0] == largest[1]).astype(jnp.float32)


def sparse_categorical_accuracy(y_true: ArrayLike, y_pred: ArrayLike) -> jax.Array:
    """Returns where the largest output [rows, ..., classes] is the labelled one, as 0 or 1.

    Labels are [rows, ...] or [rows, ..., 1]; the result is float32 [rows, ...].
    """
    y_pred = jnp.asarray(y_pred)
    y_true = _without_class_dim(jnp.asarray(y_true), y_pred)
    return (y_true == jnp.argmax(y_pred, axis=-1).astype(y_true.dtype)).astype(jnp.float32)


def top_k_categorical_accuracy(y_true: ArrayLike, y_pred: ArrayLike, k: int = 5) -> jax.Array:
    """Returns where the largest target is among the `k` largest, of [rows, ..., classes]."""
    return sparse_top_k_categorical_accuracy(jnp.argmax(jnp.asarray(y_true), axis=-1), y_pred, k)


def sparse_top_k_categorical_accuracy(
    y_true: ArrayLike, y_pred: ArrayLike, k: int = 5, from_sorted_ids: bool = False
) -> jax.Array:
    """Returns where fewer than `k` outputs are larger than the labelled one: ties count as right.

    Args:
        y_true: Labels [rows, ...] or [rows, ..., 1].
        y_pred: Outputs [rows, ..., classes].
        k: Number of largest outputs that count.
        from_sorted_ids: Whether the last dimension of `y_pred` holds class numbers, the best first,
            rather than outputs.

    Returns:
        0 or 1, float32 [rows, ...].
    """
    y_true, y_pred = jnp.asarray(y_true), jnp.asarray(y_pred)
    if from_sorted_ids:
        return jnp.any(y_true[..., None] == y_pred[..., :k], axis=-1).astype(jnp.float32)
    labels = _without_class_dim(y_true, y_pred).astype(jnp.int32)
    labelled = jnp.take_along_axis(y_pred, labels[..., None], axis=-1)
    # NaN counts as the smallest output, because nothing compares greater than NaN.
    labelled = jnp.where(jnp.isnan(labelled), -jnp.inf, labelled)
    return (jnp.sum(y_pred > labelled, axis=-1) < k).astype(jnp.float32)


def _without_class_dim(y_true: jax.Array, y_pred: jax.Array) -> jax.Array:
    return y_true[..., 0] if y_true.ndim == y_pred.ndim and y_true.shape[-1] == 1 else y_true


class Accuracy(MeanMetricWrapper):
    """How often `y_pred` equals `y_true`."""

    def __init__(self, name: str | None = "accuracy", dtype: Any = None) -> None:
        super().__init__(accuracy, name, dtype)


class BinaryAccuracy(MeanMetricWrapper):
    """How often (y_pred > threshold) equals the 0/1 target; pass `threshold=0.0` for logits."""

    def __init__(
        self, name: str | None = "binary_accuracy", dtype: Any = None, threshold: float = 0.5
    ) -> None:
        super().__init__(binary_accuracy, name, dtype, threshold=threshold)
        self.threshold = threshold


class CategoricalAccuracy(MeanMetricWrapper):
    """How often the largest output is the largest target [rows, ..., classes]."""

    def __init__(self, name: str | None = "categorical_accuracy", dtype: Any = None) -> None:
        super().__init__(categorical_accuracy, name, dtype)


class SparseCategoricalAccuracy(MeanMetricWrapper):
    """How often the largest output [rows, ..., classes] is the labelled one [rows, ...]."""

    def __init__(self, name: str | None = "sparse_categorical_accuracy", dtype: Any = None) -> None:
        super().__init__(sparse_categorical_accuracy, name, dtype)


class TopKCategoricalAccuracy(MeanMetricWrapper):
    """How often the largest target is among the `k` largest outputs [rows, ..., classes]."""

    def __init__(
        self, k: int = 5, name: str | None = "top_k_categorical_accuracy", dtype: Any = None
    ) -> None:
        super().__init__(top_k_categorical_accuracy, name, dtype, k=k)
        self.k = k


class SparseTopKCategoricalAccuracy(MeanMetricWrapper):
    """How often the labelled output is among the `k` largest outputs [rows, ..., classes]."""

    def __init__(
        self,
        k: int = 5,
        name: str | None = "sparse_top_k_categorical_accuracy",
        dtype: Any = None,
        from_sorted_ids: bool = False,
    ) -> None:
        super().__init__(
            sparse_top_k_categorical_accuracy, name, dtype, k=k, from_sorted_ids=from_sorted_ids
        )
        self.k = k
        self.from_sorted_ids = from_sorted_ids


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
