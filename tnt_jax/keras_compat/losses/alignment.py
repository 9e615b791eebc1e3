"""Losses on whole rows, connectionist temporal classification (CTC), or on pairs of rows."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike

from tnt_jax.keras_compat.losses.base import LossFunctionWrapper


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
    y_pred = y_pred.astype(jnp.promote_types(y_pred.dtype, jnp.float32))
    length = jnp.sum(y_true != 0, axis=-1, keepdims=True)
    is_padding = jnp.arange(y_true.shape[1]) >= length
    return optax.ctc_loss(
        y_pred,
        jnp.zeros(y_pred.shape[:2]),
        y_true.astype(jnp.int32),
        is_padding.astype(y_pred.dtype),
    )


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
    labels = jnp.asarray(y_true).astype(jnp.int32).reshape(-1, 1)
    others = (
        labels if ref_labels is None else jnp.asarray(ref_labels).astype(jnp.int32).reshape(-1, 1)
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
