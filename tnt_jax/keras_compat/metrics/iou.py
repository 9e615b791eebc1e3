"""Intersection over union of predicted and labelled classes, from confusion matrices."""

import warnings
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from tnt_jax.keras_compat.configuration import config_of
from tnt_jax.keras_compat.losses.base import EPSILON
from tnt_jax.keras_compat.metrics.base import Metric, Sums


class IoU(Metric):
    """Mean over some classes of true positives / (labelled or predicted), of those that occur.

    Args:
        num_classes: Number of classes. Labels and predictions outside [0, num_classes) are ignored.
        target_class_ids: The classes of the mean.
        dtype: Dtype of the confusion matrix. By default its integers are int32, as in Keras, so
            that counts stay exact beyond 2^24; fractions of weights, which Keras truncates, are
            added in float32. `"int"` truncates them, with a warning.
        ignore_class: Label whose positions are ignored.
        sparse_y_true: Whether targets are class numbers rather than one value per class.
        sparse_y_pred: Whether outputs are class numbers; pass False for the outputs of a
            classifier.
        axis: Dimension of the classes if they are not class numbers.
    """

    def __init__(
        self,
        num_classes: int,
        target_class_ids: Sequence[int],
        name: str | None = None,
        dtype: Any = None,
        ignore_class: int | None = None,
        sparse_y_true: bool = True,
        sparse_y_pred: bool = True,
        axis: int = -1,
    ) -> None:
        super().__init__(dtype, name)
        if max(target_class_ids) >= num_classes:
            raise ValueError(
                f"Target class id {max(target_class_ids)} is out of range, which is [0, "
                f"{num_classes})."
            )
        self.num_classes = num_classes
        self.target_class_ids = list(target_class_ids)
        self.ignore_class = ignore_class
        self.axis = axis
        self.sparse_y_true = sparse_y_true
        self.sparse_y_pred = sparse_y_pred
        shape = (num_classes, num_classes)
        self._declare({"total_cm": shape}, "int32" if dtype is None else self.dtype)
        if dtype is None:
            self.fractions = self.add_variable(shape, "zeros")
            self._sums["fractions"] = self.fractions

    def increments(self, y_true: Any, y_pred: Any, weight: ArrayLike | None = None) -> Sums:
        """Returns the weighted confusion matrix [labelled class, predicted class]."""
        labels = self._class_numbers(y_true, self.sparse_y_true)
        predictions = self._class_numbers(y_pred, self.sparse_y_pred)
        shape = labels.shape
        weight = jnp.asarray(1 if weight is None else weight).astype(self.dtype)
        if weight.size == labels.size:
            weight = weight.reshape(shape)
        weight = weight.reshape(weight.shape + (1,) * (len(shape) - weight.ndim))
        weight = jnp.broadcast_to(weight, shape).reshape(-1)
        labels, predictions = labels.reshape(-1), predictions.reshape(-1)
        size = self.num_classes
        is_class = (labels >= 0) & (labels < size) & (predictions >= 0) & (predictions < size)
        is_class &= True if self.ignore_class is None else labels != self.ignore_class
        cell = jnp.where(is_class, labels * size + predictions, 0)
        parts = {"total_cm": weight}
        if "fractions" in self._sums:
            whole = jnp.floor(weight)
            parts = {"total_cm": whole.astype(jnp.int32), "fractions": weight - whole}
        counted = {name: jnp.where(is_class, part, 0) for name, part in parts.items()}
        return {
            name: jax.ops.segment_sum(part, cell, size**2).reshape(size, size)
            for name, part in counted.items()
        }

    def get_config(self) -> dict[str, Any]:
        """Returns the arguments that make an equal metric."""
        config = config_of(self, "name", "dtype", "target_class_ids")
        return config | ({"dtype": None} if "fractions" in self._sums else {})

    def update_state(
        self, y_true: Any, y_pred: Any, sample_weight: ArrayLike | None = None
    ) -> None:
        """Adds rows to the state; warns if a dtype of integers truncates weights."""
        is_floating = sample_weight is not None and jnp.issubdtype(
            jnp.asarray(sample_weight).dtype, jnp.floating
        )
        if is_floating and jnp.issubdtype(self.dtype, jnp.integer):
            warnings.warn(
                f"You are passing weight as `float`, but dtype is `{self.dtype}`: weights are "
                "truncated to integers.",
                stacklevel=2,
            )
        super().update_state(y_true, y_pred, sample_weight)

    def compute(self, sums: Sums) -> jax.Array:
        """Returns the mean over the target classes that occur."""
        matrix = sum(jnp.asarray(part).astype(jnp.float32) for part in sums.values())
        chosen = jnp.asarray(self.target_class_ids)
        right = jnp.diagonal(matrix)
        union = jnp.sum(matrix, axis=0) + jnp.sum(matrix, axis=1) - right
        right, union = right[chosen], union[chosen]
        iou = jnp.where(union > 1e-9, right / (union + EPSILON), 0)
        return jnp.sum(iou) / (jnp.sum(union > 1e-9) + EPSILON)

    def _class_numbers(self, values: Any, is_sparse: bool) -> jax.Array:
        values = jnp.asarray(values)
        return (values if is_sparse else jnp.argmax(values, axis=self.axis)).astype(jnp.int32)


class BinaryIoU(IoU):
    """Mean intersection over union of the classes 0 and 1.

    Args:
        target_class_ids: `(0,)`, `(1,)` or both.
        threshold: Outputs of at least this value are class 1.
        dtype: See `IoU`.
    """

    def __init__(
        self,
        target_class_ids: Sequence[int] = (0, 1),
        threshold: float = 0.5,
        name: str | None = None,
        dtype: Any = None,
    ) -> None:
        super().__init__(2, target_class_ids, name, dtype)
        self.threshold = threshold

    def increments(self, y_true: Any, y_pred: Any, weight: ArrayLike | None = None) -> Sums:
        """Returns the weighted confusion matrix [labelled class, predicted class]."""
        is_one = jnp.asarray(y_pred, jnp.float32) >= self.threshold
        return super().increments(y_true, is_one, weight)


class MeanIoU(IoU):
    """`IoU` of all classes that occur."""

    def __init__(
        self,
        num_classes: int,
        name: str | None = None,
        dtype: Any = None,
        ignore_class: int | None = None,
        sparse_y_true: bool = True,
        sparse_y_pred: bool = True,
        axis: int = -1,
    ) -> None:
        super().__init__(
            num_classes,
            range(num_classes),
            name,
            dtype,
            ignore_class,
            sparse_y_true,
            sparse_y_pred,
            axis,
        )


class OneHotIoU(IoU):
    """`IoU` of one-hot targets, and of outputs with one value per class unless `sparse_y_pred`."""

    def __init__(
        self,
        num_classes: int,
        target_class_ids: Sequence[int],
        name: str | None = None,
        dtype: Any = None,
        ignore_class: int | None = None,
        sparse_y_pred: bool = False,
        axis: int = -1,
    ) -> None:
        super().__init__(
            num_classes, target_class_ids, name, dtype, ignore_class, False, sparse_y_pred, axis
        )


class OneHotMeanIoU(MeanIoU):
    """`MeanIoU` of one-hot targets, and of one value per class unless `sparse_y_pred`."""

    def __init__(
        self,
        num_classes: int,
        name: str | None = None,
        dtype: Any = None,
        ignore_class: int | None = None,
        sparse_y_pred: bool = False,
        axis: int = -1,
    ) -> None:
        super().__init__(num_classes, name, dtype, ignore_class, False, sparse_y_pred, axis)
