"""Accuracies: how often a prediction is right. Functions give 0 or 1 for each prediction [rows, ...]."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from tnt_jax.keras_compat.losses.base import match_ranks
from tnt_jax.keras_compat.metrics.base import MeanMetricWrapper


def accuracy(y_true: jax.Array, y_pred: jax.Array) -> jax.Array:
    """Returns where `y_pred` equals `y_true`, as float32 [rows, ...]."""
    y_true, y_pred = match_ranks(y_true.astype(y_pred.dtype), y_pred)
    return (y_true == y_pred).astype(jnp.float32)


def binary_accuracy(y_true: jax.Array, y_pred: jax.Array, threshold: float = 0.5) -> jax.Array:
    """Returns where (y_pred > threshold) equals the 0/1 targets, as float32 [rows, ...]."""
    y_true, y_pred = match_ranks(y_true, y_pred)
    return (y_true == (y_pred > threshold).astype(y_true.dtype)).astype(jnp.float32)


def categorical_accuracy(y_true: jax.Array, y_pred: jax.Array) -> jax.Array:
    """Returns where the largest output is the largest target; both [rows, ..., classes], the result [rows, ...]."""
    return (jnp.argmax(y_true, axis=-1) == jnp.argmax(y_pred, axis=-1)).astype(jnp.float32)


def sparse_categorical_accuracy(y_true: jax.Array, y_pred: jax.Array) -> jax.Array:
    """Returns where the largest output is the labelled one.

    Args:
        y_true: Labels [rows, ...] or [rows, ..., 1].
        y_pred: Outputs [rows, ..., classes].

    Returns:
        0 or 1, float32 [rows, ...].
    """
    y_true = _without_class_dim(y_true, y_pred)
    return (y_true == jnp.argmax(y_pred, axis=-1).astype(y_true.dtype)).astype(jnp.float32)


def top_k_categorical_accuracy(y_true: jax.Array, y_pred: jax.Array, k: int = 5) -> jax.Array:
    """Returns where the output of the largest target is among the `k` largest; both [rows, ..., classes]."""
    return sparse_top_k_categorical_accuracy(jnp.argmax(y_true, axis=-1), y_pred, k)


def sparse_top_k_categorical_accuracy(y_true: jax.Array, y_pred: jax.Array, k: int = 5) -> jax.Array:
    """Returns where fewer than `k` outputs are larger than the labelled one, so that ties count as right.

    Args:
        y_true: Labels [rows, ...] or [rows, ..., 1].
        y_pred: Outputs [rows, ..., classes].
        k: How many of the largest outputs count.

    Returns:
        0 or 1, float32 [rows, ...].
    """
    labels = _without_class_dim(y_true, y_pred).astype(jnp.int32)
    labelled = jnp.take_along_axis(y_pred, labels[..., None], axis=-1)
    # NaN is the smallest output, not the largest: nothing compares greater than NaN.
    labelled = jnp.where(jnp.isnan(labelled), -jnp.inf, labelled)
    return (jnp.sum(y_pred > labelled, axis=-1) < k).astype(jnp.float32)


def _without_class_dim(y_true: jax.Array, y_pred: jax.Array) -> jax.Array:
    return y_true[..., 0] if y_true.ndim == y_pred.ndim and y_true.shape[-1] == 1 else y_true


class Accuracy(MeanMetricWrapper):
    """How often `y_pred` equals `y_true`."""

    def __init__(self, name: str = "accuracy") -> None:
        super().__init__(accuracy, name)


class BinaryAccuracy(MeanMetricWrapper):
    """How often (y_pred > threshold) equals the 0/1 target; pass `threshold=0.0` for logits."""

    def __init__(self, name: str = "binary_accuracy", *, threshold: float = 0.5) -> None:
        super().__init__(binary_accuracy, name, threshold=threshold)
        self.threshold = threshold


class CategoricalAccuracy(MeanMetricWrapper):
    """How often the largest output is the largest target [rows, ..., classes]."""

    def __init__(self, name: str = "categorical_accuracy") -> None:
        super().__init__(categorical_accuracy, name)


class SparseCategoricalAccuracy(MeanMetricWrapper):
    """How often the largest output [rows, ..., classes] is the labelled one [rows, ...]."""

    def __init__(self, name: str = "sparse_categorical_accuracy") -> None:
        super().__init__(sparse_categorical_accuracy, name)


class TopKCategoricalAccuracy(MeanMetricWrapper):
    """How often the largest target is among the `k` largest outputs [rows, ..., classes]."""

    def __init__(self, k: int = 5, *, name: str = "top_k_categorical_accuracy") -> None:
        super().__init__(top_k_categorical_accuracy, name, k=k)
        self.k = k


class SparseTopKCategoricalAccuracy(MeanMetricWrapper):
    """How often the labelled output is among the `k` largest outputs [rows, ..., classes]."""

    def __init__(self, k: int = 5, *, name: str = "sparse_top_k_categorical_accuracy") -> None:
        super().__init__(sparse_top_k_categorical_accuracy, name, k=k)
        self.k = k
