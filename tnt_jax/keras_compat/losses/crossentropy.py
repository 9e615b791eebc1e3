"""Cross-entropies, in Keras's conventions: probabilities unless `from_logits=True`.

As in Keras, they are normalised along the classes, and clipped to [1e-7, 1 - 1e-7] in logarithms.
"""

import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike

from tnt_jax.keras_compat.losses.base import (
    EPSILON,
    LossFunctionWrapper,
    kind_of_labels,
    of_one_dtype,
)
from tnt_jax.train.steps.epoch_sums import match_ranks


def crossentropy(y_true: ArrayLike, y_pred: ArrayLike) -> jax.Array:
    """Returns the cross-entropy of probabilities by the shapes, as for Keras's `"crossentropy"`."""
    y_true, y_pred = match_ranks(jnp.asarray(y_true), jnp.asarray(y_pred))
    functions = {
        "binary": binary_crossentropy,
        "class_index": sparse_categorical_crossentropy,
        "distribution": categorical_crossentropy,
    }
    return functions[kind_of_labels(y_true.shape, y_pred.shape)](y_true, y_pred)


def sparse_categorical_crossentropy(
    y_true: ArrayLike,
    y_pred: ArrayLike,
    from_logits: bool = False,
    ignore_class: int | None = None,
    axis: int = -1,
) -> jax.Array:
    """Returns -log p(label) [batch, ...] for integer labels.

    A label outside [0, classes) has loss 0, as in Keras on JAX; `losses.check_labels` finds such
    labels.

    Args:
        y_true: Labels [batch, ...], or with a class dimension of size one.
        y_pred: Probabilities or logits [batch, ..., classes], the classes along `axis`.
        from_logits: Whether `y_pred` holds logits.
        ignore_class: Label whose loss is 0, for instance -1 or 255 for "unknown".
        axis: Dimension of the classes.
    """
    y_pred = jnp.asarray(y_pred)
    labels = class_labels(jnp.asarray(y_true), y_pred, axis)
    if ignore_class is not None:
        valid = labels != ignore_class
        labels = jnp.where(valid, labels, 0)
        # Selected here and below, so that a NaN at an ignored position does not reach the gradient.
        y_pred = jnp.where(jnp.expand_dims(valid, axis), y_pred, 1)
    if from_logits:
        is_class = (labels >= 0) & (labels < y_pred.shape[axis])
        known = jnp.where(is_class, labels, 0)
        values = optax.softmax_cross_entropy_with_integer_labels(y_pred, known, axis=axis)
        values = jnp.where(is_class, values, 0)
    else:
        one_hot = jax.nn.one_hot(labels, y_pred.shape[axis], axis=axis, dtype=y_pred.dtype)
        values = categorical_crossentropy(one_hot, y_pred, axis=axis)
    return values if ignore_class is None else jnp.where(valid, values, 0)


def categorical_crossentropy(
    y_true: ArrayLike,
    y_pred: ArrayLike,
    from_logits: bool = False,
    label_smoothing: float = 0.0,
    axis: int = -1,
) -> jax.Array:
    """Returns -sum(y_true * log p) along the classes [batch, ...].

    Args:
        y_true: Target distribution [batch, ..., classes].
        y_pred: Probabilities or logits [batch, ..., classes].
        from_logits: Whether `y_pred` holds logits.
        label_smoothing: In [0, 1]; fraction of the uniform distribution that is mixed into the
            targets (Szegedy et al. 2016, arXiv:1512.00567, section 7).
        axis: Dimension of the classes.
    """
    y_true, y_pred = _distributions(y_true, y_pred, label_smoothing, axis)
    if from_logits:
        return optax.softmax_cross_entropy(y_pred, y_true, axis)
    return -jnp.sum(y_true * jnp.log(normalized(y_pred, axis)), axis=axis)


def binary_crossentropy(
    y_true: ArrayLike,
    y_pred: ArrayLike,
    from_logits: bool = False,
    label_smoothing: float = 0.0,
    axis: int = -1,
) -> jax.Array:
    """Returns the mean over `axis` of -(y log p + (1 - y) log(1 - p)) [batch, ...].

    Args:
        y_true: Targets in [0, 1], [batch, ..., outputs].
        y_pred: Probabilities or logits, same shape.
        from_logits: Whether `y_pred` holds logits.
        label_smoothing: In [0, 1]; squeezes the targets towards 0.5.
        axis: Dimension of the mean.
    """
    y_true, y_pred = _same_shape(y_true, y_pred)
    y_true = _smoothed_binary(y_true, label_smoothing)
    if from_logits:
        return jnp.mean(optax.sigmoid_binary_cross_entropy(y_pred, y_true), axis=axis)
    return jnp.mean(_binary_crossentropy_of_probabilities(y_true, y_pred), axis=axis)


