"""Overlap losses for masks: functions `(y_true, y_pred) -> values`, and their classes.

`axis` holds the dimensions that are summed. Training needs one value per row: all dimensions except
the first, such as `axis=(1, 2, 3)` for images. With `axis=None`, the default, a call returns one
value for the whole batch, as in Keras, and training refuses the loss.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from tnt_jax.keras_compat.losses.base import EPSILON, LossFunctionWrapper, of_one_dtype

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
