"""Micro-batches: a rank's rows in several passes, with the sums and random numbers of one pass."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from tnt_jax import _jax
from tnt_jax.adapters.base import Applied
from tnt_jax.distributed.sums.random_rows import key_of_part, keys_of_parts, row_key, step_key
from tnt_jax.train.contracts import Apply, Batch, Parts
from tnt_jax.train.state import TrainState, descriptions


@dataclass
class RowsAtOnce:
    """Most rows of a rank that are computed in one pass; None for all."""

    training: int | None = None
    evaluation: int | None = None


class MicroRows:
    """How the rows of a rank are cut into `num_parts` micro-batches of `part_rows` each.

    Of the last ones `num_missing` rows are the last row again.
    """

    def __init__(self, num_rows: int, num_parts: int, part_rows: int | None = None) -> None:
        self.num_rows, self.num_parts = num_rows, num_parts
        self.part_rows = part_rows or -(-num_rows // num_parts)
        self.num_missing = num_parts * self.part_rows - num_rows

    def cut(self, x: jax.Array) -> jax.Array:
        """Returns rows as `[micro-batches, rows of each, ...]`."""
        if self.num_missing:
            x = jnp.concatenate([x, jnp.repeat(x[-1:], self.num_missing, axis=0)])
        return x.reshape(self.num_parts, self.part_rows, *x.shape[1:])

    def joined(self, x: jax.Array) -> jax.Array:
        """Returns what was computed of the rows of each micro-batch as `[rows, ...]`."""
        return x.reshape(-1, *x.shape[2:])[: self.num_rows]

    def cut_batch(self, batch: Batch) -> Batch:
        """Returns a batch as micro-batches; rows that fill the last ones are masked."""
        if self.num_missing and batch.mask is None:
            num_rows = jax.tree.leaves(batch.inputs)[0].shape[0]
            batch = batch._replace(mask=_jax.make_varying(jnp.ones(num_rows, jnp.float32)))
        cut: Batch = jax.tree.map(self.cut, batch)
        if not self.num_missing:
            return cut
        is_real = jnp.arange(cut.mask.size) < cut.mask.size - self.num_missing
        return cut._replace(mask=cut.mask * is_real.reshape(cut.mask.shape))

    def keys(self, key: jax.Array | None) -> jax.Array | None:
        """Returns the words of the key of each micro-batch; None without a key."""
        return None if key is None else keys_of_parts(key, self.num_parts, self.part_rows)

    def key(self, key: jax.Array | None, words: jax.Array | None) -> jax.Array | None:
        """Returns the key of a micro-batch with some words; None without a key."""
        return None if key is None or words is None else key_of_part(words)


def unit_of(rows: int) -> int:
    """Returns the power of two to whose multiples rows are rounded: at most a 32nd of them."""
    return 1 << max(rows.bit_length() - 6, 0)


def rows_of_pass(num_rows: int, most: int) -> int:
    """Returns the rows of equal passes of at most `most` rows.

    They are a multiple of a power of two where that adds at most one row in 32: GPUs compute other
    numbers of rows in padded copies, which can take as much memory again.

    >>> rows_of_pass(10, 4), rows_of_pass(9, 8), rows_of_pass(9, 9)
    (4, 5, 9)
    >>> rows_of_pass(30_000, 10_300), rows_of_pass(30_000, 10_000)
    (10240, 10000)
    """
    count = math.ceil(num_rows / most)
    rows = math.ceil(num_rows / count)
    rounded = math.ceil(rows / unit_of(rows)) * unit_of(rows)
    return rounded if count > 1 and rounded <= most else rows


def in_passes(num_rows: int, rows_at_once: int | None) -> MicroRows:
    """Returns how a rank's rows are cut into passes; see `Parts.rows_at_once`."""
    if rows_at_once is None:
        return MicroRows(num_rows, 1)
    part_rows = rows_of_pass(num_rows, rows_at_once)
    return MicroRows(num_rows, math.ceil(num_rows / part_rows), part_rows)


