"""Flax's language model (Linen) with a loop of its own on all devices, here on the bytes of English
sentences; the lines marked with `tnt` are those in which it differs from `lm1b_one_device.py`.

    tnt-jax -n 2 -- examples/flax/lm1b_loop.py --data DATA
"""

import argparse

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.training.train_state import TrainState
from lm1b import TransformerConfig, TransformerLM, create_learning_rate_schedule
from real_data import add_arguments, english_sentences

import tnt_jax as tnt  # tnt

BATCH_SIZE = 64
config = TransformerConfig()


def batches(tokens, seed):
    """Yields batches in a new order every epoch, without end."""
    random = np.random.default_rng(seed)
    while True:
        order = random.permutation(len(tokens))
        for start in range(0, len(order) - BATCH_SIZE + 1, BATCH_SIZE):
            yield tokens[order[start : start + BATCH_SIZE]]


@tnt.distributed_step  # tnt
def train_step(state, batch, dropout_rng):  # tnt: a key of this batch alone.
    """Makes an update and returns the state and sums over all tokens before it."""
    tokens = batch.inputs  # tnt
    weights = (tokens > 0).astype(jnp.float32)

    def loss_fn(params):
        rngs = {"dropout": dropout_rng}
        logits = state.apply_fn({"params": params}, tokens, train=True, rngs=rngs)
        losses = weights * optax.softmax_cross_entropy_with_integer_labels(logits, tokens)
        loss = tnt.compute_average_loss(losses) / tnt.compute_average_loss(weights)  # tnt
        return loss, (losses, logits)  # tnt

    (_, (losses, logits)), grads = tnt.value_and_grad(loss_fn, has_aux=True)(state.params)  # tnt
    hits = weights * (logits.argmax(-1) == tokens)
    sums = {"loss": losses.sum(1), "accuracy": hits.sum(1), "denominator": weights.sum(1)}  # tnt
    return state.apply_gradients(grads=grads), tnt.reduce(sums)  # tnt


def create_state(tokens):
    """Returns the untrained parameters with the optimizer."""
    model, schedule = TransformerLM(config), create_learning_rate_schedule(0.0016, 100)
    tx = optax.adamw(schedule, b1=0.9, b2=0.98, eps=1e-9, weight_decay=0.1)
    params = model.init(jax.random.key(0), tokens[:1])["params"]
    return TrainState.create(apply_fn=model.apply, params=params, tx=tx)


def train(tokens, rng, *, epochs):
    """Returns the trained parameters and the metrics of all steps."""
    state, history = create_state(tokens), []
    train_data = tnt.distribute(batches(tokens, seed=0))  # tnt
    for _, batch in zip(range(epochs * (len(tokens) // BATCH_SIZE)), train_data, strict=False):
        state, sums = train_step(state, batch, rng)
        history.append(sums)
    return state.params, jax.device_get(history)


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_arguments(parser)
    args = parser.parse_args(argv)
    tokens = english_sentences(args.data, config.max_len, args.examples)
    _, history = train(tokens, jax.random.key(1), epochs=args.epochs)
    last = history[-1]
    print(f"last loss: {last['loss'] / last['denominator']:.4f}")


if __name__ == "__main__":
    main()
