"""A worker: computes gradients with variables that it is given, on its own devices.

It runs in a Ray actor, but knows nothing of Ray. A batch may be computed in several shares, each by
one worker. The share's gradients are those of the global batch's loss, because the divisors of the
loss are known for the whole batch.
"""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import ml_dtypes
import numpy as np
from jax.sharding import Mesh

from tnt_jax import _jax
from tnt_jax.adapters import wrap
from tnt_jax.distributed.sums.random_rows import batch_key
from tnt_jax.distributed.sums.reduction import (
    Reduction,
    StateAverage,
    choose_reduction,
    sum_gradients,
)
from tnt_jax.parameter_server.server import Arrays, Layout, Push, to_wire
from tnt_jax.settings import read_settings
from tnt_jax.train.contracts import Apply, Batch, LossTerm, Measured, Parts
from tnt_jax.train.state import TrainState, descriptions
from tnt_jax.train.steps.epoch_sums import num_real_rows, quotient, zero_sums
from tnt_jax.train.steps.step import (
    BY_ROW,
    REPLICATED,
    compiled,
    differentiate,
    make_eval_step,
    make_predict_step,
    share_of_rows,
)


class Share(NamedTuple):
    """A worker's part of a global batch: the ranks before it, 1 / shares, and loss divisors."""

    first_rank: Any
    part: Any
    counts: tuple[Any, ...]


class Report(NamedTuple):
    """Numbers that a worker sends for the rows of a batch or share: loss, metrics, real rows."""

    loss: Any
    losses: Any
    increments: Any
    rows: Any


@dataclass(frozen=True, eq=False)
class PartsOfShare:
    """The parts of a step on a share of a batch."""

    parts: Parts
    share: Share
    rows_at_once = None

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


def make_gradient_step(parts: Parts, mesh: Mesh, reduction: Reduction) -> Callable:
    """Returns a jitted `(state, batch, share) -> (grads, model_state, report)`; None for all."""

    def step(state: TrainState, batch: Batch, share: Share | None) -> tuple[Any, Any, Report]:
        here = parts if share is None else PartsOfShare(parts, share)
        first_rank = 0 if share is None else share.first_rank
        local = differentiate(here, state, batch, mesh, first_rank=first_rank)
        rows = num_real_rows(batch)
        # A share may hold no real row; what it makes of the model state then counts nothing.
        share_of_rank = share_of_rows(batch, jax.numpy.maximum(rows, 1))
        average = StateAverage(local.model_state, share_of_rank)
        summed = sum_gradients(
            local.grads, reduction, order=local.order, first=local.numbers, others=average.summands
        )
        loss, losses, increments = summed.first
        report = Report(loss, losses, increments, rows)
        return summed.grads, average.result(summed.others), report

    specs = (REPLICATED, BY_ROW, REPLICATED)
    return compiled(_jax.shard_map(step, mesh=mesh, in_specs=specs, out_specs=REPLICATED), mesh)


def make_counts(parts: Parts, mesh: Mesh) -> Callable[[Any, Any, Batch], list[Any]]:
    """Returns the function `(params, model_state, batch)` of the divisors of a batch's loss."""

    def counts(params: Any, model_state: Any, batch: Batch) -> list[Any]:
        measured = parts.measure(params, model_state, batch, key=None, train=False)
        found = [1.0 if term.count is None else term.count for term in measured.terms]
        return [jax.lax.psum(jax.numpy.float32(count), _jax.DATA_AXIS) for count in found]

    specs = (REPLICATED, REPLICATED, BY_ROW)
    mapped = _jax.shard_map(counts, mesh=mesh, in_specs=specs, out_specs=REPLICATED)
    return compiled(mapped, mesh)


def exchanges_rows(apply: Apply, mesh: Mesh, state: TrainState, inputs: Any) -> bool:
    """Returns whether a model communicates over the data axis in training."""

    def outputs(params: Any, model_state: Any, inputs: Any) -> Any:
        key = batch_key(state.key, 0, len(jax.tree.leaves(inputs)[0]))
        applied = apply(params, model_state, inputs, key=key, train=True, mask=None)
        return _jax.make_varying(applied.outputs)

    specs = (REPLICATED, REPLICATED, BY_ROW)
    mapped = _jax.shard_map(outputs, mesh=mesh, in_specs=specs, out_specs=BY_ROW)
    return _jax.communicates(jax.jit(mapped).trace(state.params, state.model_state, inputs))


