"""Pipelines: the stages of a model on different devices, which work on micro-batches in turn.

Both schedules run inside `shard_map` over the mesh axis `stage`, whose devices hold consecutive
parts of a stack of layers. A stage maps a pytree of arrays to one of the same shapes
and dtypes. One program serves all stages: in every tick each stage sends what it computed to its
neighbor.

GPipe (Huang et al. 2019, arXiv:1811.06965) runs all micro-batches forward, then all backward, and
is differentiated as it stands. 1F1B (Narayanan et al. 2021, arXiv:2104.04473, section 2.2) turns to
the backward pass of a micro-batch as soon as the last stage has seen it, so that a stage keeps the
inputs of at most `num_stages` micro-batches; gradients are computed by hand.

    outputs = gpipe(stage, layers, micro_batches)
    loss, numbers, grads = one_forward_one_backward(ends, stage, shared, layers, micro_batches)
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from tnt_jax import _jax

STAGE_AXIS = _jax.STAGE_AXIS

Stage = Callable[[Any, Any, jax.Array], Any]


def gpipe(stage: Stage, layers: Any, micro_batches: Any) -> Any:
    """Returns the outputs of all stages in turn for each micro-batch, equal on every stage.

    Stage s works on micro-batch t - s in tick t. While it has none it computes with the one that
    stands there, and nothing depends on the result. Gradients flow back through the same ticks. A
    `stage` maps this device's layers, activations and the number of a micro-batch to activations.
    """
    num_micro_batches = _num_micro_batches(micro_batches)
    num_stages, index = jax.lax.axis_size(STAGE_AXIS), jax.lax.axis_index(STAGE_AXIS)

    def tick(received: Any, t: jax.Array) -> tuple[Any, Any]:
        fed = take(micro_batches, jnp.minimum(t, num_micro_batches - 1))
        m = jnp.clip(t - index, 0, num_micro_batches - 1)
        outputs = stage(layers, _select(index == 0, fed, received), m)
        return _send(outputs, by=1), outputs

    # Zeros may have no finite result in a layer that divides by a norm; a real input has one.
    start = _jax.vary(take(micro_batches, 0), axes_of((layers, micro_batches)))
    _, outputs = jax.lax.scan(tick, start, jnp.arange(num_micro_batches + num_stages - 1))
    leaving = jax.tree.map(lambda x: x[num_stages - 1 :], outputs)
    zeros = jax.tree.map(jnp.zeros_like, leaving)
    return jax.lax.psum(_select(index == num_stages - 1, leaving, zeros), STAGE_AXIS)


class Ends(NamedTuple):
    """Functions before and after the stack of layers.

    Attributes:
        enter: Function `(shared, micro_batch) -> x`, which the first stage runs.
        leave: Function `(shared, x, micro_batch) -> (loss, numbers)`, which the last stage runs;
            the loss is a scalar, numbers are a pytree of arrays. Both are summed over the
            micro-batches.
    """

    enter: Callable[[Any, Any], Any]
    leave: Callable[[Any, Any, Any], tuple[jax.Array, Any]]


class _Run(NamedTuple):
    """State of a stage between slots: what its neighbours sent, and sums so far."""

    x: Any
    grad_x: Any
    kept: Any  # Inputs of micro-batches whose backward pass is still to come, `[stages, ...]`.
    loss: jax.Array  # On the last stage alone, as the numbers.
    numbers: Any
    grads: tuple[Any, Any]


def one_forward_one_backward(
    ends: Ends, stage: Stage, shared: Any, layers: Any, micro_batches: Any
) -> tuple[jax.Array, Any, tuple[Any, Any]]:
    """Returns loss, numbers and gradients of all micro-batches, a stage at a time.

    Stage s of S runs micro-batch m forward in slot 2m + s and backward in slot 2m + 2S - 1 - s: its
    neighbors need each result in the slot after, and it keeps at most S - s inputs in between. The
    backward pass computes the stage again from its input. The last stage runs forward and backward
    at once. The gradients are those of (`shared`, `layers`). All but those of this device's layers
    are equal on every stage; on other mesh axes nothing is summed.
    """
    num_micro_batches = _num_micro_batches(micro_batches)
    num_stages, index = jax.lax.axis_size(STAGE_AXIS), jax.lax.axis_index(STAGE_AXIS)
    axes = axes_of((shared, layers, micro_batches))
    shared, layers, micro_batches = _jax.vary((shared, layers, micro_batches), axes)
    is_first, is_last = index == 0, index == num_stages - 1

    def forward(run: _Run, m: jax.Array) -> tuple[_Run, Any, Any]:
        x = jax.lax.cond(
            is_first,
            lambda: _jax.vary(ends.enter(shared, take(micro_batches, m)), axes),
            lambda: run.x,
        )
        # The last stage computes its layers in the backward slot, together with their gradients.
        outputs = jax.lax.cond(is_last, lambda: x, lambda: _jax.vary(stage(layers, x, m), axes))
        return run._replace(kept=_put(run.kept, x, m % num_stages)), outputs, run.grad_x

    def backward(run: _Run, m: jax.Array) -> tuple[_Run, Any, Any]:
        x, micro_batch = take(run.kept, m % num_stages), take(micro_batches, m)

        def loss_of(shared: Any, layers: Any, x: Any) -> tuple[jax.Array, Any]:
            return _jax.vary(ends.leave(shared, stage(layers, x, m), micro_batch), axes)

        def from_loss() -> Any:
            loss, pull, numbers = jax.vjp(loss_of, shared, layers, x, has_aux=True)
            return loss, numbers, pull(_jax.vary(jnp.ones_like(loss), axes))

        def from_next() -> Any:
            _, pull = jax.vjp(lambda layers, x: _jax.vary(stage(layers, x, m), axes), layers, x)
            return run.loss * 0, _jax.vary(_zeros(run.numbers), axes), (no_grads, *pull(run.grad_x))

        def of_entry() -> Any:
            _, pull = jax.vjp(
                lambda shared: _jax.vary(ends.enter(shared, micro_batch), axes), shared
            )
            return pull(grad_x)[0]

        no_grads = _jax.vary(_zeros(shared), axes)
        loss, numbers, (grads_shared, grads_layers, grad_x) = jax.lax.cond(
            is_last, from_loss, from_next
        )
        entry_grads = jax.lax.cond(is_first, of_entry, lambda: no_grads)
        run = run._replace(
            loss=run.loss + loss,
            numbers=_add(run.numbers, numbers),
            grads=_add(run.grads, (_add(grads_shared, entry_grads), grads_layers)),
        )
        return run, run.x, grad_x

    def slot(run: _Run, t: jax.Array) -> tuple[_Run, None]:
        at = jnp.stack([t - index, t - (2 * num_stages - 1 - index)])
        runs = (at % 2 == 0) & (at >= 0) & (at < 2 * num_micro_batches)
        m = jnp.clip(at // 2, 0, num_micro_batches - 1)
        run, x, grad_x = jax.lax.switch(
            runs[0] + 2 * runs[1].astype(jnp.int32),
            [
                lambda run: (run, run.x, run.grad_x),
                lambda run: forward(run, m[0]),
                lambda run: backward(run, m[1]),
            ],
            run,
        )
        received = _send(x, by=1), _send(grad_x, by=-1)
        return run._replace(x=received[0], grad_x=received[1]), None

    def through(shared: Any, micro_batch: Any) -> tuple[Any, jax.Array, Any]:
        x = ends.enter(shared, micro_batch)
        return x, *ends.leave(shared, x, micro_batch)

    micro_batch = jax.tree.map(lambda x: x[0], micro_batches)
    x, loss, numbers = jax.eval_shape(through, shared, micro_batch)
    kept = jax.tree.map(lambda x: jax.ShapeDtypeStruct((num_stages, *x.shape), x.dtype), x)
    start = _Run(*_jax.vary(_zeros((x, x, kept, loss, numbers, (shared, layers))), axes))
    num_slots = 2 * (num_micro_batches + num_stages - 1)
    end, _ = jax.lax.scan(slot, start, jnp.arange(num_slots))
    loss, numbers, grads_shared = jax.lax.psum((end.loss, end.numbers, end.grads[0]), STAGE_AXIS)
    return loss, numbers, (grads_shared, end.grads[1])


def _num_micro_batches(micro_batches: Any) -> int:
    counts = {x.shape[0] for x in jax.tree.leaves(micro_batches)}
    if len(counts) != 1:
        raise ValueError(
            "The arrays of micro_batches must have one leading dimension, the number of "
            f"micro-batches, but have {sorted(counts)}."
        )
    return counts.pop()


def axes_of(tree: Any) -> list[str]:
    """Returns the mesh axes over which any array of `tree` varies, and `stage`."""
    found = {STAGE_AXIS}
    for x in jax.tree.leaves(tree):
        found |= _jax.varying_axes(x)
    return sorted(found)


def own_part(stack: jax.Array) -> jax.Array:
    """Returns this stage's part of a stack that all stages hold."""
    length = stack.shape[0] // jax.lax.axis_size(STAGE_AXIS)
    first = jax.lax.axis_index(STAGE_AXIS) * length
    return jax.lax.dynamic_slice_in_dim(_jax.vary(stack, axes_of(stack)), first, length)


def _send(tree: Any, *, by: int) -> Any:
    size = jax.lax.axis_size(STAGE_AXIS)
    pairs = [(i, i + by) for i in range(size) if 0 <= i + by < size]
    return jax.tree.map(lambda x: jax.lax.ppermute(x, STAGE_AXIS, pairs), tree)


def _select(condition: jax.Array, yes: Any, no: Any) -> Any:
    return jax.tree.map(lambda a, b: jnp.where(condition, a, b), yes, no)


def take(tree: Any, index: jax.Array | int) -> Any:
    """Returns the item with an index, such as a micro-batch, of stacked arrays."""
    return jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, index, 0, keepdims=False), tree)


def _put(tree: Any, values: Any, index: jax.Array) -> Any:
    return jax.tree.map(
        lambda x, value: jax.lax.dynamic_update_index_in_dim(x, value, index, 0), tree, values
    )


def _zeros(tree: Any) -> Any:
    return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), tree)


def _add(a: Any, b: Any) -> Any:
    return jax.tree.map(jnp.add, a, b)
