"""One training, evaluation or prediction step: a jitted `shard_map` over the axis `data`.

A step is built once from pure functions (`StepParts`) and compiled once for each shape of a batch.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple, Protocol
from weakref import WeakSet

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, PartitionSpec

from tnt_jax import _jax
from tnt_jax.accumulation import accumulate
from tnt_jax.adapters.base import Applied
from tnt_jax.all_reduce import psum
from tnt_jax.backward_order import in_front, trace_grads
from tnt_jax.collectives import average_model_state, parts_of_averages, with_averages
from tnt_jax.kept_inputs import keep_inputs
from tnt_jax.log import logger
from tnt_jax.random_rows import batch_key
from tnt_jax.reduction import Reduction, sum_compressed, sum_over_ranks
from tnt_jax.sharded_update import scatter, shard_spec, update_shards
from tnt_jax.state import TrainState

# Fewer rows make poor statistics (Wu and He 2018, arXiv:1803.08494, figure 1).
_FEW_ROWS = 16
# Parts of steps that have been traced.
_TRACED: "WeakSet[Parts]" = WeakSet()
_REPLICATED: Any = PartitionSpec()
_BY_ROW: Any = PartitionSpec(_jax.DATA_AXIS)
_STACKED = PartitionSpec(None, _jax.DATA_AXIS)
# All is replicated but what each rank keeps of its own gradients.
_STATE = TrainState(*[_REPLICATED] * 5, accumulated=_BY_ROW, residual=_BY_ROW)


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
    parts: Parts,
    optimizer: optax.GradientTransformation,
    mesh: Mesh,
    *,
    reduction: Reduction,
    accumulation_steps: int = 1,
) -> Callable:
    """Returns the jitted function `(state, sums, batch) -> (state, sums)`.

    `state` is donated; `sums` is not, so that a reader may look at the sums of any step later.

    Args:
        parts: What the step computes.
        optimizer: Optax transformation, given gradients of the loss of the whole global batch.
        mesh: Ranks, over the axis `data`.
        reduction: How gradients are summed over the ranks.
        accumulation_steps: Steps whose mean gradient makes one update. Each rank sums its own gradients; ranks exchange them only
            in the step that updates.
    """
    if reduction.shard_optimizer_state:
        return _compiled(_sharded_step(parts, optimizer, mesh, reduction, accumulation_steps), mesh, donate_argnums=0)
    step = _train_step(parts, optimizer, mesh, reduction, accumulation_steps)
    mapped = _jax.shard_map(step, mesh=mesh, in_specs=(_STATE, _REPLICATED, _BY_ROW), out_specs=(_STATE, _REPLICATED))
    return _compiled(mapped, mesh, donate_argnums=0)


def make_train_steps(
    parts: Parts,
    optimizer: optax.GradientTransformation,
    mesh: Mesh,
    *,
    reduction: Reduction,
    accumulation_steps: int = 1,
) -> Callable:
    """Returns the jitted function `(state, sums, batches) -> (state, sums)`: one program for several steps.

    Its batches are stacked: arrays `[steps, rows, ...]`. The arguments are those of `make_train_step`.
    """
    make = _sharded_step if reduction.shard_optimizer_state else _train_step
    step = make(parts, optimizer, mesh, reduction, accumulation_steps)

    def steps(state: TrainState, sums: Any, batches: Batch) -> tuple[TrainState, Any]:
        return jax.lax.scan(lambda carry, batch: (step(*carry, batch), None), (state, sums), batches)[0]

    if reduction.shard_optimizer_state:
        return _compiled(steps, mesh, donate_argnums=0)
    mapped = _jax.shard_map(steps, mesh=mesh, in_specs=(_STATE, _REPLICATED, _STACKED), out_specs=(_STATE, _REPLICATED))
    return _compiled(mapped, mesh, donate_argnums=0)


def _compiled(function: Callable, mesh: Mesh, *, donate_argnums: int | tuple[int, ...] = ()) -> Callable:
    return jax.jit(function, donate_argnums=donate_argnums, compiler_options=_jax.convolution_options(mesh))


class _Local(NamedTuple):
    """What one rank computes of a step before it hears of the others.

    Attributes:
        numbers: Loss, loss of each term, and increments of the metrics.
        model_state: Model state after the pass.
        grads: This rank's part of the gradients.
        order: Indices of the leaves of `grads`, those in front that are ready first.
    """

    numbers: Any
    model_state: Any
    grads: Any
    order: list[int]


def _differentiate(parts: Parts, state: TrainState, batch: Batch, mesh: Mesh) -> _Local:
    """Returns loss, metrics and gradients of this rank's rows, inside `shard_map`."""
    key = batch_key(state.key, state.step, num_local_rows(batch))

    def objective(params: Any) -> tuple[jax.Array, tuple[Any, Any]]:
        measured = parts.measure(params, state.model_state, batch, key=key, train=True)
        losses = [divide(term) for term in measured.terms]
        loss = _jax.make_varying(jnp.asarray(sum(losses, start=measured.penalty / mesh.size), jnp.float32))
        return loss, (_jax.make_varying((loss, losses, measured.increments)), measured.model_state)

    differentiated = jax.value_and_grad(objective, has_aux=True)
    rewrite = partial(keep_inputs, step=state.step) if mesh.devices.flat[0].platform == "cpu" else None
    (_, (numbers, model_state)), grads, order = trace_grads(differentiated, _jax.make_varying(state.params), rewrite=rewrite)
    if parts not in _TRACED:  # Later traces are those of last batches, which may well be small.
        _TRACED.add(parts)
        _warn_of_few_rows(model_state, num_local_rows(batch))
    return _Local(numbers, model_state, grads, order)