def binary_focal_crossentropy(
    y_true: ArrayLike,
    y_pred: ArrayLike,
    apply_class_balancing: bool = False,
    alpha: float = 0.25,
    gamma: float = 2.0,
    from_logits: bool = False,
    label_smoothing: float = 0.0,
    axis: int = -1,
) -> jax.Array:
    """Returns the mean over `axis` of (1 - p_t)^gamma * binary cross-entropy [batch, ...].

    Lin et al. 2017, arXiv:1708.02002.

    Args:
        y_true: Targets in [0, 1], [batch, ..., outputs].
        y_pred: Probabilities or logits, same shape.
        apply_class_balancing: Whether to weight class 1 by `alpha` and class 0 by 1 - `alpha`.
        alpha: Weight of class 1.
        gamma: Focusing exponent; 0 gives the binary cross-entropy.
        from_logits: Whether `y_pred` holds logits.
        label_smoothing: In [0, 1]; squeezes the targets towards 0.5.
        axis: Dimension of the mean.
    """
    y_true, y_pred = _same_shape(y_true, y_pred)
    y_true = _smoothed_binary(y_true, label_smoothing)
    y_pred = jax.nn.sigmoid(y_pred) if from_logits else y_pred
    p_t = y_true * y_pred + (1 - y_true) * (1 - y_pred)
    values = (1 - p_t) ** gamma * _binary_crossentropy_of_probabilities(y_true, y_pred)
    if apply_class_balancing:
        values = values * (y_true * alpha + (1 - y_true) * (1 - alpha))
    return jnp.mean(values, axis=axis)


def categorical_focal_crossentropy(
    y_true: ArrayLike,
    y_pred: ArrayLike,
    alpha: float = 0.25,
    gamma: float = 2.0,
    from_logits: bool = False,
    label_smoothing: float = 0.0,
    axis: int = -1,
) -> jax.Array:
    """Returns -sum(alpha * (1 - p)^gamma * y_true * log p) along the classes [batch, ...].

    Lin et al. 2017, arXiv:1708.02002.

    Args:
        y_true: Target distribution [batch, ..., classes].
        y_pred: Probabilities or logits [batch, ..., classes].
        alpha: Weight, one number or one per class [classes].
        gamma: Focusing exponent.
        from_logits: Whether `y_pred` holds logits.
        label_smoothing: In [0, 1]; fraction of the uniform distribution that is mixed into the
            targets.
        axis: Dimension of the classes.
    """
    y_true, y_pred = _distributions(y_true, y_pred, label_smoothing, axis)
    p = normalized(jax.nn.softmax(y_pred, axis=axis) if from_logits else y_pred, axis)
    return jnp.sum(-y_true * jnp.log(p) * (1 - p) ** gamma * jnp.asarray(alpha), axis=axis)


def kl_divergence(y_true: ArrayLike, y_pred: ArrayLike) -> jax.Array:
    """Returns sum(y_true * log(y_true / y_pred)) along the last dimension [batch, ...].

    Both are clipped to [1e-7, 1].
    """
    y_true, y_pred = (jnp.clip(array, EPSILON, 1) for array in _same_shape(y_true, y_pred))
    return jnp.sum(y_true * jnp.log(y_true / y_pred), axis=-1)


def categorical_generalized_cross_entropy(
    y_true: ArrayLike, y_pred: ArrayLike, q: float
) -> jax.Array:
    """Returns (1 - p(label)^q) / q for integer labels [batch, ...].

    Zhang and Sabuncu 2018, arXiv:1805.07836.

    Args:
        y_true: Labels [batch, ...], or with a class dimension of size one.
        y_pred: Probabilities [batch, ..., classes].
        q: In (0, 1): near 0 the loss is like the cross-entropy, near 1 like the mean absolute
            error.
    """
    y_pred = jnp.asarray(y_pred)
    labels = class_labels(jnp.asarray(y_true), y_pred, -1)
    p = jnp.sum(y_pred * jax.nn.one_hot(labels, y_pred.shape[-1], dtype=y_pred.dtype), axis=-1)
    return (1 - p**q) / q


def normalized(probabilities: jax.Array, axis: int) -> jax.Array:
    """Returns probabilities that sum to one along `axis`, clipped to [1e-7, 1 - 1e-7]."""
    total = jnp.sum(probabilities, axis, keepdims=True)
    return jnp.clip(probabilities / total, EPSILON, 1 - EPSILON)


def class_labels(y_true: jax.Array, y_pred: jax.Array, axis: int) -> jax.Array:
    """Returns integer labels [batch, ...] without a class dimension."""
    labels = y_true
    if y_true.ndim == y_pred.ndim and y_true.shape[axis] == 1:
        labels = jnp.squeeze(y_true, axis)
    dim = axis % y_pred.ndim
    if labels.shape != y_pred.shape[:dim] + y_pred.shape[dim + 1 :]:
        raise ValueError(
            f"Labels of shape {y_true.shape} do not fit outputs of shape {y_pred.shape} with the "
            f"classes along {axis}."
        )
    return labels.astype(jnp.int32)


