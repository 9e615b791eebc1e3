"""One training, evaluation or prediction step: a jitted `shard_map` over the axis `data`.

A step is built once from pure functions (`StepParts`) and compiled once for each shape of a batch.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, PartitionSpec

from tnt_jax import _jax
from tnt_jax.accumulation import accumulate
from tnt_jax.adapters.base import Applied
from tnt_jax.collectives import average_model_state, sum_in_buckets
from tnt_jax.random_rows import batch_key
from tnt_jax.state import TrainState

_REPLICATED: Any = PartitionSpec()
_BY_ROW: Any = PartitionSpec(_jax.DATA_AXIS)
_STACKED = PartitionSpec(None, _jax.DATA_AXIS)
_STATE = TrainState(
    step=_REPLICATED, params=_REPLICATED, model_state=_REPLICATED, opt_state=_REPLICATED, key=_REPLICATED, accumulated=_BY_ROW
)


class Batch(NamedTuple):
    """One global batch on the devices, or one rank's part of it inside a step.

    Attributes:
        inputs: Pytree of arrays `[rows, ...]` for the model.
        targets: Pytree of arrays `[rows, ...]`, or None.
        weight: The user's sample weights: pytree of float32 `[rows]` or `[rows, ...]`, or None.
        mask: float32 `[rows]`: 1 for real rows, 0 for padding; None when no row is padding.
    """

    inputs: Any
    targets: Any = None
    weight: Any = None
    mask: Any = None


class LossTerm(NamedTuple):
    """One summand of the loss, as sums over this rank's rows.

    The loss of the global batch is the sum over terms of `scale * psum(total) / psum(count)`.

    Attributes:
        total: Sum of weighted losses, a scalar.
        count: What the total is divided by, a scalar; None leaves it undivided.
        scale: The user's weight of this term.
    """

    total: jax.Array
    count: jax.Array | float | None
    scale: float = 1.0


class Apply(Protocol):
    """Forward pass over a rank's rows; see `tnt_jax.adapters.base.Adapter.apply`."""

    def __call__(
        self, params: Any, model_state: Any, inputs: Any, *, key: jax.Array | None, train: bool, mask: jax.Array | None
    ) -> Applied:
        """Returns outputs, model state and penalty."""
        ...


class Measured(NamedTuple):
    """What a step computes of one rank's rows.

    Attributes:
        terms: Summands of the loss.
        penalty: Losses that the model adds itself; their mean over ranks counts.
        model_state: Model state after the pass.
        increments: Pytree of sums for the metrics.
    """

    terms: list[LossTerm]
    penalty: jax.Array | float
    model_state: Any
    increments: Any


class Parts(Protocol):
    """What a step is made of, besides its optimizer."""

    def measure(self, params: Any, model_state: Any, batch: Batch, *, key: jax.Array | None, train: bool) -> Measured:
        """Returns loss and metrics of one rank's rows; called inside `shard_map`. Outside training `key` is None."""
        ...


@dataclass(frozen=True)
class StepParts:
    """Parts that compare the outputs of a model with targets.

    Attributes:
        apply: Forward pass over a rank's rows.
        loss_terms: From outputs and batch to the summands of the loss.
        increments: From outputs and batch to a pytree of sums, one entry for each metric; padded rows count nowhere.
    """

    apply: Apply
    loss_terms: Callable[[Any, Batch], list[LossTerm]]
    increments: Callable[[Any, Batch], Any]

    def measure(self, params: Any, model_state: Any, batch: Batch, *, key: jax.Array | None, train: bool) -> Measured:
        """Returns loss and metrics of the model's outputs for one rank's rows."""
        applied = self.apply(params, model_state, batch.inputs, key=key, train=train, mask=batch.mask)
        increments = {"outputs": self.increments(applied.outputs, batch), "model": applied.increments}
        return Measured(self.loss_terms(applied.outputs, batch), applied.penalty, applied.model_state, increments)


