"""Flax's language model (Linen) with a loop of its own on one device, here on the bytes of English
sentences; `lm1b_loop.py` is the same loop on all devices.

    python examples/flax/lm1b_one_device.py --data DATA
"""

import argparse

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.training.train_state import TrainState
from lm1b import TransformerConfig, TransformerLM, create_learning_rate_schedule
from real_data import add_arguments, english_sentences

BATCH_SIZE = 64
config = TransformerConfig()


def batches(tokens, seed):
    """Yields batches in a new order every epoch, without end."""
    random = np.random.default_rng(seed)
    while True:
        order = random.permutation(len(tokens))
        for start in range(0, len(order) - BATCH_SIZE + 1, BATCH_SIZE):
            yield tokens[order[start : start + BATCH_SIZE]]


@jax.jit
def train_step(state, tokens, rng):
    """Makes an update and returns the state and sums over all tokens before it."""
    dropout_rng = jax.random.fold_in(rng, state.step)
    weights = (tokens > 0).astype(jnp.float32)

    def loss_fn(params):
        rngs = {"dropout": dropout_rng}
        logits = state.apply_fn({"params": params}, tokens, train=True, rngs=rngs)
        losses = weights * optax.softmax_cross_entropy_with_integer_labels(logits, tokens)
        return jnp.sum(losses) / jnp.sum(weights), (losses, logits)

    (_, (losses, logits)), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
    hits = weights * (logits.argmax(-1) == tokens)
    sums = {"loss": losses.sum(), "accuracy": hits.sum(), "denominator": weights.sum()}
    return state.apply_gradients(grads=grads), sums


def create_state(tokens):
    """Returns the untrained parameters with the optimizer."""
    model, schedule = TransformerLM(config), create_learning_rate_schedule(0.0016, 100)
    tx = optax.adamw(schedule, b1=0.9, b2=0.98, eps=1e-9, weight_decay=0.1)
    params = model.init(jax.random.key(0), tokens[:1])["params"]
    return TrainState.create(apply_fn=model.apply, params=params, tx=tx)


def train(tokens, rng, *, epochs):
    """Returns the trained parameters and the metrics of all steps."""
    state, history = create_state(tokens), []
    train_data = batches(tokens, seed=0)
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
