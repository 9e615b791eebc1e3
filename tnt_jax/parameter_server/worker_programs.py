"""The compiled programs of a worker: gradients, evaluation and prediction on its own devices.

A batch may be computed in several shares, each by one worker. The share's gradients are those of
the global batch's loss, because the divisors of the loss are known for the whole batch.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from tnt_jax import _jax
from tnt_jax.distributed.averages import StateAverage
from tnt_jax.distributed.gradients import sum_gradients
from tnt_jax.distributed.random_rows import batch_key
from tnt_jax.distributed.reduction import Reduction
from tnt_jax.train.contracts import Apply, Batch, LossTerm, Measured, Parts
from tnt_jax.train.epoch_sums import num_real_rows, quotient
from tnt_jax.train.state import TrainState
from tnt_jax.train.step import compiled, differentiate, share_of_rows

_REPLICATED: Any = PartitionSpec()
_BY_ROW: Any = PartitionSpec(_jax.DATA_AXIS)


class Share(NamedTuple):
    """Which part of a global batch a worker computes.

    Attributes:
        first_rank: Ranks that compute earlier rows, int32.
        part: 1 over the number of shares, float32.
        counts: Divisor of each term of the loss of the whole batch, float32.
    """

    first_rank: Any
    part: Any
    counts: tuple[Any, ...]


class Computed(NamedTuple):
    """What a worker computes from its rows.

    Attributes:
        grads: Gradients of the loss.
        model_state: Model state after the pass.
        loss: The rows' part of the batch's loss.
        losses: The same for each term.
        increments: What the rows add to the sums of the metrics.
        rows: Number of real rows.
    """

    grads: Any
    model_state: Any
    loss: Any
    losses: Any
    increments: Any
    rows: Any


@dataclass(frozen=True, eq=False)
class PartsOfShare:
    """The parts of a step on some rows of a batch whose divisors are known.

    Attributes:
        parts: The parts for a whole batch.
        share: Which part of the batch the rows are.
    """

    parts: Parts
    share: Share

    def measure(
        self, params: Any, model_state: Any, batch: Batch, *, key: jax.Array | None, train: bool
    ) -> Measured:
        """Returns this rank's part of the loss of the global batch, and its metrics."""
        measured = self.parts.measure(params, model_state, batch, key=key, train=train)
        terms = [
            LossTerm(quotient(term, None if term.count is None else count), None, term.scale)
            for term, count in zip(measured.terms, self.share.counts, strict=True)
        ]
        penalty = measured.penalty * self.share.part
        return measured._replace(terms=terms, penalty=penalty)


class GradientStep:
    """The jitted function `(state, batch, share) -> Computed` of a worker.

    Args:
        parts: What the step computes.
        mesh: The worker's devices, over the axis `data`.
        reduction: How gradients are summed over them.
    """

    def __init__(self, parts: Parts, mesh: Mesh, reduction: Reduction) -> None:
        self._parts = parts
        self._mesh = mesh
        self._reduction = reduction
        whole = _jax.shard_map(
            lambda state, batch: self._compute(state, batch, None),
            mesh=mesh, in_specs=(_REPLICATED, _BY_ROW), out_specs=_REPLICATED,
        )  # fmt: skip
        shared = _jax.shard_map(
            self._compute,
            mesh=mesh, in_specs=(_REPLICATED, _BY_ROW, _REPLICATED), out_specs=_REPLICATED,
        )  # fmt: skip
        self._whole = compiled(whole, mesh)
        self._shared = compiled(shared, mesh)

    def __call__(self, state: TrainState, batch: Batch, share: Share | None) -> Computed:
        """Returns gradients and sums for the rows of a batch, or of a share of one."""
        if share is None:
            return self._whole(state, batch)
        return self._shared(state, batch, share)

    def _compute(self, state: TrainState, batch: Batch, share: Share | None) -> Computed:
        parts = self._parts if share is None else PartsOfShare(self._parts, share)
        first_rank = 0 if share is None else share.first_rank
        local = differentiate(parts, state, batch, self._mesh, first_rank=first_rank)
        rows = num_real_rows(batch)
        # A share may hold no real row; what it makes of the model state then counts nothing.
        average = StateAverage(local.model_state, _share_of_rank(batch, rows))
        summed = sum_gradients(
            local.grads,
            self._reduction,
            order=local.order,
            first=local.numbers,
            others=average.summands,
        )
        loss, losses, increments = summed.first
        return Computed(summed.grads, average.result(summed.others), loss, losses, increments, rows)


def _share_of_rank(batch: Batch, rows: Any) -> Any:
    if batch.mask is None:
        return None
    return share_of_rows(batch, jax.numpy.maximum(rows, 1))


def make_counts(parts: Parts, mesh: Mesh) -> Callable[[Any, Any, Batch], list[Any]]:
    """Returns the function that tells the divisors of the loss of a whole batch.

    It takes parameters, model state and the batch. They must not depend on the parameters.

    Args:
        parts: What the step computes.
        mesh: One device.
    """

    def counts(params: Any, model_state: Any, batch: Batch) -> list[Any]:
        measured = parts.measure(params, model_state, batch, key=None, train=False)
        found = [1.0 if term.count is None else term.count for term in measured.terms]
        return [jax.lax.psum(jax.numpy.float32(count), _jax.DATA_AXIS) for count in found]

    specs = (_REPLICATED, _REPLICATED, _BY_ROW)
    mapped = _jax.shard_map(counts, mesh=mesh, in_specs=specs, out_specs=_REPLICATED)
    return compiled(mapped, mesh)


def exchanges_rows(apply: Apply, mesh: Mesh, state: TrainState, inputs: Any) -> bool:
    """Returns whether a model communicates over the data axis in training.

    Args:
        apply: Forward pass.
        mesh: One device.
        state: Training state.
        inputs: Inputs of a batch.
    """

    def outputs(params: Any, model_state: Any, inputs: Any) -> Any:
        key = batch_key(state.key, 0, len(jax.tree.leaves(inputs)[0]))
        applied = apply(params, model_state, inputs, key=key, train=True, mask=None)
        return _jax.make_varying(applied.outputs)

    specs = (_REPLICATED, _REPLICATED, _BY_ROW)
    mapped = _jax.shard_map(outputs, mesh=mesh, in_specs=specs, out_specs=_BY_ROW)
    return _jax.communicates(jax.jit(mapped).trace(state.params, state.model_state, inputs))


def counts_need_params(counts: Callable, params: Any, model_state: Any, batch: Batch) -> bool:
    """Returns whether the divisors of the loss depend on parameters or model state."""
    traced = counts.trace(params, model_state, batch)  # pyright: ignore
    program = _jax.without_dead_code(traced.jaxpr.jaxpr)
    num_variables = len(jax.tree.leaves((params, model_state)))
    return bool(set(program.invars) & set(traced.jaxpr.jaxpr.invars[:num_variables]))


def with_variables(key: Any, params: Any, model_state: Any, step: int) -> TrainState:
    """Returns what a worker knows of the training state, without the optimizer's."""
    number: Any = np.int32(step)
    return TrainState(number, params, model_state, (), key)
