"""Finds what made a step not finite: gradients, rows of the data, rows of the loss.

It runs once, when training is about to end: the step is computed again from the state before it.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from tnt_jax import _jax
from tnt_jax.distributed.sums.fused_psum import psum
from tnt_jax.train.contracts import Batch, Parts
from tnt_jax.train.finite import all_finite, can_be_summed, scale_alone
from tnt_jax.train.state import TrainState
from tnt_jax.train.state_arrays import listed, state_arrays
from tnt_jax.train.steps.epoch_sums import num_local_rows, quotient
from tnt_jax.train.steps.step import differentiate

_REPLICATED: Any = PartitionSpec()


class Diagnosis(NamedTuple):
    """What is not finite in a step.

    Attributes:
        loss: Loss of the global batch.
        leaves: Paths of the parameters whose gradients are not finite.
        data_rows: Rows of the global batch whose inputs, targets or weights are not finite.
        loss_rows: Rows whose own loss is not finite, in evaluation.
        num_rows: Real rows of the global batch.
    """

    loss: float
    leaves: list[str]
    data_rows: list[int]
    loss_rows: list[int]
    num_rows: int

    def describe(self) -> str:
        """Returns sentences for an error."""
        if self.leaves:
            text = f"The gradient of {listed(self.leaves)} is not finite. "
        else:
            text = "Every gradient of it is finite. "
        if self.data_rows:
            return (
                f"{text}The data hold NaN or infinity in {_rows(self.data_rows)} of the global "
                f"batch of {self.num_rows}."
            )
        if self.loss_rows:
            return (
                f"{text}The data are finite; the loss of {_rows(self.loss_rows)} of the global "
                f"batch of {self.num_rows} is not."
            )
        return (
            f"{text}The data are finite, and so is the loss of each of the {self.num_rows} rows of "
            "the global batch by itself."
        )


def diagnose(
    parts: Parts, state: TrainState, batch: Batch, mesh: Mesh, *, real_rows: Sequence[slice]
) -> Diagnosis:
    """Returns what is not finite in the step that follows a state; all processes must call it."""

    def work(state: TrainState, batch: Batch) -> Any:
        local = differentiate(parts, state, batch, mesh)
        unfit = [
            ~can_be_summed(state, grad, _jax.num_ranks(mesh))
            for grad in jax.tree.leaves(local.grads)
        ]
        loss, counts = psum(
            _jax.make_varying((local.numbers[0], jnp.stack(unfit).astype(jnp.float32)))
        )
        flags = _jax.make_varying((_bad_data(batch), _bad_losses(parts, state, batch)))
        return (
            loss,
            counts,
            jax.tree.map(lambda x: _jax.all_gather_invariant(x.astype(jnp.float32)), flags),
        )

    by_row: Any = PartitionSpec(_jax.rank_axes(mesh))
    mapped = _jax.shard_map(work, mesh=mesh, in_specs=(_REPLICATED, by_row), out_specs=_REPLICATED)
    # Of the rest each rank may hold a part alone.
    bare = TrainState(
        state.step, state.params, state.model_state, scale_alone(state.opt_state), state.key
    )
    loss, counts, flags = jax.tree.map(np.asarray, jax.jit(mapped)(bare, batch))
    order = np.concatenate([np.arange(rows.start, rows.stop) for rows in real_rows])
    data_rows, loss_rows = (np.flatnonzero(x[order]).tolist() for x in flags)
    paths = [path for path, count in zip(state_arrays(state.params), counts, strict=True) if count]
    return Diagnosis(float(loss), paths, data_rows, loss_rows, len(order))


def _bad_data(batch: Batch) -> jax.Array:
    """Returns for each row whether its inputs, targets or weights hold NaN or infinity."""
    bad = jnp.zeros(num_local_rows(batch), bool)
    for x in jax.tree.leaves((batch.inputs, batch.targets, batch.weight)):
        if jnp.issubdtype(x.dtype, jnp.inexact):
            bad |= ~jnp.isfinite(x.reshape(x.shape[0], -1)).all(axis=1)
    return bad


def _bad_losses(parts: Parts, state: TrainState, batch: Batch) -> jax.Array:
    def is_bad(row: Batch) -> jax.Array:
        alone = jax.tree.map(lambda x: x[None], row)
        measured = parts.measure(state.params, state.model_state, alone, key=None, train=False)
        return ~all_finite([quotient(term, term.count) for term in measured.terms])

    return jax.lax.map(lambda row: _jax.make_varying(is_bad(row)), batch)


def _rows(rows: list[int]) -> str:
    return f"row {rows[0]}" if len(rows) == 1 else f"rows {listed(rows)}"
