"""Losses on whole rows, such as masks and sequences, or on pairs of rows.

`axis` of an overlap of masks holds the dimensions that are summed. Training needs one value per
row: all dimensions except the first, such as `axis=(1, 2, 3)` for images. With `axis=None`, the
default, a call returns one value for the whole batch, as in Keras, and training refuses the loss.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike

from tnt_jax.keras_compat.losses.base import (
    EPSILON,
    LossFunctionWrapper,
    at_least_float32,
    of_one_dtype,
)

Axis = int | Sequence[int] | None


def dice(y_true: ArrayLike, y_pred: ArrayLike, axis: Axis = None) -> jax.Array:
    """Returns 1 - 2 * sum(y_true * y_pred) / (sum(y_true) + sum(y_pred)), with sums over `axis`.

    Milletari et al. 2016.
    """
    y_true, y_pred = of_one_dtype(y_true, y_pred)
    axis = _as_tuple(axis)
    both = jnp.sum(y_true * y_pred, axis=axis)
    return 1 - 2 * both / (jnp.sum(y_true, axis=axis) + jnp.sum(y_pred, axis=axis) + EPSILON)


def tversky(
    y_true: ArrayLike, y_pred: ArrayLike, alpha: float = 0.5, beta: float = 0.5, axis: Axis = None
) -> jax.Array:
    """Returns 1 - both / (both + alpha * missed + beta * invented), with sums over `axis`.

    Salehi et al. 2017, arXiv:1706.05721. Keras's documentation calls `alpha` the weight of false
    positives, but it weights targets that the outputs miss, here as in Keras.
    """
    y_true, y_pred = of_one_dtype(y_true, y_pred)
    axis = _as_tuple(axis)
    both = jnp.sum(y_true * y_pred, axis=axis)
    missed = jnp.sum((1 - y_pred) * y_true, axis=axis)
    invented = jnp.sum(y_pred * (1 - y_true), axis=axis)
    return 1 - both / (both + missed * alpha + invented * beta + EPSILON)


def _as_tuple(axis: Axis) -> int | tuple[int, ...] | None:
    return axis if axis is None or isinstance(axis, int) else tuple(axis)


def ctc(y_true: ArrayLike, y_pred: ArrayLike) -> jax.Array:
    """Returns the connectionist temporal classification loss [batch] (Graves et al. 2006).

    Args:
        y_true: Labels [batch, length]; 0 is the blank and pads.
        y_pred: Logits [batch, time, classes].
    """
    y_true, y_pred = jnp.asarray(y_true), jnp.asarray(y_pred)
    if y_true.ndim != 2:
        raise ValueError(
            "Targets `y_true` are expected to be labels [batch_size, max_length], got the shape "
            f"{y_true.shape}."
        )
    if y_pred.ndim != 3:
        raise ValueError(
            "Logits `y_pred` are expected to be [batch_size, max_length, num_classes], got the "
            f"shape {y_pred.shape}."
        )
    y_pred = at_least_float32(y_pred)
    length = jnp.sum(y_true != 0, axis=-1, keepdims=True)
    is_padding = (jnp.arange(y_true.shape[1]) >= length).astype(y_pred.dtype)
    no_padding = jnp.zeros(y_pred.shape[:2])
    return optax.ctc_loss(y_pred, no_padding, y_true.astype(jnp.int32), is_padding)


def circle(
    y_true: ArrayLike,
    y_pred: ArrayLike,
    ref_labels: ArrayLike | None = None,
    ref_embeddings: ArrayLike | None = None,
    remove_diagonal: bool = True,
    gamma: float = 80,
    margin: float = 0.4,
) -> jax.Array:
    """Returns the circle loss [batch] against all rows (Sun et al. 2020, arXiv:2002.10857).

    Args:
        y_true: Labels [batch].
        y_pred: Embeddings of length one [batch, features].
        ref_labels: Labels to compare with [others]; `y_true` by default.
        ref_embeddings: Embeddings to compare with [others, features]; `y_pred` by default.
        remove_diagonal: Whether to exclude a row as a positive example of itself.
        gamma: Scale of the similarities.
        margin: Margin between similarities.
    """
    y_pred = jnp.asarray(y_pred)
    labels, others = (
        jnp.asarray(array).astype(jnp.int32).reshape(-1, 1)
        for array in (y_true, y_true if ref_labels is None else ref_labels)
    )
    embeddings = y_pred if ref_embeddings is None else jnp.asarray(ref_embeddings)
    distances = jnp.maximum(1 - y_pred @ embeddings.T, 0)
    is_same = labels == others.T
    is_positive = is_same & ~jnp.eye(*is_same.shape, dtype=bool) if remove_diagonal else is_same
    positive = -gamma * jnp.maximum(margin + distances, 0) * (margin - distances)
    negative = gamma * jnp.maximum(1 + margin - distances, 0) * (1 - margin - distances)
    sums = [
        jax.nn.logsumexp(jnp.where(where, terms, -jnp.inf), axis=1)
        for where, terms in ((is_positive, positive), (~is_same, negative))
    ]
    return jax.nn.softplus(sums[0] + sums[1])


class Dice(LossFunctionWrapper):
    """Dice loss: how little masks overlap; see `losses.dice`. Training needs `axis`."""

    targets = "like_outputs"

    def __init__(
        self,
        reduction: str | None = "sum_over_batch_size",
        name: str | None = "dice",
        axis: Axis = None,
        dtype: Any = None,
    ) -> None:
        super().__init__(dice, reduction, name, dtype, axis=axis)
        self.axis = axis  # pyright: ignore[reportAttributeAccessIssue]


class Tversky(LossFunctionWrapper):
    """`Dice` with weights for both kinds of error; see `losses.tversky`. Training needs `axis`."""

    targets = "like_outputs"

    def __init__(
        self,
        alpha: float = 0.5,
        beta: float = 0.5,
        reduction: str | None = "sum_over_batch_size",
        name: str | None = "tversky",
        axis: Axis = None,
        dtype: Any = None,
    ) -> None:
        super().__init__(tversky, reduction, name, dtype, alpha=alpha, beta=beta, axis=axis)
        self.alpha = alpha
        self.beta = beta
        self.axis = axis  # pyright: ignore[reportAttributeAccessIssue]


class CTC(LossFunctionWrapper):
    """Connectionist temporal classification loss; see `losses.ctc`."""

    def __init__(
        self,
        reduction: str | None = "sum_over_batch_size",
        name: str | None = "ctc",
        dtype: Any = None,
    ) -> None:
        super().__init__(ctc, reduction, name, dtype)


class Circle(LossFunctionWrapper):
    """Circle loss of labels [batch] and unit embeddings [batch, features]; see `losses.circle`.

    It compares every row with every other, so training refuses it.
    """

    def __init__(
        self,
        gamma: float = 80.0,
        margin: float = 0.4,
        remove_diagonal: bool = True,
        reduction: str | None = "sum_over_batch_size",
        name: str | None = "circle",
        dtype: Any = None,
    ) -> None:
        super().__init__(
            circle,
            reduction,
            name,
            dtype,
            gamma=gamma,
            margin=margin,
            remove_diagonal=remove_diagonal,
        )
        self.gamma = gamma
        self.margin = margin
        self.remove_diagonal = remove_diagonal

    def valid(self, y_true: Any, y_pred: Any) -> jax.Array:
        """Returns which rows have a loss: those with another row of their class."""
        return self.call(y_true, y_pred) > 0

    def terms(self, *args: Any, **kwargs: Any) -> Any:
        """Raises a ValueError: this loss cannot be used in training."""
        raise ValueError(
            f"The loss {self.name!r} compares every row with every other, so it is not a sum over "
            "parts of a batch. Use a loss that has one value per row."
        )
