"""The cross-entropy losses as classes, for probabilities and logits."""

from typing import Any

import jax

from tnt_jax.keras_compat.losses import crossentropy
from tnt_jax.keras_compat.losses.base import LossFunctionWrapper


class SparseCategoricalCrossentropy(LossFunctionWrapper):
    """Cross-entropy of integer labels [batch, ...] and outputs [batch, ..., classes].

    Labels equal to `ignore_class` count neither in the sum nor in the mean; see
    `losses.sparse_categorical_crossentropy`.
    """

    targets = "class_index"

    def __init__(
        self,
        from_logits: bool = False,
        ignore_class: int | None = None,
        reduction: str | None = "sum_over_batch_size",
        axis: int = -1,
        name: str | None = "sparse_categorical_crossentropy",
        dtype: Any = None,
    ) -> None:
        settings: dict[str, Any] = {
            "from_logits": from_logits,
            "ignore_class": ignore_class,
            "axis": axis,
        }
        super().__init__(
            crossentropy.sparse_categorical_crossentropy, reduction, name, dtype, **settings
        )
        self.expects_probabilities = not from_logits
        self.axis = axis
        self.from_logits = from_logits
        self.ignore_class = ignore_class

    def valid(self, y_true: Any, y_pred: Any) -> jax.Array | None:
        """Returns which labels are not `ignore_class`, shaped like the values; None for all."""
        if self.ignore_class is None:
            return None
        return crossentropy.class_labels(y_true, y_pred, self.axis) != self.ignore_class


class CategoricalCrossentropy(LossFunctionWrapper):
    """Cross-entropy of distributions [batch, ..., classes]: `losses.categorical_crossentropy`."""

    targets = "distribution"

    def __init__(
        self,
        from_logits: bool = False,
        label_smoothing: float = 0.0,
        axis: int = -1,
        reduction: str | None = "sum_over_batch_size",
        name: str | None = "categorical_crossentropy",
        dtype: Any = None,
    ) -> None:
        settings: dict[str, Any] = {
            "from_logits": from_logits,
            "label_smoothing": label_smoothing,
            "axis": axis,
        }
        super().__init__(crossentropy.categorical_crossentropy, reduction, name, dtype, **settings)
        self.expects_probabilities = not from_logits
        self.axis = axis
        self.from_logits = from_logits
        self.label_smoothing = label_smoothing


class BinaryCrossentropy(LossFunctionWrapper):
    """Mean cross-entropy of targets in [0, 1] over `axis`; see `losses.binary_crossentropy`."""

    targets = "binary"

    def __init__(
        self,
        from_logits: bool = False,
        label_smoothing: float = 0.0,
        axis: int = -1,
        reduction: str | None = "sum_over_batch_size",
        name: str | None = "binary_crossentropy",
        dtype: Any = None,
    ) -> None:
        settings: dict[str, Any] = {
            "from_logits": from_logits,
            "label_smoothing": label_smoothing,
            "axis": axis,
        }
        super().__init__(crossentropy.binary_crossentropy, reduction, name, dtype, **settings)
        self.expects_probabilities = not from_logits
        self.axis = axis
        self.from_logits = from_logits
        self.label_smoothing = label_smoothing


class BinaryFocalCrossentropy(LossFunctionWrapper):
    """`BinaryCrossentropy`, less for easy rows; see `losses.binary_focal_crossentropy`."""

    targets = "binary"

    def __init__(
        self,
        apply_class_balancing: bool = False,
        alpha: float = 0.25,
        gamma: float = 2.0,
        from_logits: bool = False,
        label_smoothing: float = 0.0,
        axis: int = -1,
        reduction: str | None = "sum_over_batch_size",
        name: str | None = "binary_focal_crossentropy",
        dtype: Any = None,
    ) -> None:
        settings: dict[str, Any] = {
            "from_logits": from_logits,
            "label_smoothing": label_smoothing,
            "axis": axis,
        }
        settings |= {"apply_class_balancing": apply_class_balancing, "alpha": alpha, "gamma": gamma}
        super().__init__(crossentropy.binary_focal_crossentropy, reduction, name, dtype, **settings)
        self.expects_probabilities = not from_logits
        self.axis = axis
        self.from_logits = from_logits
        self.label_smoothing = label_smoothing
        self.apply_class_balancing = apply_class_balancing
        self.alpha = alpha
        self.gamma = gamma


class CategoricalFocalCrossentropy(LossFunctionWrapper):
    """`CategoricalCrossentropy`, less for easy rows: `losses.categorical_focal_crossentropy`."""

    targets = "distribution"

    def __init__(
        self,
        alpha: float = 0.25,
        gamma: float = 2.0,
        from_logits: bool = False,
        label_smoothing: float = 0.0,
        axis: int = -1,
        reduction: str | None = "sum_over_batch_size",
        name: str | None = "categorical_focal_crossentropy",
        dtype: Any = None,
    ) -> None:
        settings: dict[str, Any] = {
            "from_logits": from_logits,
            "label_smoothing": label_smoothing,
            "axis": axis,
        }
        settings |= {"alpha": alpha, "gamma": gamma}
        super().__init__(
            crossentropy.categorical_focal_crossentropy, reduction, name, dtype, **settings
        )
        self.expects_probabilities = not from_logits
        self.axis = axis
        self.from_logits = from_logits
        self.label_smoothing = label_smoothing
        self.alpha = alpha
        self.gamma = gamma


class KLDivergence(LossFunctionWrapper):
    """Kullback-Leibler divergence of target from output distributions [batch, ..., classes]."""

    targets = "distribution"
    expects_probabilities = True

    def __init__(
        self,
        reduction: str | None = "sum_over_batch_size",
        name: str | None = "kl_divergence",
        dtype: Any = None,
    ) -> None:
        super().__init__(crossentropy.kl_divergence, reduction, name, dtype)


class CategoricalGeneralizedCrossEntropy(LossFunctionWrapper):
    """Is robust to noisy integer labels; see `losses.categorical_generalized_cross_entropy`."""

    targets = "class_index"
    expects_probabilities = True

    def __init__(
        self,
        q: float = 0.5,
        reduction: str | None = "sum_over_batch_size",
        name: str | None = "categorical_generalized_cross_entropy",
        dtype: Any = None,
    ) -> None:
        if not 0 < q < 1:
            raise ValueError(f"q must be in the interval (0, 1), got {q}.")
        super().__init__(
            crossentropy.categorical_generalized_cross_entropy, reduction, name, dtype, q=q
        )
        self.q = q
