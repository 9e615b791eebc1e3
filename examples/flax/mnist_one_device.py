"""Flax's MNIST example (NNX) with a loop of its own on one device, here on Fashion-MNIST;
`mnist_loop.py` is the same loop on all devices.

    python examples/flax/mnist_one_device.py --data DATA
"""

import argparse

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from mnist import CNN
from real_data import add_arguments, fashion_mnist

BATCH_SIZE = 32
optimizer = optax.adamw(0.005, 0.9)
graphdef = nnx.graphdef(CNN(rngs=nnx.Rngs(0)))


def batches(images, labels, seed):
    """Yields batches in a new order every epoch, without end."""
    random = np.random.default_rng(seed)
    while True:
        order = random.permutation(len(labels))
        for start in range(0, len(order) - BATCH_SIZE + 1, BATCH_SIZE):
            rows = order[start : start + BATCH_SIZE]
            yield images[rows], labels[rows]


@jax.jit
def train_step(state, batch):
    """Makes an update and returns the state, the loss and the accuracy before it."""
    params, opt_state = state
    images, labels = batch

    def loss_fn(params):
        logits = nnx.merge(graphdef, params)(images)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
        return jnp.mean(losses), logits

    (loss, logits), grads = jax.value_and_grad(loss_fn, has_aux=True)(params)
    accuracy = jnp.mean(logits.argmax(-1) == labels)
    updates, opt_state = optimizer.update(grads, opt_state, params)
    state = optax.apply_updates(params, updates), opt_state
    return state, {"loss": loss, "accuracy": accuracy}


@jax.jit
def test_accuracy(params, images, labels):
    """Returns the share of test images that are classified rightly."""
    return jnp.mean(nnx.merge(graphdef, params)(images).argmax(-1) == labels)


def train(images, labels, *, epochs):
    """Returns the trained parameters and the metrics of all steps."""
    params = nnx.state(CNN(rngs=nnx.Rngs(0)))
    state, history = (params, optimizer.init(params)), []
    train_data = batches(images, labels, seed=0)
    for _, batch in zip(range(epochs * (len(labels) // BATCH_SIZE)), train_data, strict=False):
        state, metrics = train_step(state, batch)
        history.append(metrics)
    return state[0], jax.device_get(history)


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_arguments(parser)
    args = parser.parse_args(argv)
    params, history = train(*fashion_mnist(args.data, "train", args.examples), epochs=args.epochs)
    accuracy = test_accuracy(params, *fashion_mnist(args.data, "t10k", args.examples))
    print(f"last loss: {history[-1]['loss']:.4f}, test accuracy: {accuracy:.4f}")


if __name__ == "__main__":
    main()