def counts_need_params(counts: Callable, params: Any, model_state: Any, batch: Batch) -> bool:
    """Returns whether the divisors of the loss depend on parameters or model state."""
    traced = counts.trace(params, model_state, batch)  # pyright: ignore
    program = _jax.without_dead_code(traced.jaxpr.jaxpr)
    num_variables = len(jax.tree.leaves((params, model_state)))
    return bool(set(program.invars) & set(traced.jaxpr.jaxpr.invars[:num_variables]))


@dataclass(frozen=True)
class WorkerModel:
    """Description from which a worker builds the model of its coordinator."""

    module: Any
    options: dict[str, Any]
    sample: Any
    functions: Any
    layout: Layout
    key: np.ndarray
    compresses: bool


class Order(NamedTuple):
    """Which gradients a worker is asked for; `share` is None for a whole batch."""

    step: int
    share: Share | None
    was_applied: bool
    num_rows: int


class ErrorFeedback:
    """Rounds gradients to bfloat16, and keeps what rounding left out of those that were applied.

    A worker adds what it has not sent yet to its next gradient (Karimireddy et al. 2019,
    arXiv:1901.09847).
    """

    def __init__(self) -> None:
        self._kept: list[np.ndarray] | None = None
        self._tried: list[np.ndarray] | None = None

    def settle(self, *, was_applied: bool) -> None:
        """Notes what became of the gradients that were rounded last."""
        if self._tried is not None and was_applied:
            self._kept = self._tried
        self._tried = None

    def rounded(self, grads: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Returns what to send for gradients: float32 arrays in bfloat16, others as they are."""
        kept = [np.zeros_like(x) for x in grads] if self._kept is None else self._kept
        wanted = [grad + rest for grad, rest in zip(grads, kept, strict=True)]
        sent = [x.astype(ml_dtypes.bfloat16) if x.dtype == np.float32 else x for x in wanted]
        self._tried = [x - part.astype(x.dtype) for x, part in zip(wanted, sent, strict=True)]
        return sent


class Worker:
    """Computes gradients, evaluates and predicts batches on the devices of its process."""

    def __init__(self) -> None:
        self._mesh = _jax.make_data_mesh(jax.local_devices())
        # What environment variables of a launcher say belongs to another job.
        settings = read_settings({})
        platform = self._mesh.devices.flat[0].platform
        self._reduction = choose_reduction(platform, self._mesh.size, settings=settings)
        self._feedback = ErrorFeedback()
        self._steps: dict[int, Callable] = {}
        self._zeros: dict[Any, Any] = {}
        self._extra_s = 0.0

    def num_devices(self) -> int:
        """Returns the number of devices."""
        return self._mesh.size

    def load(self, model: WorkerModel) -> None:
        """Builds the model; its variables come with each order."""
        adapter = wrap(model.module, variables=None, **model.options)
        self._model, self._layout = model, model.layout
        if adapter.holds_variables:
            # Keras may name the variables of a model that was pickled otherwise: the same arrays,
            # in the same order, with other paths.
            own = adapter.init(model.sample, seed=0)
            self._layout = replace(
                model.layout,
                params=jax.tree.structure(own.params),
                model_state=jax.tree.structure(own.model_state),
            )
        else:
            adapter.attach(model.sample)
        if model.functions is not None:
            self._parts: Parts = model.functions.step_parts(adapter.apply)
            self._gradients = make_gradient_step(self._parts, self._mesh, self._reduction)
            self._evaluate = make_eval_step(self._parts, self._mesh)
        self._predict = make_predict_step(adapter.apply, self._mesh)
        self._zeros = {}
        self._feedback = ErrorFeedback()

    def wait_for(self, seconds: float) -> None:
        """Makes each gradient take so many seconds longer, to stand for another device."""
        self._extra_s = seconds

    def compute(self, order: Order, batch: Batch, *pulled: Arrays) -> tuple[Any, ...]:
        """Returns a report, and for each server what changes its variables."""
        self._feedback.settle(was_applied=order.was_applied)
        params, model_state = self._layout.variables(pulled)
        state = self._state(params, model_state, order.step)
        computed = self._gradients(state, batch, order.share)
        grads, after, report = jax.tree.map(np.asarray, computed)
        grads = jax.tree.leaves(grads)
        if self._model.compresses:
            grads = self._feedback.rounded(grads)
        share = float(report.rows) / order.num_rows
        pushes = self._pushes(grads, jax.tree.leaves(after), jax.tree.leaves(model_state), share)
        if self._extra_s:
            threading.Event().wait(self._extra_s)
        return (report, *pushes)

    def evaluate(self, batches: Sequence[Batch], first_row: int, *pulled: Arrays) -> Any:
        """Returns the sums of loss and metrics over batches that begin at a row of the data."""
        params, model_state = self._layout.variables(pulled)
        zeros = self._zero_sums(params, model_state, batches[0])
        # The step draws random numbers by how many rows there were before.
        before = np.float32(first_row)
        sums = {**zeros, "loss": (zeros["loss"][0], before)}
        for batch in batches:
            sums = self._evaluate(params, model_state, sums, batch)
        loss, num_rows = sums["loss"]
        return jax.tree.map(np.asarray, {**sums, "loss": (loss, num_rows - before)})

    def predict(self, inputs: Any, first_row: int, *pulled: Arrays) -> Any:
        """Returns the model's outputs `[rows, ...]` for inputs that begin at a row of the data."""
        params, model_state = self._layout.variables(pulled)
        outputs = self._predict(params, model_state, inputs, np.uint32(first_row))
        return jax.tree.map(np.asarray, outputs)

    def run(
        self, number: int, step: Callable, arguments: tuple[Any, ...], *pulled: Arrays
    ) -> tuple[Any, ...]:
        """Runs a user's step; returns its value, if it changes variables, and the pushes."""
        params, model_state = self._layout.variables(pulled)
        compiled = self._steps.setdefault(number, jax.jit(step))
        result = compiled(params, *arguments)
        if not isinstance(result, tuple) or len(result) != 2:
            raise TypeError(
                "A scheduled step returns a pair (grads, value), with grads=None to change "
                f"nothing, but returned a {type(result).__name__}."
            )
        grads, value = jax.tree.map(np.asarray, result)
        if grads is None:
            return ((value, False), *(None for _ in pulled))
        expected = jax.tree.map(lambda x: (x.shape, x.dtype), params)
        if jax.tree.map(lambda x: (x.shape, x.dtype), grads) != expected:
            raise TypeError(
                "A scheduled step returns gradients of the structure, shapes and dtypes of the "
                "parameters, such as jax.grad(loss)(params), but returned others."
            )
        state = jax.tree.leaves(model_state)
        return ((value, True), *self._pushes(jax.tree.leaves(grads), state, state, 1.0))

    def _zero_sums(self, params: Any, model_state: Any, batch: Batch) -> Any:
        """Returns the sums of no batch, for batches like `batch`."""
        shapes = descriptions(batch)
        leaves, structure = jax.tree.flatten(shapes)
        kind = (structure, *leaves)
        if kind not in self._zeros:
            state = self._state(params, model_state, 0)
            self._zeros[kind] = zero_sums(self._parts, state, shapes, self._mesh)
        return self._zeros[kind]

    def _state(self, params: Any, model_state: Any, step: int) -> TrainState:
        """Returns what a worker knows of the training state, without the optimizer's."""
        number: Any = np.int32(step)
        key: Any = self._model.key
        return TrainState(number, params, model_state, (), key)

    def _pushes(self, grads: Arrays, after: Arrays, before: Arrays, share: float) -> list[Push]:
        layout, plan = self._layout, self._layout.optimizer.plan
        first = layout.num_params

        def push(server: int) -> Push:
            held = plan.held(server)
            rows = [plan.part(server, index, grads[index]) for index in held if index < first]
            others = [index - first for index in held if index >= first]
            pulled_state = [np.asarray(before[index]) for index in others]
            return Push(to_wire(rows), [after[index] for index in others], pulled_state, share)

        return [push(server) for server in range(plan.num_servers)]