def make_train_step(
    parts: Parts, optimizer: optax.GradientTransformation, mesh: Mesh, *, threshold: int, accumulation_steps: int = 1
) -> Callable:
    """Returns the jitted function `(state, sums, batch) -> (state, sums)`.

    `state` is donated; `sums` is not, so that a reader may look at the sums of any step later.

    Args:
        parts: What the step computes.
        optimizer: Optax transformation, given gradients of the loss of the whole global batch.
        mesh: Ranks, over the axis `data`.
        threshold: Bytes from which a gradient bucket is full.
        accumulation_steps: Steps whose mean gradient makes one update. Each rank sums its own gradients; ranks exchange them only
            in the step that updates.
    """
    step = _train_step(parts, optimizer, mesh, threshold=threshold, accumulation_steps=accumulation_steps)
    mapped = _jax.shard_map(step, mesh=mesh, in_specs=(_STATE, _REPLICATED, _BY_ROW), out_specs=(_STATE, _REPLICATED))
    return jax.jit(mapped, donate_argnums=0)


def make_train_steps(
    parts: Parts, optimizer: optax.GradientTransformation, mesh: Mesh, *, threshold: int, accumulation_steps: int = 1
) -> Callable:
    """Returns the jitted function `(state, sums, batches) -> (state, sums)`: one program for several steps.

    Its batches are stacked: arrays `[steps, rows, ...]`. The arguments are those of `make_train_step`.
    """
    step = _train_step(parts, optimizer, mesh, threshold=threshold, accumulation_steps=accumulation_steps)

    def steps(state: TrainState, sums: Any, batches: Batch) -> tuple[TrainState, Any]:
        return jax.lax.scan(lambda carry, batch: (step(*carry, batch), None), (state, sums), batches)[0]

    mapped = _jax.shard_map(steps, mesh=mesh, in_specs=(_STATE, _REPLICATED, _STACKED), out_specs=(_STATE, _REPLICATED))
    return jax.jit(mapped, donate_argnums=0)


def _train_step(
    parts: Parts, optimizer: optax.GradientTransformation, mesh: Mesh, *, threshold: int, accumulation_steps: int
) -> Callable[[TrainState, Any, Batch], tuple[TrainState, Any]]:
    """Returns one training step on a rank, to be run inside `shard_map`."""
    on_gpu = mesh.devices.flat[0].platform != "cpu"

    def reduce(tree: Any) -> Any:
        return sum_in_buckets(tree, threshold=threshold, in_order=on_gpu)

    def update(grads: Any, params: Any, opt_state: Any) -> tuple[Any, Any]:
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    def step(state: TrainState, sums: Any, batch: Batch) -> tuple[TrainState, Any]:
        key = batch_key(state.key, state.step, num_local_rows(batch))

        def objective(params: Any) -> tuple[jax.Array, Measured]:
            measured = parts.measure(params, state.model_state, batch, key=key, train=True)
            local = sum((divide(term) for term in measured.terms), start=measured.penalty / mesh.size)
            return _jax.make_varying(jnp.asarray(local, jnp.float32)), measured

        (loss, measured), grads = jax.value_and_grad(objective, has_aux=True)(_jax.make_varying(state.params))
        numbers = _jax.make_varying((loss, [divide(term) for term in measured.terms], measured.increments))
        accumulated = None
        if accumulation_steps == 1:
            # The loss and the metrics travel in the first bucket: they are ready before any gradient.
            grads, numbers = reduce((grads, numbers))
            params, opt_state = update(grads, state.params, state.opt_state)
        else:
            numbers = reduce(numbers)
            params, opt_state, accumulated = accumulate(state, grads, reduce, update, accumulation_steps)
        new_state = TrainState(
            step=state.step + 1,
            params=params,
            model_state=average_model_state(measured.model_state, _share(batch)),
            opt_state=opt_state,
            key=state.key,
            accumulated=accumulated,
        )
        loss, losses, increments = numbers
        return new_state, add_sums(sums, loss, losses, increments, num_real_rows(batch))

    return step


