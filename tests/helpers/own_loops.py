"""Loops of one's own that tests train: their states, steps and losses."""

from functools import partial

import jax
import optax
from flax.training.train_state import TrainState

import tnt_jax as tnt


class State(TrainState):
    """A state with moving statistics."""

    batch_stats: object


def make_state(net, tx, x, seed=0):
    """Returns a fresh state for a `Net`."""
    # Without `jit`, each operation is a program of its own.
    init = jax.jit(partial(net.init, train=False))
    variables = init(jax.random.key(seed), x[:1])
    return State.create(
        apply_fn=net.apply,
        params=variables["params"],
        tx=tx,
        batch_stats=variables.get("batch_stats", {}),
    )


def make_step(net, losses_of=optax.softmax_cross_entropy_with_integer_labels):
    """Returns a step that trains a `Net` with the random streams of the adapter of `fit`."""

    @tnt.distributed_step
    def train_step(state, batch, key):
        rngs = {"params": jax.random.fold_in(key, 0), "dropout": jax.random.fold_in(key, 1)}

        def loss_fn(params):
            variables = {"params": params, "batch_stats": state.batch_stats}
            logits, new = net.apply(
                variables, batch.inputs, train=True, rngs=rngs, mutable=["batch_stats"]
            )
            losses = losses_of(logits, batch.targets)
            return tnt.compute_average_loss(losses, batch.weight), new.get("batch_stats", {})

        (loss, stats), grads = tnt.value_and_grad(loss_fn, has_aux=True)(state.params)
        return state.apply_gradients(grads=grads, batch_stats=stats), {"loss": loss}

    return train_step


def per_row(params, batch):
    """Returns the losses `[rows]` of a linear model."""
    logits = batch.inputs @ params["kernel"] + params.get("bias", 0)
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch.targets)


def average(params, batch):
    """Returns the loss of the global batch of a linear model."""
    return tnt.compute_average_loss(per_row(params, batch))


def descend(params, grads):
    """Returns parameters after a step of gradient descent."""
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)
