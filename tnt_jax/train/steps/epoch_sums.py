"""The sums over an epoch that its logs are computed from, their loss terms, and weights of rows."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec
from jax.typing import ArrayLike

from tnt_jax import _jax
from tnt_jax.distributed.sums.reduction import psum
from tnt_jax.train.contracts import Batch, LossTerm, Measured, Parts
from tnt_jax.train.state import TrainState


def zero_sums(parts: Parts, state: TrainState, batch: Batch, mesh: Mesh) -> Any:
    """Returns the initial sums of an epoch, for batches like `batch`, as host arrays."""

    def measure(params: Any, model_state: Any, batch: Batch) -> Any:
        measured = parts.measure(params, model_state, batch, key=None, train=False)
        numbers = _jax.make_varying(
            ([divide(term) for term in measured.terms], measured.increments)
        )
        return psum(numbers)

    specs = (PartitionSpec(), PartitionSpec(), PartitionSpec(_jax.rank_axes(mesh)))
    mapped = _jax.shard_map(measure, mesh=mesh, in_specs=specs, out_specs=PartitionSpec())
    losses, increments = jax.eval_shape(mapped, state.params, state.model_state, batch)
    zero = np.zeros((), np.float32)
    increments = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), increments)
    return {"loss": (zero, zero), "losses": [(zero, zero) for _ in losses], "metrics": increments}


def add_sums(
    sums: Any, loss: jax.Array, losses: list[jax.Array], increments: Any, rows: jax.Array | float
) -> Any:
    """Returns the sums after a batch of `rows` real rows, which weigh its loss, as in Keras 3."""

    def add(pair: tuple[jax.Array, jax.Array], value: jax.Array) -> tuple[jax.Array, jax.Array]:
        return pair[0] + value.astype(jnp.float32) * rows, pair[1] + rows

    return {
        "loss": add(sums["loss"], loss),
        "losses": [add(pair, value) for pair, value in zip(sums["losses"], losses, strict=True)],
        "metrics": jax.tree.map(jnp.add, sums["metrics"], increments),
    }


def divide(term: LossTerm) -> jax.Array:
    """Returns this rank's share of a loss term, inside `shard_map`.

    It is the local total over the global count, and 0 if that is 0. Its scale is left out: logs
    show each loss without it, as in Keras.
    """
    return quotient(term, _count_of(term))


def counts_of(measured: Measured) -> list[Any]:
    """Returns the count of each loss term over all ranks, inside `shard_map`."""
    return list(map(_count_of, measured.terms))


def _count_of(term: LossTerm) -> Any:
    # psum of a Python number is a multiplication, so a known count needs no communication.
    return None if term.count is None else psum(term.count)


def quotient(term: LossTerm, count: jax.Array | float | None) -> jax.Array:
    """Returns a share of a loss term, given the count of the global batch; 0 if that is 0."""
    if count is None:
        return term.total
    is_empty = jnp.equal(count, 0)
    return jnp.where(is_empty, 0.0, term.total / jnp.where(is_empty, 1.0, count))


def weighted_sum(losses: list[jax.Array], terms: list[LossTerm], penalty: Any) -> Any:
    """Returns the loss: the loss of each term by its scale, and what the model adds itself."""
    scaled = [loss * term.scale for loss, term in zip(losses, terms, strict=True)]
    return sum(scaled, start=penalty)


def num_local_rows(batch: Batch) -> int:
    """Returns the rows of a batch, padding included."""
    return jax.tree.leaves(batch.inputs)[0].shape[0]


def num_real_local_rows(batch: Batch) -> int:
    """Returns the rows of a batch on the host that are no padding."""
    return num_local_rows(batch) if batch.mask is None else int(batch.mask.sum())


def num_real_rows(batch: Batch) -> jax.Array | float:
    """Returns the real rows of the global batch, inside `shard_map`."""
    if batch.mask is None:
        return psum(float(num_local_rows(batch)))
    return psum(jnp.sum(batch.mask))


def match_ranks(left: jax.Array, right: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Adds or removes a last dimension of size one if that makes the ranks of two arrays equal.

    A vector is expanded rather than the other array squeezed, as in Keras: `[b, 1], [b]` gives `[b,
    1], [b, 1]`.
    """
    if left.ndim == right.ndim + 1 and left.shape[-1] == 1:
        return (left, right[..., None]) if right.ndim == 1 else (left[..., 0], right)
    if right.ndim == left.ndim + 1 and right.shape[-1] == 1:
        return (left[..., None], right) if left.ndim == 1 else (left, right[..., 0])
    return left, right


def where_rows(mask: ArrayLike, leaf: jax.Array, otherwise: float) -> jax.Array:
    """Returns `leaf` [rows, ...] with the rows whose mask is 0 replaced by `otherwise`."""
    mask = jnp.asarray(mask) != 0
    return jnp.where(
        mask.reshape(mask.shape + (1,) * (leaf.ndim - 1)), leaf, jnp.asarray(otherwise, leaf.dtype)
    )


def weighted(
    values: jax.Array,
    sample_weight: ArrayLike | None,
    valid: jax.Array | None,
    mask: ArrayLike | None,
) -> tuple[jax.Array, jax.Array | None]:
    """Returns values and weights of matching ranks, which are 0 on padding and invalid values."""
    weight = None
    if not jnp.issubdtype(values.dtype, jnp.inexact):
        values = values.astype(jnp.float32)  # Weights may be fractions.
    if sample_weight is not None:
        values, weight = _aligned(values, jnp.asarray(sample_weight).astype(values.dtype))
        weight = weight if mask is None else where_rows(mask, weight, 0)
    if valid is not None:
        valid = jnp.reshape(valid, values.shape).astype(values.dtype)
        weight = valid if weight is None else weight * valid
    return values, weight


def _aligned(values: jax.Array, weight: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns both with equal ranks; weights of fewer dimensions weigh whole slices."""
    original = weight.shape
    if weight.ndim == 0 or values.ndim == 0:
        return values, weight
    values, weight = match_ranks(values, weight)
    weight = weight.reshape(weight.shape + (1,) * (values.ndim - weight.ndim))
    if weight.ndim > values.ndim or any(
        w not in (1, v) for w, v in zip(weight.shape, values.shape, strict=True)
    ):
        raise ValueError(
            f"sample_weight of shape {original} does not fit loss values of shape {values.shape}. "
            f"Pass one weight per row, shape {values.shape[:1]}, or one per value, shape "
            f"{values.shape}."
        )
    return values, weight