def make_eval_step(parts: Parts, mesh: Mesh) -> Callable:
    """Returns the jitted function `(params, model_state, sums, batch) -> sums`."""

    def step(params: Any, model_state: Any, sums: Any, batch: Batch) -> Any:
        measured = parts.measure(params, model_state, batch, key=None, train=False)
        losses = [divide(term) for term in measured.terms]
        local_loss = sum(losses, start=measured.penalty / mesh.size)
        numbers = _jax.make_varying((local_loss, losses, measured.increments))
        loss, losses, increments = jax.lax.psum(numbers, _jax.DATA_AXIS)
        return add_sums(sums, loss, losses, increments, num_real_rows(batch))

    specs = (_REPLICATED, _REPLICATED, _REPLICATED, _BY_ROW)
    return jax.jit(_jax.shard_map(step, mesh=mesh, in_specs=specs, out_specs=_REPLICATED))


def make_predict_step(apply: Apply, mesh: Mesh) -> Callable:
    """Returns the jitted function `(params, model_state, inputs) -> outputs`, with outputs `[rows, ...]` sharded by row."""

    def step(params: Any, model_state: Any, inputs: Any) -> Any:
        return _jax.make_varying(apply(params, model_state, inputs, key=None, train=False, mask=None).outputs)

    return jax.jit(_jax.shard_map(step, mesh=mesh, in_specs=(_REPLICATED, _REPLICATED, _BY_ROW), out_specs=_BY_ROW))


def zero_sums(parts: Parts, state: TrainState, batch: Batch, mesh: Mesh) -> Any:
    """Returns the sums before the first step of an epoch, for batches like `batch`, as host arrays."""

    def measure(params: Any, model_state: Any, batch: Batch) -> Any:
        measured = parts.measure(params, model_state, batch, key=None, train=False)
        numbers = _jax.make_varying(([divide(term) for term in measured.terms], measured.increments))
        return jax.lax.psum(numbers, _jax.DATA_AXIS)

    mapped = _jax.shard_map(measure, mesh=mesh, in_specs=(_REPLICATED, _REPLICATED, _BY_ROW), out_specs=_REPLICATED)
    losses, increments = jax.eval_shape(mapped, state.params, state.model_state, batch)
    zero = jnp.zeros((), jnp.float32)
    increments = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), increments)
    return {"loss": (zero, zero), "losses": [(zero, zero) for _ in losses], "metrics": increments}


def add_sums(sums: Any, loss: jax.Array, losses: list[jax.Array], increments: Any, rows: jax.Array | float) -> Any:
    """Returns the sums after a global batch of `rows` real rows, by which its loss counts, as Keras 3 reports it."""

    def add(pair: tuple[jax.Array, jax.Array], value: jax.Array) -> tuple[jax.Array, jax.Array]:
        return pair[0] + value.astype(jnp.float32) * rows, pair[1] + rows

    return {
        "loss": add(sums["loss"], loss),
        "losses": [add(pair, value) for pair, value in zip(sums["losses"], losses, strict=True)],
        "metrics": jax.tree.map(jnp.add, sums["metrics"], increments),
    }


def divide(term: LossTerm) -> jax.Array:
    """Returns this rank's part of a loss term: the local total over the global count, 0 where that is 0, inside `shard_map`."""
    # psum of a Python number is a multiplication, so a count that is known costs no communication.
    return quotient(term, None if term.count is None else jax.lax.psum(term.count, _jax.DATA_AXIS))


def quotient(term: LossTerm, count: jax.Array | float | None) -> jax.Array:
    """Returns a part of a loss term, given the count of the whole global batch; 0 where that is 0."""
    if count is None:
        return term.total * term.scale
    is_empty = jnp.equal(count, 0)
    return jnp.where(is_empty, 0.0, term.total * term.scale / jnp.where(is_empty, 1.0, count))


def num_local_rows(batch: Batch) -> int:
    """Returns the rows of a batch, padding included."""
    return jax.tree.leaves(batch.inputs)[0].shape[0]


def num_real_rows(batch: Batch) -> jax.Array | float:
    """Returns the real rows of the global batch, inside `shard_map`."""
    if batch.mask is None:
        return jax.lax.psum(float(num_local_rows(batch)), _jax.DATA_AXIS)
    return jax.lax.psum(jnp.sum(batch.mask), _jax.DATA_AXIS)


def _share(batch: Batch) -> jax.Array | None:
    return None if batch.mask is None else jnp.sum(batch.mask) / num_real_rows(batch)
