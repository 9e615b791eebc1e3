"""What every loss shares: Keras's reductions, and sums of them that add up over ranks.

A loss gives one value per row of the batch (`call`). The loss of a batch is a quotient of two sums over its rows, so a
batch cut into pieces loses nothing: each rank returns its two sums (`terms`) and the step divides the totals.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from tnt_jax.keras_compat.names import snake_case
from tnt_jax.keras_compat.recorded import Recorded

REDUCTIONS = ("sum_over_batch_size", "sum", "mean_with_sample_weight", "mean", "none", None)
EPSILON = 1e-7  # keras.config.epsilon(): keeps logarithms and quotients of probabilities finite.


class Loss(Recorded):
    """Base class of losses, with the reductions of `keras.losses.Loss`.

    Subclasses implement `call`. Row i of its result must depend on row i of its arguments alone; that is what lets
    ranks work on parts of the batch.

    Attributes:
        name: Name of the loss in logs.
        reduction: `"sum_over_batch_size"` (alias `"mean"`): weighted sum / number of values; `"sum"`: weighted sum;
            `"mean_with_sample_weight"`: weighted sum / sum of the weights; `"none"` or `None`: no reduction, usable by
            calling the loss, not for training.
        expects_probabilities: Whether `y_pred` must hold probabilities rather than logits.
        targets: What `y_true` holds: `"class_index"`, `"distribution"` over the classes, `"binary"`, `"sign"` (-1 and 1,
            or 0 and 1), `"like_outputs"`, `"by_shape"` (one of the first three), or `"any"`. `losses.check_labels` reads it.
        axis: Dimension of the classes.
    """

    expects_probabilities: bool = False
    targets: str = "any"
    axis: int = -1

    def __init__(self, name: str | None = None, reduction: str | None = "sum_over_batch_size") -> None:
        if reduction not in REDUCTIONS:
            raise ValueError(f"reduction must be one of {REDUCTIONS}, got {reduction!r}.")
        self.name = name or snake_case(type(self).__name__)
        self.reduction = reduction

    def call(self, y_true: Any, y_pred: Any) -> jax.Array:
        """Returns the loss of every row.

        Args:
            y_true: Targets [batch, ...].
            y_pred: Outputs of the model [batch, ...], at least float32.

        Returns:
            Values [batch, ...].
        """
        raise NotImplementedError(f"{type(self).__name__} must implement call(y_true, y_pred) -> values [batch, ...].")

    def valid(self, y_true: Any, y_pred: Any) -> jax.Array | None:
        """Returns which values count, as booleans shaped like the result of `call`; None when all do."""
        return None

    def __call__(self, y_true: Any, y_pred: Any, sample_weight: ArrayLike | None = None) -> jax.Array:
        """Returns the reduced loss of one whole batch, as Keras does.

        Args:
            y_true: Targets [batch, ...].
            y_pred: Outputs of the model [batch, ...].
            sample_weight: Weights [batch], [batch, 1] or shaped like the values.

        Returns:
            A scalar; the weighted values [batch, ...] if `reduction` is None.
        """
        y_true, y_pred = standardized(y_true, y_pred)
        if self.reduction in ("none", None):
            values, weight = _weighted(self.call(y_true, y_pred), sample_weight, self.valid(y_true, y_pred), None)
            return values if weight is None else values * weight
        total, count = self.terms(y_true, y_pred, sample_weight)
        return total if count is None else divide_no_nan(total, count)

    def terms(
        self,
        y_true: Any,
        y_pred: Any,
        sample_weight: ArrayLike | None = None,
        mask: ArrayLike | None = None,
        *,
        valid: ArrayLike | None = None,
    ) -> tuple[jax.Array, jax.Array | float | None]:
        """Returns the sums whose quotient is the loss; both add up over the parts of a batch.

        The loss of a batch cut into parts is `divide_no_nan(sum of totals, sum of counts)`, or the sum of the totals
        where count is None.

        Args:
            y_true: Targets [rows, ...].
            y_pred: Outputs of the model [rows, ...].
            sample_weight: Weights [rows], [rows, 1] or shaped like the values. Weights [rows] of values [rows, T]
                weigh whole rows.
            mask: 1 for a row that exists and 0 for padding [rows]. Whatever a padded row holds, NaN included, reaches
                neither the sums nor the gradients with respect to `y_pred`.
            valid: Which values count besides, as booleans shaped like the result of `call`: the mask that a Keras model attaches to
                its outputs, such as that of padded tokens.

        Returns:
            The weighted sum of the values, and the divisor the reduction asks for (None for `"sum"`).

        Raises:
            ValueError: If the loss has no reduction, its values are not [rows, ...], or `valid` is shaped otherwise.
        """
        if self.reduction in ("none", None):
            raise ValueError(f"Loss {self.name!r} has reduction=None; training needs one of {REDUCTIONS[:3]}.")
        y_true, y_pred = standardized(y_true, y_pred)
        if mask is not None:
            # Selecting before the loss as well as after it keeps 0 * inf out of the gradient.
            y_pred = jax.tree.map(lambda leaf: _where_rows(mask, leaf, 0.5), y_pred)
        values, own = self.call(y_true, y_pred), self.valid(y_true, y_pred)
        self._require_rows(values, y_pred)
        valid = own if valid is None else self._both(values, own, valid)
        values, weight = _weighted(values, sample_weight, valid, mask)
        if mask is not None:
            values = _where_rows(mask, values, 0)
        total = jnp.sum(values if weight is None else values * weight)
        return total, self._count(values, weight, sample_weight, valid, mask)

    def _count(
        self, values: jax.Array, weight: jax.Array | None, sample_weight: Any, valid: jax.Array | None, mask: Any
    ) -> jax.Array | float | None:
        if self.reduction == "sum":
            return None
        if self.reduction == "mean_with_sample_weight" and sample_weight is not None:
            assert weight is not None
            return jnp.sum(weight)
        if valid is None and mask is None:
            return float(values.size)  # Known while tracing: its sum over ranks is a multiplication.
        counted = jnp.ones(values.shape, values.dtype) if valid is None else valid.astype(values.dtype)
        return jnp.sum(counted if mask is None else _where_rows(mask, counted, 0))

    def _both(self, values: jax.Array, own: jax.Array | None, given: ArrayLike) -> jax.Array:
        given = jnp.asarray(given) != 0
        if given.size != values.size or given.shape[:1] != values.shape[:1]:
            raise ValueError(
                f"The mask of the outputs has the shape {given.shape}, but the loss {self.name!r} has values of shape {values.shape}. "
                "Let the loss keep the masked dimensions, or end the mask in the model, for instance with a pooling layer."
            )
        given = given.reshape(values.shape)
        return given if own is None else given & (own.reshape(values.shape) != 0)

    def _require_rows(self, values: jax.Array, y_pred: Any) -> None:
        shape = jax.tree.leaves(y_pred)[0].shape
        if values.ndim == 0 or values.shape[:1] != shape[:1]:
            raise ValueError(
                f"Loss {self.name!r} returned values of shape {values.shape} for outputs of shape {shape}. Training on parts of "
                "a batch needs one value per row: return [batch, ...] and leave the reduction over the batch to the loss."
            )


class LossFunctionWrapper(Loss):
    """A loss made of a function `fn(y_true, y_pred, **fn_kwargs) -> values [batch, ...]`.

    As in Keras, a last dimension of size one is added to or removed from `y_true` or `y_pred` when that makes their
    ranks equal. Unlike Keras, integer targets stay integers.
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        reduction: str | None = "sum_over_batch_size",
        *,
        name: str | None = None,
        **fn_kwargs: Any,
    ) -> None:
        super().__init__(name or getattr(fn, "__name__", None), reduction)
        self.fn = fn
        self.fn_kwargs = fn_kwargs

    def call(self, y_true: Any, y_pred: Any) -> jax.Array:
        """Returns `fn(y_true, y_pred)` [batch, ...]."""
        if hasattr(y_true, "ndim") and hasattr(y_pred, "ndim"):
            y_true, y_pred = match_ranks(y_true, y_pred)
        return jnp.asarray(self.fn(y_true, y_pred, **self.fn_kwargs))