def _train_step(
    parts: Parts, optimizer: optax.GradientTransformation, mesh: Mesh, reduction: Reduction, accumulation_steps: int
) -> Callable[[TrainState, Any, Batch], tuple[TrainState, Any]]:
    """Returns one training step on a rank, to be run inside `shard_map`."""

    def update(grads: Any, params: Any, opt_state: Any) -> tuple[Any, Any]:
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    def step(state: TrainState, sums: Any, batch: Batch) -> tuple[TrainState, Any]:
        local, rows = _differentiate(parts, state, batch, mesh), num_real_rows(batch)
        share = _share(batch, rows)
        own_averages = parts_of_averages(local.model_state, share)
        # What XLA may have summed; it comes before the ring on every process.
        by_xla = (rows, [x for x in jax.tree.leaves(local.model_state) if not _jax.is_varying(x)])

        def reduce_and_update(grads: Any, params: Any, carried: Any) -> tuple[Any, Any]:
            opt_state, residual = carried
            if residual is None:
                grads = sum_over_ranks(grads, reduction, order=local.order, after=(numbers, averages, by_xla))
            else:
                own = jax.tree.map(lambda x: x[0], residual)
                grads, own = sum_compressed(grads, own, reduction, order=local.order)
                residual = jax.tree.map(lambda x: x[None], own)
            params, opt_state = update(grads, params, opt_state)
            return params, (opt_state, residual)

        accumulated, carried = None, (state.opt_state, state.residual)
        if accumulation_steps == 1 and state.residual is None:
            # The loss and the metrics travel in the first bucket: they are ready before any gradient.
            ahead = (local.numbers, own_averages if reduction.by_ring else [])
            order = in_front(ahead, local.order)
            (numbers, averages), grads = sum_over_ranks((ahead, local.grads), reduction, order=order, after=by_xla)
            averages = averages if reduction.by_ring else psum(own_averages)
            params, opt_state = update(grads, state.params, state.opt_state)
            carried = (opt_state, None)
        else:
            numbers, averages = psum(local.numbers), psum(own_averages)
            if accumulation_steps == 1:
                params, carried = reduce_and_update(local.grads, state.params, carried)
            else:
                before = replace(state, opt_state=carried)
                params, carried, accumulated = accumulate(
                    before, local.grads, lambda means: means, reduce_and_update, accumulation_steps
                )
        new_state = replace(
            state,
            step=state.step + 1,
            params=params,
            model_state=with_averages(local.model_state, averages, share),
            opt_state=carried[0],
            accumulated=accumulated,
            residual=carried[1],
        )
        loss, losses, increments = numbers
        return new_state, add_sums(sums, loss, losses, increments, rows)

    return step


