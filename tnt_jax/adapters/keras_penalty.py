"""Losses that a Keras model adds itself, as parts of the loss of the global batch."""

from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from tnt_jax import _jax
from tnt_jax.distributed.fused_psum import psum

Kind = Literal["mean", "sum"]


def kinds_of_losses(once: list[Any], twice: list[Any]) -> tuple[Kind, ...]:
    """Returns for each added loss whether it is a mean or a sum over the rows of a batch.

    A mean does not change if each row is repeated, and neither does a weight regularizer; a sum
    doubles.

    Args:
        once: Losses of some rows.
        twice: Losses of the same rows, each twice.

    Raises:
        ValueError: If a loss is neither, so that it cannot be computed from parts of a batch.
    """
    return tuple(
        _kind(index, float(np.sum(a)), float(np.sum(b)))
        for index, (a, b) in enumerate(zip(once, twice, strict=True))
    )


def penalty_of(
    losses: list[jax.Array], kinds: tuple[Kind, ...], mask: jax.Array | None, num_rows: int
) -> jax.Array | float:
    """Returns the added losses of one rank; their mean over ranks is that of the global batch.

    Without padding this is exact. Padded rows of losses `[rows]` are left out. A scalar is weighted
    by its rank's share of the real rows, which is exact for weight and activity regularizers, and
    for means of ranks without padding.

    Args:
        losses: Scalars, or losses `[rows, ...]`, which Keras sums.
        kinds: The kind of each loss.
        mask: float32 `[rows]`, 0 for padded rows; None when there are none.
        num_rows: Rows of this rank, padding included.
    """
    num_ranks = jax.lax.axis_size(_jax.rank_axes())
    penalty = 0.0
    for loss, kind in zip(losses, kinds, strict=True):
        if mask is not None and loss.shape[:1] == (num_rows,):
            loss = jnp.where(mask.reshape(-1, *(1,) * (loss.ndim - 1)) != 0, loss, 0)
            factor = jnp.asarray(1.0)
        elif mask is not None:
            real = jnp.sum(mask)
            factor = real / num_rows if kind == "sum" else real / psum(real) * num_ranks
        else:
            factor = 1.0
        penalty += jnp.sum(loss.astype(jnp.float32)) * factor * (num_ranks if kind == "sum" else 1)
    return penalty


def _kind(index: int, once: float, twice: float) -> Kind:
    if once == twice:
        return "mean"
    ratio = twice / once if once else np.inf
    # Wide, because noise is drawn anew for each row.
    if 0.7 < ratio < 1.4:
        return "mean"
    if 1.4 <= ratio < 2.8:
        return "sum"
    raise ValueError(
        f"The loss number {index} that the model adds (add_loss) is neither a mean nor a sum over "
        f"the rows of a batch: it was {once:.6g} for some rows and {twice:.6g} when each was "
        "repeated. Training on parts of a batch needs one of the two."
    )
