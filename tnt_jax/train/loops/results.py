"""Results for the global batch from those for each rank's rows, inside a distributed step."""

from typing import Any, Literal

import jax
import jax.numpy as jnp

from tnt_jax import _jax
from tnt_jax.distributed.sums.fused_psum import psum
from tnt_jax.train.loops.context import StepContext, require_step
from tnt_jax.train.steps.row_dependence import marked
from tnt_jax.train.steps.row_weights import where_rows

Op = Literal["sum", "mean", "max", "min", "concat"]
_OPS = ("sum", "mean", "max", "min", "concat")


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
    if op not in _OPS:
        raise ValueError(f"op must be one of {', '.join(_OPS)}, but is {op!r}.")
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
    limits = jnp.finfo(dtype) if jnp.issubdtype(dtype, jnp.floating) else jnp.iinfo(dtype)
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