def _sharded_step(
    parts: Parts, optimizer: optax.GradientTransformation, mesh: Mesh, reduction: Reduction, accumulation_steps: int
) -> Callable[[TrainState, Any, Batch], tuple[TrainState, Any]]:
    """Returns one training step over all ranks whose optimizer state is sharded, to be run outside `shard_map`."""
    if accumulation_steps > 1:
        raise ValueError(
            f"shard_optimizer_state does not go with gradient_accumulation_steps ({accumulation_steps}): each rank would still keep "
            "whole accumulated gradients. Use a larger batch, or leave one of the two out."
        )

    def work(state: TrainState, sums: Any, batch: Batch) -> tuple[Any, Any, Any]:
        local = _differentiate(parts, state, batch, mesh)
        loss, losses, increments = psum(local.numbers)
        rows = num_real_rows(batch)
        model_state = average_model_state(local.model_state, _share(batch, rows))
        grads = scatter(local.grads, reduction, order=local.order)
        return grads, model_state, add_sums(sums, loss, losses, increments, rows)

    def step(state: TrainState, sums: Any, batch: Batch) -> tuple[TrainState, Any]:
        in_parts = jax.tree.map(lambda x: shard_spec(x.shape, mesh.size), state.params)
        mapped = _jax.shard_map(
            work, mesh=mesh, in_specs=(_REPLICATED, _REPLICATED, _BY_ROW), out_specs=(in_parts, _REPLICATED, _REPLICATED)
        )
        grads, model_state, sums = mapped(replace(state, opt_state=None), sums, batch)
        params, opt_state = update_shards(optimizer, grads, state.params, state.opt_state, mesh)
        return replace(state, step=state.step + 1, params=params, model_state=model_state, opt_state=opt_state), sums

    return step


def make_eval_step(parts: Parts, mesh: Mesh) -> Callable:
    """Returns the jitted function `(params, model_state, sums, batch) -> sums`."""

    def step(params: Any, model_state: Any, sums: Any, batch: Batch) -> Any:
        measured = parts.measure(params, model_state, batch, key=None, train=False)
        losses = [divide(term) for term in measured.terms]
        local_loss = sum(losses, start=measured.penalty / mesh.size)
        numbers = _jax.make_varying((local_loss, losses, measured.increments))
        loss, losses, increments = psum(numbers)
        return add_sums(sums, loss, losses, increments, num_real_rows(batch))

    specs = (_REPLICATED, _REPLICATED, _REPLICATED, _BY_ROW)
    return _compiled(_jax.shard_map(step, mesh=mesh, in_specs=specs, out_specs=_REPLICATED), mesh)


def make_predict_step(apply: Apply, mesh: Mesh) -> Callable:
    """Returns the jitted function `(params, model_state, inputs) -> outputs`, with outputs `[rows, ...]` sharded by row."""

    def step(params: Any, model_state: Any, inputs: Any) -> Any:
        return _jax.make_varying(apply(params, model_state, inputs, key=None, train=False, mask=None).outputs)

    return _compiled(_jax.shard_map(step, mesh=mesh, in_specs=(_REPLICATED, _REPLICATED, _BY_ROW), out_specs=_BY_ROW), mesh)


def zero_sums(parts: Parts, state: TrainState, batch: Batch, mesh: Mesh) -> Any:
    """Returns the sums before the first step of an epoch, for batches like `batch`, as host arrays."""

    def measure(params: Any, model_state: Any, batch: Batch) -> Any:
        measured = parts.measure(params, model_state, batch, key=None, train=False)
        numbers = _jax.make_varying(([divide(term) for term in measured.terms], measured.increments))
        return psum(numbers)

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
    return quotient(term, None if term.count is None else psum(term.count))


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
        return psum(float(num_local_rows(batch)))
    return psum(jnp.sum(batch.mask))


def _warn_of_few_rows(model_state: Any, num_rows: int) -> None:
    """Says that statistics of a rank's rows are poor ones, if the model keeps any and the rows are few."""
    if num_rows < _FEW_ROWS and any(_jax.is_varying(x) for x in jax.tree.leaves(model_state)):
        logger.warning(
            "Statistics such as BatchNorm's are those of each rank's %d row(s) of a batch; below %d they are poor. Use a larger "
            "batch or fewer ranks, or let ranks share them: BatchNorm(axis_name='data') in Flax, synchronized=True in Keras.",
            num_rows, _FEW_ROWS,
        )  # fmt: skip


def _share(batch: Batch, rows: jax.Array | float) -> jax.Array | None:
    """Returns this rank's part of the `rows` real rows of the global batch; None where all ranks have as many."""
    return None if batch.mask is None else jnp.sum(batch.mask) / rows
