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
from tnt_jax.adapters.base import Applied
from tnt_jax.collectives import average_model_state, sum_in_buckets
from tnt_jax.random_rows import batch_key
from tnt_jax.state import TrainState

_REPLICATED = PartitionSpec()
_BY_ROW = PartitionSpec(_jax.DATA_AXIS)


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


@dataclass(frozen=True)
class StepParts:
    """The pure functions that a step is made of.

    Attributes:
        apply: Forward pass over a rank's rows.
        loss_terms: From outputs and batch to the summands of the loss.
        increments: From outputs and batch to a pytree of sums, one entry for each metric; padded rows count nowhere.
    """

    apply: Apply
    loss_terms: Callable[[Any, Batch], list[LossTerm]]
    increments: Callable[[Any, Batch], Any]


def make_train_step(parts: StepParts, optimizer: optax.GradientTransformation, mesh: Mesh, *, threshold: int) -> Callable:
    """Returns the jitted function `(state, sums, batch) -> (state, sums)`.

    `state` is donated; `sums` is not, so that a reader may look at the sums of any step later.

    Args:
        parts: What the step computes.
        optimizer: Optax transformation, given gradients of the loss of the whole global batch.
        mesh: Ranks, over the axis `data`.
        threshold: Bytes from which a gradient bucket is full.
    """
    on_gpu = mesh.devices.flat[0].platform != "cpu"

    def step(state: TrainState, sums: Any, batch: Batch) -> tuple[TrainState, Any]:
        key = batch_key(state.key, state.step, num_local_rows(batch))

        def objective(params: Any) -> tuple[jax.Array, tuple[Applied, list[LossTerm]]]:
            applied = parts.apply(params, state.model_state, batch.inputs, key=key, train=True, mask=batch.mask)
            terms = parts.loss_terms(applied.outputs, batch)
            local = sum((divide(term) for term in terms), start=applied.penalty / mesh.size)
            return _jax.make_varying(jnp.asarray(local, jnp.float32)), (applied, terms)

        gradient = jax.value_and_grad(objective, has_aux=True)
        (local_loss, (applied, terms)), grads = gradient(_jax.make_varying(state.params))
        # The loss and the metrics travel in the first bucket: they are ready before any gradient.
        measured = _jax.make_varying((local_loss, [divide(term) for term in terms], parts.increments(applied.outputs, batch)))
        grads, (loss, losses, increments) = sum_in_buckets((grads, measured), threshold=threshold, in_order=on_gpu)
        updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
        new_state = TrainState(
            step=state.step + 1,
            params=optax.apply_updates(state.params, updates),
            model_state=average_model_state(applied.model_state, _share(batch)),
            opt_state=opt_state,
            key=state.key,
        )
        return new_state, add_sums(sums, loss, losses, increments, batch)

    specs = (_REPLICATED, _REPLICATED, _BY_ROW)
    mapped = _jax.shard_map(step, mesh=mesh, in_specs=specs, out_specs=(_REPLICATED, _REPLICATED))
    return jax.jit(mapped, donate_argnums=0)


def make_eval_step(parts: StepParts, mesh: Mesh) -> Callable:
    """Returns the jitted function `(params, model_state, sums, batch) -> sums`."""

    def step(params: Any, model_state: Any, sums: Any, batch: Batch) -> Any:
        applied = parts.apply(params, model_state, batch.inputs, key=None, train=False, mask=batch.mask)
        losses = [divide(term) for term in parts.loss_terms(applied.outputs, batch)]
        local_loss = sum(losses, start=applied.penalty / mesh.size)
        measured = _jax.make_varying((local_loss, losses, parts.increments(applied.outputs, batch)))
        loss, losses, increments = jax.lax.psum(measured, _jax.DATA_AXIS)
        return add_sums(sums, loss, losses, increments, batch)

    specs = (_REPLICATED, _REPLICATED, _REPLICATED, _BY_ROW)
    return jax.jit(_jax.shard_map(step, mesh=mesh, in_specs=specs, out_specs=_REPLICATED))


def make_predict_step(apply: Apply, mesh: Mesh) -> Callable:
    """Returns the jitted function `(params, model_state, inputs) -> outputs`, with outputs `[rows, ...]` sharded by row."""

    def step(params: Any, model_state: Any, inputs: Any) -> Any:
        return _jax.make_varying(apply(params, model_state, inputs, key=None, train=False, mask=None).outputs)

    return jax.jit(_jax.shard_map(step, mesh=mesh, in_specs=(_REPLICATED, _REPLICATED, _BY_ROW), out_specs=_BY_ROW))


def zero_sums(parts: StepParts, state: TrainState, batch: Batch, mesh: Mesh) -> Any:
    """Returns the sums before the first step of an epoch, for batches like `batch`, as host arrays."""

    def measure(params: Any, model_state: Any, batch: Batch) -> Any:
        outputs = parts.apply(params, model_state, batch.inputs, key=None, train=False, mask=batch.mask).outputs
        losses = [divide(term) for term in parts.loss_terms(outputs, batch)]
        measured = _jax.make_varying((losses, parts.increments(outputs, batch)))
        return jax.lax.psum(measured, _jax.DATA_AXIS)

    mapped = _jax.shard_map(measure, mesh=mesh, in_specs=(_REPLICATED, _REPLICATED, _BY_ROW), out_specs=_REPLICATED)
    losses, increments = jax.eval_shape(mapped, state.params, state.model_state, batch)
    zero = jnp.zeros((), jnp.float32)
    increments = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), increments)
    return {"loss": (zero, zero), "losses": [(zero, zero) for _ in losses], "metrics": increments}


def add_sums(sums: Any, loss: jax.Array, losses: list[jax.Array], increments: Any, batch: Batch) -> Any:
    """Returns the sums after a batch, inside `shard_map`: each batch's loss counts by its real rows, as Keras 3 reports it."""
    rows = num_real_rows(batch)

    def add(pair: tuple[jax.Array, jax.Array], value: jax.Array) -> tuple[jax.Array, jax.Array]:
        return pair[0] + value.astype(jnp.float32) * rows, pair[1] + rows

    return {
        "loss": add(sums["loss"], loss),
        "losses": [add(pair, value) for pair, value in zip(sums["losses"], losses, strict=True)],
        "metrics": jax.tree.map(jnp.add, sums["metrics"], increments),
    }


def divide(term: LossTerm) -> jax.Array:
    """Returns this rank's part of a loss term: the local total over the global count, 0 where that is 0, inside `shard_map`."""
    if term.count is None:
        return term.total * term.scale
    # psum of a Python number is a multiplication, so a count that is known costs no communication.
    count = jax.lax.psum(term.count, _jax.DATA_AXIS)
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