def sums_of_passes(
    compute: Callable[[Any], tuple[Any, Any]], micro_batches: Any
) -> tuple[Any, Any]:
    """Returns the sums of what is computed from each micro-batch, inside `shard_map`.

    Sums of numbers in half precision are made in float32. From a micro-batch, one of arrays
    `[micro-batches, ...]`, comes a pytree of arrays to sum, and another to keep, which is stacked.
    """

    def wide(x: jax.Array) -> jax.Array:
        is_half = jnp.issubdtype(x.dtype, jnp.floating) and x.dtype.itemsize < 4
        return x.astype(jnp.float32) if is_half else x

    first = jax.tree.map(lambda x: x[0], micro_batches)
    shapes, _ = jax.eval_shape(compute, first)
    zeros = jax.tree.map(lambda x: wide(jnp.zeros(x.shape, x.dtype)), shapes)

    def add(totals: Any, micro_batch: Any) -> tuple[Any, Any]:
        values, kept = _jax.make_varying(compute(micro_batch))
        return jax.tree.map(lambda total, x: total + wide(x), totals, values), kept

    totals, kept = jax.lax.scan(add, _jax.make_varying(zeros), micro_batches)
    return jax.tree.map(lambda x, shape: x.astype(shape.dtype), totals, shapes), kept


def evaluated_in_passes(apply: Apply, at_once: RowsAtOnce) -> Apply:
    """Returns a forward pass over independent rows, in passes except in training, as traced."""

    def apply_in_passes(
        params: Any, model_state: Any, inputs: Any, *, key: Any, train: bool, mask: Any
    ) -> Applied:
        whole = apply(params, model_state, inputs, key=key, train=train, mask=mask)
        if train or at_once.evaluation is None:
            return whole
        rows = in_passes(jax.tree.leaves(inputs)[0].shape[0], at_once.evaluation)
        if rows.num_parts == 1:
            return whole
        micro = rows.cut_batch(Batch(inputs, mask=mask))

        def compute(micro: tuple[Batch, Any]) -> Applied:
            batch, words = micro
            own = rows.key(key, words)
            return apply(params, model_state, batch.inputs, key=own, train=False, mask=batch.mask)

        applied = jax.lax.map(compute, (micro, rows.keys(key)))
        return Applied(
            jax.tree.map(rows.joined, applied.outputs),
            whole.model_state,
            whole.penalty,
            jax.tree.map(lambda x: jnp.sum(x, axis=0), applied.increments),
        )

    return apply_in_passes


def why_in_one_pass(
    parts: Parts, state: TrainState, batch: Batch, num_rows: int, mesh: Mesh
) -> str | None:
    """Returns why a step cannot be computed in several passes; None if it can.

    That rows do not depend on one another is for the caller to know. The state may be described;
    the batch is any rows, and `num_rows` are those of a rank.
    """

    def measure(params: Any, model_state: Any, words: Any, batch: Batch) -> dict[str, Any]:
        key = row_key(step_key(words, 0), jnp.uint32(1))
        measured = parts.measure(params, model_state, batch, key=key, train=True)
        counts = [jnp.asarray(x.count) for x in measured.terms if x.count is not None]
        return {
            "counts": counts,
            "penalty": jnp.asarray(measured.penalty),
            "state": measured.model_state,
            "totals": [term.total for term in measured.terms],
        }

    one_rank, spec = _jax.one_rank_mesh(mesh.local_devices[0], mesh), PartitionSpec()
    mapped: Any = _jax.shard_map(measure, mesh=one_rank, in_specs=(spec,) * 4, out_specs=spec)
    variables = descriptions((state.params, state.model_state, state.key))
    rows = descriptions(batch._replace(mask=None), rows=num_rows)
    traced = jax.jit(mapped).trace(*variables, rows)
    if _jax.communicates(traced):
        return "The model communicates with other ranks, as a synchronized BatchNorm does"

    def needs(result: str) -> tuple[bool, bool]:
        wanted = {
            name: jax.tree.map(lambda _, name=name: name == result, shapes)
            for name, shapes in traced.out_info.items()
        }
        params, _, _, batch = _jax.needed_operands(traced, wanted)
        return any(jax.tree.leaves(params)), any(jax.tree.leaves(batch))

    if needs("state")[1]:
        return "The model keeps statistics of a batch, as BatchNorm does"
    if needs("penalty")[1]:
        return "The model adds losses that depend on the rows of a batch"
    if needs("counts")[0]:
        return "The loss is divided by a number that the model computes"
    return None
