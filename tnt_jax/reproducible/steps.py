"""Steps whose results have the same bits on any number of devices and processes.

The rounding of a sum depends on its order, and the rounding of a program on how it was compiled. So
a global batch is always cut into the chunks of V virtual ranks, one program that is the same on
every number of devices works on a chunk, the results are added in one order (`virtual_ranks.py`),
and the update is a program of its own: compiled together with the last addition, it would round
differently. The chunks of a device are no loop inside a program: XLA's convolutions on a CPU are
eight times slower there.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from tnt_jax import _jax
from tnt_jax.adapters.base import Variables
from tnt_jax.distributed.sums.random_rows import data_key
from tnt_jax.distributed.sums.reduction import check_can_be_averaged
from tnt_jax.reproducible.batch_sum import (
    BatchSum,
    Counts,
    ModelArrays,
    Packed,
    measure_chunk,
    numbers_of_chunk,
    shapes_of,
)
from tnt_jax.reproducible.virtual_ranks import (
    BY_RANK,
    REPLICATED,
    Programs,
    VirtualRanks,
    device_program,
    join,
    split,
)
from tnt_jax.train.contracts import Apply, Batch, Parts, Start, Steps, TrainingStep
from tnt_jax.train.finite import is_finite_step, loss_scale, take_or_leave
from tnt_jax.train.state import TrainState, create_state, started_at_once, updated
from tnt_jax.train.steps.epoch_sums import add_sums, num_local_rows
from tnt_jax.train.steps.step import accumulate, donated, with_step


class ReproducibleSteps(Steps):
    """Steps with the same bits on any number of devices."""

    def __init__(self, ranks: VirtualRanks) -> None:
        self.ranks = ranks
        self.rank_slice = ranks.rank_slice
        self.mesh = ranks.mesh
        self.num_waiting = ranks.num_waiting
        self.train = partial(make_train_step, ranks=ranks)
        self.evaluate = partial(make_eval_step, ranks=ranks)
        self.predict = partial(make_predict_step, ranks=ranks)

    def create_state(self, variables: Variables, start: Start) -> TrainState:
        """Returns the state before the first update, which accumulates sums of whole batches."""
        num_sums = 1 if start.accumulation_steps > 1 else 0
        started = started_at_once(start.optimizer)
        return self.put_state(
            create_state(*variables, started, seed=start.seed, accumulating_ranks=num_sums)
        )

    def put_state(self, state: TrainState) -> TrainState:
        """Returns a state of host or device arrays on every device."""
        return _jax.replicate(replace(state, residual=None), self.ranks.mesh)


def make_train_step(training: TrainingStep, ranks: VirtualRanks) -> Callable:
    """Returns the function `(state, sums, batch) -> (state, sums)`; see `train.steps.step`."""
    parts, optimizer, accumulation_steps, on_nan = training

    def measure(
        chunk: Batch, index: jax.Array, model: ModelArrays, counts: Counts
    ) -> tuple[Any, Any]:
        def objective(params: Any) -> tuple[jax.Array, tuple[Any, Any]]:
            measured = measure_chunk(parts, model._replace(params=params), chunk, index)
            numbers = numbers_of_chunk(measured, counts, ranks.count)
            scaled = numbers[0] if model.loss_scale is None else numbers[0] * model.loss_scale
            return scaled, (numbers, measured.model_state)

        grads, (numbers, model_state) = jax.grad(objective, has_aux=True)(
            _jax.make_varying(model.params)
        )
        rows = num_local_rows(chunk) if chunk.mask is None else jnp.sum(chunk.mask)
        averaged, same = _split_state(model_state, rows / counts.rows)
        return (grads, numbers, averaged), same

    update = partial(updated, optimizer)

    def finish(
        state: TrainState, sums: Any, measured: Packed, same: Any, rows: jax.Array
    ) -> tuple[TrainState, Any]:
        grads, (loss, losses, increments), averaged = measured.unpack()
        model_state = _join_state(state.model_state, averaged, same)

        def take() -> tuple[TrainState, Any]:
            arrays = accumulate(state, grads, update, accumulation_steps)
            new_sums = add_sums(sums, loss, losses, increments, jnp.squeeze(rows))
            return state.after_step(*arrays, model_state=model_state), new_sums

        def is_finite() -> jax.Array:
            checked = grads if accumulation_steps == 1 else with_step(state.accumulated, grads)
            return is_finite_step(state, model_state, loss, checked)

        platform = ranks.mesh.devices.flat[0].platform
        return take_or_leave(on_nan, is_finite, (state, sums), take, loss=loss, platform=platform)

    return _TrainStep(
        BatchSum(parts, measure, ranks), _ReplicatedProgram(finish, ranks, donate=donated())
    )


class _TrainStep(NamedTuple):
    """The parts of a training step: the sum over the batch and the program that ends the step."""

    sum_batch: "BatchSum"
    last: "_ReplicatedProgram"

    def __call__(self, state: TrainState, sums: Any, batch: Batch) -> tuple[TrainState, Any]:
        return self.last(state, sums, *self.sum_batch(_model(state), batch))

    def trace(self, state: TrainState, sums: Any, batch: Batch) -> Programs:
        """Returns the traced programs that the step runs, by name."""
        programs, measured = self.sum_batch.trace(_model(state), batch)
        return Programs(
            programs | {"update": self.last.program.trace(*shapes_of((state, sums, *measured)))}
        )

    def lower(self, state: TrainState, sums: Any, batch: Batch) -> Programs:
        """Returns the same, lowered."""
        return self.trace(state, sums, batch).lower()


def _model(state: TrainState) -> ModelArrays:
    key = (state.key, state.step)
    return ModelArrays(state.params, state.model_state, key, loss_scale=loss_scale(state.opt_state))


def make_eval_step(parts: Parts, ranks: VirtualRanks) -> Callable:
    """Returns the function `(params, model_state, sums, batch) -> sums`."""

    def measure(
        chunk: Batch, index: jax.Array, model: ModelArrays, counts: Counts
    ) -> tuple[Any, Any]:
        measured = measure_chunk(parts, model, chunk, index)
        return numbers_of_chunk(measured, counts, ranks.count), None

    def finish(sums: Any, measured: Packed, same: None, rows: jax.Array) -> Any:
        loss, losses, increments = measured.unpack()
        return add_sums(sums, loss, losses, increments, jnp.squeeze(rows))

    sum_batch = BatchSum(parts, measure, ranks)
    last = _ReplicatedProgram(finish, ranks)
    return lambda params, model_state, sums, batch: last(
        sums, *sum_batch(ModelArrays(params, model_state, None, sums["loss"][1]), batch)
    )


def make_predict_step(apply: Apply, ranks: VirtualRanks) -> Callable:
    """Returns the function `(params, model_state, inputs, first_row) -> outputs`, by row."""

    def work(chunk: Any, index: Any, params: Any, model_state: Any, first_row: Any) -> Any:
        key = data_key(first_row + index * jax.tree.leaves(chunk)[0].shape[0])
        return _jax.make_varying(
            apply(params, model_state, chunk, key=key, train=False, mask=None).outputs
        )

    specs = (BY_RANK, *(REPLICATED,) * 4)
    program = device_program(work, ranks.mesh, in_specs=specs, out_specs=BY_RANK)
    return lambda params, model_state, inputs, first_row: ranks.map(
        program, inputs, params, model_state, int(first_row)
    )


class _ReplicatedProgram:
    """A function of replicated arrays as a program that every device runs for itself."""

    def __init__(
        self, function: Callable, ranks: VirtualRanks, *, donate: tuple[int, ...] = ()
    ) -> None:
        self.program = device_program(
            function, ranks.mesh, in_specs=REPLICATED, out_specs=REPLICATED, donate=donate
        )
        self._mesh = ranks.mesh

    def __call__(self, *args: Any) -> Any:
        return join([self.program(*own) for own in split(args, self._mesh)], self._mesh, REPLICATED)


def _split_state(
    model_state: Any, share: jax.Array | float
) -> tuple[dict[int, jax.Array], dict[int, Any]]:
    """Returns, by position, the leaves to be summed, of this chunk, and those of all chunks."""
    averaged, same = {}, {}
    for index, (path, leaf) in enumerate(jax.tree_util.tree_leaves_with_path(model_state)):
        if _jax.is_varying(leaf):
            check_can_be_averaged(path, leaf)
            averaged[index] = leaf * jnp.asarray(share, leaf.dtype)
        else:
            same[index] = leaf
    return averaged, same


def _join_state(like: Any, averaged: dict[int, Any], same: dict[int, Any]) -> Any:
    """Returns model state of the structure of `like` from the leaves of `_split_state`."""
    leaves = {**averaged, **same}
    return jax.tree.unflatten(jax.tree.structure(like), [leaves[index] for index in sorted(leaves)])
