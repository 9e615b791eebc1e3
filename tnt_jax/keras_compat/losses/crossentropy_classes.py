"""Losses on probabilities and logits as classes: settings bound to a function, and what they expect of the model."""

from __future__ import annotations

from typing import Any

import jax

from tnt_jax.keras_compat.losses import crossentropy
from tnt_jax.keras_compat.losses.base import LossFunctionWrapper


class SparseCategoricalCrossentropy(LossFunctionWrapper):
    """Cross-entropy of integer labels [batch, ...] and outputs [batch, ..., classes].

    Labels equal to `ignore_class` count neither in the sum nor in the mean; see `losses.sparse_categorical_crossentropy`.
    """

    targets = "class_index"

    def __init__(
        self,
        from_logits: bool = False,
        *,
        ignore_class: int | None = None,
        axis: int = -1,
        reduction: str | None = "sum_over_batch_size",
        name: str = "sparse_categorical_crossentropy",
    ) -> None:
        settings: dict[str, Any] = {"from_logits": from_logits, "ignore_class": ignore_class, "axis": axis}
        super().__init__(crossentropy.sparse_categorical_crossentropy, reduction, name=name, **settings)
        self.expects_probabilities, self.ignore_class, self.axis = not from_logits, ignore_class, axis

    def valid(self, y_true: Any, y_pred: Any) -> jax.Array | None:
        """Returns which labels differ from `ignore_class`, shaped like the values; None if no class is ignored."""
        if self.ignore_class is None:
            return None
        return crossentropy.class_labels(y_true, y_pred, self.axis) != self.ignore_class


class CategoricalCrossentropy(LossFunctionWrapper):
    """Cross-entropy of target distributions and outputs [batch, ..., classes]; see `losses.categorical_crossentropy`."""

    targets = "distribution"

    def __init__(
        self,
        from_logits: bool = False,
        *,
        label_smoothing: float = 0.0,
        axis: int = -1,
        reduction: str | None = "sum_over_batch_size",
        name: str = "categorical_crossentropy",
    ) -> None:
        settings: dict[str, Any] = {"from_logits": from_logits, "label_smoothing": label_smoothing, "axis": axis}
        super().__init__(crossentropy.categorical_crossentropy, reduction, name=name, **settings)
        self.expects_probabilities, self.axis = not from_logits, axis


class BinaryCrossentropy(LossFunctionWrapper):
    """Cross-entropy of targets in [0, 1] and as many outputs, averaged over `axis`; see `losses.binary_crossentropy`."""

    targets = "binary"

    def __init__(
        self,
        from_logits: bool = False,
        *,
        label_smoothing: float = 0.0,
        axis: int = -1,
        reduction: str | None = "sum_over_batch_size",
        name: str = "binary_crossentropy",
    ) -> None:
        settings: dict[str, Any] = {"from_logits": from_logits, "label_smoothing": label_smoothing, "axis": axis}
        super().__init__(crossentropy.binary_crossentropy, reduction, name=name, **settings)
        self.expects_probabilities, self.axis = not from_logits, axis


class BinaryFocalCrossentropy(LossFunctionWrapper):
    """Binary cross-entropy that counts easy rows less; see `losses.binary_focal_crossentropy`."""

    targets = "binary"

    def __init__(
        self,
        apply_class_balancing: bool = False,
        *,
        alpha: float = 0.25,
        gamma: float = 2.0,
        from_logits: bool = False,
        label_smoothing: float = 0.0,
        axis: int = -1,
        reduction: str | None = "sum_over_batch_size",
        name: str = "binary_focal_crossentropy",
    ) -> None:
        settings: dict[str, Any] = {"from_logits": from_logits, "label_smoothing": label_smoothing, "axis": axis}
        settings |= {"apply_class_balancing": apply_class_balancing, "alpha": alpha, "gamma": gamma}
        super().__init__(crossentropy.binary_focal_crossentropy, reduction, name=name, **settings)
        self.expects_probabilities, self.axis = not from_logits, axis


class CategoricalFocalCrossentropy(LossFunctionWrapper):
    """Cross-entropy of target distributions that counts easy rows less; see `losses.categorical_focal_crossentropy`."""

    targets = "distribution"

    def __init__(
        self,
        alpha: float = 0.25,
        *,
        gamma: float = 2.0,
        from_logits: bool = False,
        label_smoothing: float = 0.0,
        axis: int = -1,
        reduction: str | None = "sum_over_batch_size",
        name: str = "categorical_focal_crossentropy",
    ) -> None:
        settings: dict[str, Any] = {"from_logits": from_logits, "label_smoothing": label_smoothing, "axis": axis}
        settings |= {"alpha": alpha, "gamma": gamma}
        super().__init__(crossentropy.categorical_focal_crossentropy, reduction, name=name, **settings)
        self.expects_probabilities, self.axis = not from_logits, axis


class KLDivergence(LossFunctionWrapper):
    """Kullback-Leibler divergence of target distributions from output distributions [batch, ..., classes]."""

    targets = "distribution"
    expects_probabilities = True

    def __init__(self, reduction: str | None = "sum_over_batch_size", *, name: str = "kl_divergence") -> None:
        super().__init__(crossentropy.kl_divergence, reduction, name=name)
