"""Intersection over union of predicted and labelled classes."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from tnt_jax.keras_compat.losses.base import EPSILON
from tnt_jax.keras_compat.metrics.base import Metric


class MeanIoU(Metric):
    """Mean over classes of true positives / (labelled or predicted), from a confusion matrix; absent classes do not count.

    Args:
        num_classes: Number of classes. Labels and predictions outside [0, num_classes) are left out.
        ignore_class: Label whose positions are left out.
        sparse_y_true: Whether targets are class numbers rather than one value per class.
        sparse_y_pred: Whether outputs are class numbers; pass False for the outputs of a classifier.
        axis: Dimension of the classes where they are not numbers.
        name: Name of the metric.
    """

    def __init__(
        self,
        num_classes: int,
        *,
        ignore_class: int | None = None,
        sparse_y_true: bool = True,
        sparse_y_pred: bool = True,
        axis: int = -1,
        name: str | None = None,
    ) -> None:
        super().__init__(name)
        self.num_classes, self.ignore_class, self.axis = num_classes, ignore_class, axis
        self.sparse_y_true, self.sparse_y_pred = sparse_y_true, sparse_y_pred

    def increments(self, y_true: Any, y_pred: Any, weight: ArrayLike | None = None) -> jax.Array:
        """Returns the weighted confusion matrix [labelled class, predicted class].

        Unlike Keras, which truncates weights to integers, fractions of a weight count.
        """
        labels = self._class_numbers(y_true, self.sparse_y_true)
        predictions = self._class_numbers(y_pred, self.sparse_y_pred)
        shape = labels.shape
        weight = jnp.ones(shape[:1]) if weight is None else jnp.asarray(weight, jnp.float32)
        weight = jnp.broadcast_to(weight.reshape(weight.shape + (1,) * (len(shape) - weight.ndim)), shape).reshape(-1)
        labels, predictions = labels.reshape(-1), predictions.reshape(-1)
        is_class = (labels >= 0) & (labels < self.num_classes) & (predictions >= 0) & (predictions < self.num_classes)
        is_class &= True if self.ignore_class is None else labels != self.ignore_class
        cell = jnp.where(is_class, labels * self.num_classes + predictions, 0)
        counts = jax.ops.segment_sum(jnp.where(is_class, weight, 0), cell, self.num_classes**2)
        return counts.reshape(self.num_classes, self.num_classes)

    def compute(self, sums: jax.Array) -> jax.Array:
        """Returns the mean over the classes that occur."""
        right = jnp.diagonal(sums)
        union = jnp.sum(sums, axis=0) + jnp.sum(sums, axis=1) - right
        iou = jnp.where(union > 0, right / (union + EPSILON), 0)
        return jnp.sum(iou) / (jnp.sum(union > 0) + EPSILON)

    def _class_numbers(self, values: Any, is_sparse: bool) -> jax.Array:
        values = jnp.asarray(values)
        return (values if is_sparse else jnp.argmax(values, axis=self.axis)).astype(jnp.int32)