def _same_shape(y_true: ArrayLike, y_pred: ArrayLike) -> tuple[jax.Array, jax.Array]:
    y_true, y_pred = of_one_dtype(y_true, y_pred)
    if y_true.shape != y_pred.shape:
        raise ValueError(
            f"Targets of shape {y_true.shape} do not fit outputs of shape {y_pred.shape}: they "
            "must have the same shape."
        )
    return y_true, y_pred


def _distributions(
    y_true: ArrayLike, y_pred: ArrayLike, smoothing: float, axis: int
) -> tuple[jax.Array, jax.Array]:
    """Returns smoothed distributions and outputs of one shape; as Keras, warns of one class."""
    if isinstance(axis, bool):
        raise ValueError(f"axis must be of type int, got {axis}.")
    y_true, y_pred = _same_shape(y_true, y_pred)
    if y_pred.shape[-1] == 1:
        warnings.warn(
            f"A categorical cross-entropy of outputs of shape {y_pred.shape} has one class and is "
            "always 0: expected y_pred.shape to be (batch_size, num_classes) with num_classes > 1. "
            "Consider using 'binary_crossentropy' if you only have 2 classes.",
            SyntaxWarning,
            stacklevel=3,
        )
    return optax.smooth_labels(y_true, smoothing) if smoothing else y_true, y_pred


def _smoothed_binary(y_true: jax.Array, label_smoothing: float) -> jax.Array:
    return y_true * (1 - label_smoothing) + 0.5 * label_smoothing if label_smoothing else y_true


def _binary_crossentropy_of_probabilities(y_true: jax.Array, p: jax.Array) -> jax.Array:
    p = jnp.clip(p, EPSILON, 1 - EPSILON)
    return -(y_true * jnp.log(p) + (1 - y_true) * jnp.log(1 - p))


class _Crossentropy(LossFunctionWrapper):
    """Has the settings of its function as attributes, as in Keras."""

    from_logits: bool
    label_smoothing: float

    def __init__(
        self,
        fn: Callable[..., jax.Array],
        reduction: str | None,
        name: str | None,
        dtype: Any,
        **settings: Any,
    ) -> None:
        super().__init__(fn, reduction, name, dtype, **settings)
        vars(self).update(settings)
        self.expects_probabilities = not self.from_logits


class SparseCategoricalCrossentropy(_Crossentropy):
    """Cross-entropy of integer labels: `losses.sparse_categorical_crossentropy`.

    Labels [batch, ...] equal to `ignore_class` count neither in the sum nor in the mean.
    """

    targets = "class_index"
    ignore_class: int | None

    def __init__(
        self,
        from_logits: bool = False,
        ignore_class: int | None = None,
        reduction: str | None = "sum_over_batch_size",
        axis: int = -1,
        name: str | None = "sparse_categorical_crossentropy",
        dtype: Any = None,
    ) -> None:
        settings = {"from_logits": from_logits, "ignore_class": ignore_class, "axis": axis}
        super().__init__(sparse_categorical_crossentropy, reduction, name, dtype, **settings)

    def valid(self, y_true: Any, y_pred: Any) -> jax.Array | None:
        """Returns which labels are not `ignore_class`, shaped like the values; None for all."""
        if self.ignore_class is None:
            return None
        return class_labels(y_true, y_pred, self.axis) != self.ignore_class


class CategoricalCrossentropy(_Crossentropy):
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
        settings = {"from_logits": from_logits, "label_smoothing": label_smoothing, "axis": axis}
        super().__init__(categorical_crossentropy, reduction, name, dtype, **settings)


class BinaryCrossentropy(_Crossentropy):
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
        settings = {"from_logits": from_logits, "label_smoothing": label_smoothing, "axis": axis}
        super().__init__(binary_crossentropy, reduction, name, dtype, **settings)


class BinaryFocalCrossentropy(_Crossentropy):
    """`BinaryCrossentropy`, less for easy rows; see `losses.binary_focal_crossentropy`."""

    targets = "binary"
    apply_class_balancing: bool
    alpha: float
    gamma: float

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
        settings = {"from_logits": from_logits, "label_smoothing": label_smoothing, "axis": axis}
        settings |= {"apply_class_balancing": apply_class_balancing, "alpha": alpha, "gamma": gamma}
        super().__init__(binary_focal_crossentropy, reduction, name, dtype, **settings)


class CategoricalFocalCrossentropy(_Crossentropy):
    """`CategoricalCrossentropy`, less for easy rows: `losses.categorical_focal_crossentropy`."""

    targets = "distribution"
    alpha: float
    gamma: float

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
        settings = {"from_logits": from_logits, "label_smoothing": label_smoothing, "axis": axis}
        settings |= {"alpha": alpha, "gamma": gamma}
        super().__init__(categorical_focal_crossentropy, reduction, name, dtype, **settings)


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
        super().__init__(kl_divergence, reduction, name, dtype)


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
        super().__init__(categorical_generalized_cross_entropy, reduction, name, dtype, q=q)
        self.q = q
