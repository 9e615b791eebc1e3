"""Losses of the global batch, inside a distributed step."""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from tnt_jax import _jax
from tnt_jax.distributed.sums.fused_psum import psum
from tnt_jax.train.contracts import LossTerm
from tnt_jax.train.loops.context import LossOfPass, StepContext, needs_arguments, require_step
from tnt_jax.train.steps.epoch_sums import divide, quotient
from tnt_jax.train.steps.row_dependence import marked
from tnt_jax.train.steps.row_weights import weighted, where_rows


def compute_average_loss(per_row: Any, sample_weight: ArrayLike | None = None) -> jax.Array:
    """Returns the mean of a loss over the real rows of the global batch, inside a distributed step.

    It is the loss that one device computes on the whole batch, as with Keras's reduction
    `sum_over_batch_size`: the sum of all weighted values over the number of values. Padded rows
    count nowhere, ranks may have different numbers of rows, and values of several dimensions are
    averaged over all of them.

    Args:
        per_row: Loss of each row `[rows]`, or of each value `[rows, ...]`, not averaged.
        sample_weight: Weights `[rows]`, `[rows, 1]` or shaped like the values, usually
            `batch.weight`; as in Keras they weigh values and are not divided by.

    Returns:
        A scalar, the same on every rank.

    Raises:
        RuntimeError: Outside a distributed step.
        ValueError: If the loss is no array of one value, or several, for each row.
    """
    step = require_step("compute_average_loss")
    values = jnp.asarray(per_row)
    _require_rows(values, step)
    values = marked(values)
    mask = step.batch.mask
    values, weight = weighted(values, sample_weight, None, mask)
    if mask is not None:
        values = where_rows(mask, values, 0)
    # Half precision is too coarse for sums.
    dtype = jnp.promote_types(values.dtype, jnp.float32)
    total = jnp.sum(values if weight is None else values * weight, dtype=dtype)
    if step.of_all is not None:
        count = step.of_all.real_rows * math.prod(values.shape[1:])
        return _total(quotient(LossTerm(total, count), count), step)
    count = float(values.size)
    if mask is not None:
        count = jnp.sum(where_rows(mask, jnp.ones(values.shape, jnp.float32), 0))
    return _total(divide(LossTerm(total, count)), step)


def scale_regularization_loss(penalty: ArrayLike) -> jax.Array:
    """Scales a penalty that every rank computes alike, so that it counts once in the loss.

    It is called inside a distributed step.

    Args:
        penalty: A scalar, such as the weight decay of the parameters, that does not depend on the
            batch; of one that does, the mean over the ranks counts.

    Returns:
        A scalar, the same on every rank.

    Raises:
        RuntimeError: Outside a distributed step.
        ValueError: If it is no scalar.
    """
    step = require_step("scale_regularization_loss")
    penalty = jnp.asarray(penalty)
    if penalty.ndim:
        raise ValueError(
            f"scale_regularization_loss takes a scalar, but got an array of shape {penalty.shape}. "
            "Sum the penalty first; the loss of rows belongs to compute_average_loss."
        )
    num_shares = jax.lax.axis_size(_jax.DATA_AXIS)
    if step.of_all is not None:
        step.of_all.penalties.append(penalty)
        num_shares *= step.of_all.num_passes
    return _total(penalty / num_shares, step)


def _total(part: jax.Array, step: StepContext) -> Any:
    """Returns the sum of the ranks' parts of a loss, and notes the part.

    Where the sum is differentiated, its parts may travel with the gradients.
    """
    if step.of_all is not None:
        return LossOfPass(_jax.make_varying(part))
    if step.tells_varying and not _jax.is_varying(part):
        # Of parameters that are the same everywhere: outside of a loss function.
        return part * jax.lax.axis_size(_jax.DATA_AXIS)
    total = psum(_jax.make_varying(part))
    step.parts[id(total)] = (total, part)
    return total


def _require_rows(values: jax.Array, step: StepContext) -> None:
    if values.ndim and values.shape[0] == step.num_rows:
        return
    if step.of_all is not None:
        raise ValueError(needs_arguments(step.name))
    found = f"an array of shape {values.shape}" if values.ndim else "a scalar"
    raise ValueError(
        "compute_average_loss takes one loss, or several, for each row of the batch, but got "
        f"{found} for {step.num_rows} rows of this rank. Pass the losses before any mean or sum "
        "over rows, with reduction=None where a loss has a reduction: a mean over a rank's own "
        "rows depends on the number of ranks."
    )
