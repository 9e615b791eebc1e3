"""Losses and other results of the global batch from each rank's rows, in a distributed step."""

import math
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from tnt_jax import _jax
from tnt_jax.distributed.sums.reduction import psum
from tnt_jax.train.contracts import LossTerm
from tnt_jax.train.loops.context import LossOfPass, StepContext, needs_arguments, require_step
from tnt_jax.train.steps.epoch_sums import divide, quotient, weighted, where_rows
from tnt_jax.train.steps.row_dependence import marked


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
    """Returns the sum of the ranks' parts of a loss."""
    if step.of_all is not None:
        return LossOfPass(_jax.make_varying(part))
    if step.tells_varying and not _jax.is_varying(part):
        # Of parameters that are the same everywhere: outside of a loss function.
        return part * jax.lax.axis_size(_jax.DATA_AXIS)
    total = psum(_jax.make_varying(part))
    # Where the sum is differentiated, its parts may travel with the gradients.
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


Op = Literal["sum", "mean", "max", "min", "concat"]


def reduce(x: Any, op: Op = "sum") -> Any:
    """Returns values of rows, or of ranks, reduced over the global batch.

    It is called inside a distributed step.

    An array has one value, or several, for each row: it is reduced over the real rows of the global
    batch, as on one device by `jnp.sum(x, axis=0)` and the like. A scalar is what this rank made of
    its own rows, without the padding: it is reduced over the ranks.

    Args:
        x: Pytree of arrays `[rows, ...]` and of scalars.
        op: `"sum"`, `"mean"` (of rows only), `"max"`, `"min"`, or `"concat"`: the rows of all
            ranks, padding included, which `batch.without_padding` takes away outside.

    Returns:
        Arrays `[...]`, for `"concat"` `[rows of all ranks, ...]`, the same on every rank.

    Raises:
        RuntimeError: Outside a distributed step.
        ValueError: If `op` is unknown, or an array has no rows.
        TypeError: If a value is the same on every rank already.
    """
    step = require_step("reduce")
    if step.of_all is not None:
        raise ValueError(
            "tnt_jax.reduce was called in a loss function whose rows are computed in several "
            "passes. Return the values of the rows with has_aux=True, and reduce them outside."
        )
    if op not in get_args(Op):
        raise ValueError(f"op must be one of {', '.join(get_args(Op))}, but is {op!r}.")
    paths_and_leaves, structure = jax.tree_util.tree_flatten_with_path(x)
    leaves = [marked(jnp.asarray(leaf)) for _, leaf in paths_and_leaves]
    for (path, _), leaf in zip(paths_and_leaves, leaves, strict=True):
        _check(jax.tree_util.keystr(path), leaf, op, step)
    return structure.unflatten(_reduced(leaves, op, step))


def _reduced(leaves: list[jax.Array], op: Op, step: StepContext) -> list[jax.Array]:
    if op == "concat":
        gathered = _gathered(leaves, step)
        return [x.reshape(-1, *x.shape[2:]) for x in gathered]
    if op in ("max", "min"):
        extremum = jnp.max if op == "max" else jnp.min
        gathered = _gathered([_local(leaf, op, step) for leaf in leaves], step)
        return [extremum(x, axis=0) for x in gathered]
    totals = [_local(leaf, "sum", step) for leaf in leaves]
    if op == "sum":
        return step.sum(totals)
    mask = step.batch.mask
    if mask is None:
        rows = psum(float(step.num_rows))  # A number, which costs no exchange.
        return [total / rows for total in step.sum(totals)]
    *totals, rows = step.sum([*totals, jnp.sum(mask)])
    return [total / rows for total in totals]


def _local(leaf: jax.Array, op: Op, step: StepContext) -> jax.Array:
    """Returns what a value is on this rank: rows reduced to one, without the padding."""
    if leaf.ndim == 0:
        return leaf
    if step.batch.mask is not None:
        leaf = where_rows(step.batch.mask, leaf, _neutral(leaf.dtype, op))
    if op == "sum":
        # Half precision and booleans are too coarse for sums.
        dtype = jnp.promote_types(leaf.dtype, jnp.float32)
        is_float = jnp.issubdtype(leaf.dtype, jnp.inexact)
        return jnp.sum(leaf, axis=0, dtype=dtype if is_float else None)
    return jnp.max(leaf, axis=0) if op == "max" else jnp.min(leaf, axis=0)


def _neutral(dtype: Any, op: Op) -> Any:
    if op == "sum":
        return 0
    if dtype == jnp.bool_:
        return op == "min"
    if jnp.issubdtype(dtype, jnp.floating):
        return -math.inf if op == "max" else math.inf
    limits = jnp.iinfo(dtype)
    return limits.min if op == "max" else limits.max


def _gathered(leaves: list[jax.Array], step: StepContext) -> list[jax.Array]:
    """Returns what all ranks have, arrays `[ranks, ...]`."""
    num_ranks = jax.lax.axis_size(_jax.DATA_AXIS)
    if num_ranks == 1:
        return [leaf[None] for leaf in leaves]
    return [_jax.all_gather_invariant(leaf[None]) for leaf in leaves]


def _check(path: str, leaf: jax.Array, op: Op, step: StepContext) -> None:
    """Raises if a value cannot be reduced; `path` is where it stands in what was passed."""
    name = f"x{path}"
    if step.tells_varying and not _jax.is_varying(leaf):
        raise TypeError(
            f"tnt_jax.reduce got {name}, which is the same on every rank: it is global already, "
            "such as a loss, a gradient or an earlier result. Return it as it is; to sum it would "
            "multiply it by the number of ranks."
        )
    if leaf.ndim and leaf.shape[0] != step.num_rows:
        raise ValueError(
            f"tnt_jax.reduce takes arrays of values for each row, but {name} has the shape "
            f"{leaf.shape} for {step.num_rows} rows of this rank. Pass the values before any sum "
            "over rows, or a scalar."
        )
    if leaf.ndim == 0 and op in ("mean", "concat"):
        raise ValueError(
            f"tnt_jax.reduce(..., {op!r}) takes values for each row, but {name} is a scalar. Ranks "
            "may have different numbers of rows, so that a mean of their means is none: pass the "
            "values before the mean."
        )
