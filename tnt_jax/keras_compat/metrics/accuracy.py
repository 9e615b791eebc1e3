"""Accuracies: functions that return 0 or 1 for each prediction [rows, ...], and their means."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from tnt_jax.keras_compat.losses.base import of_one_dtype
from tnt_jax.keras_compat.metrics.reduction import MeanMetricWrapper
from tnt_jax.train.steps.row_weights import match_ranks


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
    return (
        jnp.argmax(jnp.asarray(y_true), axis=-1) == jnp.argmax(jnp.asarray(y_pred), axis=-1)
    ).astype(jnp.float32)


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
    """Returns where fewer than `k` outputs are larger than the labelled one.

    Ties thus count as right.

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
