"""Counts of right and wrong decisions at thresholds, for precision, recall and AUC.

The counts at each threshold are summed, so results are exact for any split of the data; a mean of
the parts' precisions would not be.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from tnt_jax.keras_compat.losses.arrays import EPSILON, at_least_float32
from tnt_jax.train.row_weights import match_ranks

TRUE_POSITIVES, FALSE_POSITIVES = "true_positives", "false_positives"
TRUE_NEGATIVES, FALSE_NEGATIVES = "true_negatives", "false_negatives"
ALL_COUNTS = (TRUE_POSITIVES, FALSE_POSITIVES, TRUE_NEGATIVES, FALSE_NEGATIVES)
NOTHING = (
    -1e10
)  # Keras's threshold below all outputs, and its value for outputs that are not among the `top_k`.


def aligned(
    y_true: Any, y_pred: Any, weight: ArrayLike | None
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns targets as 0 or 1, outputs and weights, all with the outputs' shape.

    Rows with weight 0 hold zeros.
    """
    y_pred, y_true = match_ranks(at_least_float32(y_pred), jnp.asarray(y_true))
    weight = (
        jnp.ones(y_pred.shape[:1], y_pred.dtype)
        if weight is None
        else jnp.asarray(weight, y_pred.dtype)
    )
    weight = weight[..., 0] if weight.ndim > y_pred.ndim else weight
    weight = jnp.broadcast_to(
        weight.reshape(weight.shape + (1,) * (y_pred.ndim - weight.ndim)), y_pred.shape
    )
    return (y_true != 0).astype(y_pred.dtype), jnp.where(weight == 0, 0, y_pred), weight


def counts_at(
    thresholds: Sequence[float], y_true: jax.Array, y_pred: jax.Array, weight: jax.Array
) -> dict[str, jax.Array]:
    """Returns the four weighted counts at each threshold [thresholds].

    The arguments are flat arrays of decisions [n]. Evenly spaced thresholds are counted in one
    pass, as a histogram that is summed from above; as in Keras, an output on a threshold thus falls
    on the same side.
    """
    positive = y_true * weight
    negative = (1 - y_true) * weight
    even = np.linspace(0, 1, len(thresholds))
    if len(thresholds) >= 3 and np.allclose(thresholds, even, atol=EPSILON):
        is_widened = thresholds[0] < 0
        bucket = jnp.ceil(jnp.clip(y_pred, 0, 1) * (len(thresholds) - 1)) - 1
        # A segment number of len(thresholds) is dropped: the output is above no threshold.
        bucket = jnp.where(bucket < 0, 0 if is_widened else len(thresholds), bucket).astype(
            jnp.int32
        )
        above = [
            jax.ops.segment_sum(part, bucket, len(thresholds)) for part in (positive, negative)
        ]
        true_positives, false_positives = (jnp.cumsum(part[::-1])[::-1] for part in above)
    else:
        is_above = y_pred > jnp.asarray(thresholds, y_pred.dtype)[:, None]
        true_positives, false_positives = (
            jnp.sum(jnp.where(is_above, part, 0), axis=1) for part in (positive, negative)
        )
    return {
        TRUE_POSITIVES: true_positives,
        FALSE_POSITIVES: false_positives,
        TRUE_NEGATIVES: jnp.sum(negative) - false_positives,
        FALSE_NEGATIVES: jnp.sum(positive) - true_positives,
    }


def entry(array: jax.Array, class_id: int) -> jax.Array:
    """Returns one entry of the last dimension of outputs [rows, ..., classes].

    Raises:
        ValueError: If there is no class dimension.
    """
    if array.ndim == 1:
        raise ValueError(
            "When class_id is provided, y_pred must be a 2D array with shape (num_samples, "
            f"num_classes), found shape: {array.shape}."
        )
    return array[..., class_id]


def keep_top_k(y_pred: jax.Array, k: int) -> jax.Array:
    """Returns outputs with all but the `k` largest in the last dimension set to -1e10."""
    _, index = jax.lax.top_k(y_pred, k)
    is_kept = jnp.any(jax.nn.one_hot(index, y_pred.shape[-1], dtype=bool), axis=-2)
    return jnp.where(is_kept, y_pred, NOTHING)