def divide_no_nan(total: jax.Array, count: jax.Array | float) -> jax.Array:
    """Returns total / count, and 0 where count is 0."""
    is_empty = jnp.equal(count, 0)
    return jnp.where(is_empty, 0, total / jnp.where(is_empty, 1, count))


def match_ranks(left: jax.Array, right: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Adds or removes a last dimension of size one where that makes the ranks of two arrays equal.

    A vector is expanded rather than the other array squeezed, as in Keras: `[b, 1], [b]` gives `[b, 1], [b, 1]`.
    """
    if left.ndim == right.ndim + 1 and left.shape[-1] == 1:
        return (left, right[..., None]) if right.ndim == 1 else (left[..., 0], right)
    if right.ndim == left.ndim + 1 and right.shape[-1] == 1:
        return (left[..., None], right) if left.ndim == 1 else (left, right[..., 0])
    return left, right


def at_least_float32(array: Any) -> jax.Array:
    """Returns a floating array; half precision and integers become float32."""
    array = jnp.asarray(array)
    return array.astype(jnp.promote_types(array.dtype, jnp.float32))


def standardized(y_true: Any, y_pred: Any) -> tuple[Any, Any]:
    """Returns arrays, with `y_pred` and floating targets at least float32: half precision is too coarse for sums."""

    def keep_integers(leaf: Any) -> jax.Array:
        leaf = jnp.asarray(leaf)
        return at_least_float32(leaf) if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf

    return jax.tree.map(keep_integers, y_true), jax.tree.map(at_least_float32, y_pred)


def _where_rows(mask: ArrayLike, leaf: jax.Array, otherwise: float) -> jax.Array:
    """Returns `leaf` [rows, ...] with the rows whose mask is 0 replaced by `otherwise`."""
    mask = jnp.asarray(mask) != 0
    return jnp.where(mask.reshape(mask.shape + (1,) * (leaf.ndim - 1)), leaf, jnp.asarray(otherwise, leaf.dtype))


def _weighted(
    values: jax.Array, sample_weight: ArrayLike | None, valid: jax.Array | None, mask: ArrayLike | None
) -> tuple[jax.Array, jax.Array | None]:
    """Returns values and weights of matching ranks, the weights 0 on padding and on values that are not valid."""
    weight = None
    if sample_weight is not None:
        values, weight = _aligned(values, jnp.asarray(sample_weight).astype(values.dtype))
        weight = weight if mask is None else _where_rows(mask, weight, 0)
    if valid is not None:
        valid = jnp.reshape(valid, values.shape).astype(values.dtype)
        weight = valid if weight is None else weight * valid
    return values, weight


def _aligned(values: jax.Array, weight: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns values and sample weights of equal ranks; weights of fewer dimensions weigh whole slices."""
    original = weight.shape
    values, weight = match_ranks(values, weight)
    weight = weight.reshape(weight.shape + (1,) * (values.ndim - weight.ndim))
    if original[:1] != values.shape[:1] or any(w not in (1, v) for w, v in zip(weight.shape, values.shape, strict=False)):
        raise ValueError(
            f"sample_weight of shape {original} does not fit loss values of shape {values.shape}. Pass one weight per row, "
            f"shape {values.shape[:1]}, or one per value, shape {values.shape}."
        )
    return values, weight
