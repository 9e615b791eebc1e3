"""Flax's MNIST example (NNX) with a loop of its own on all devices, here on Fashion-MNIST;
the lines marked with `tnt` are those in which it differs from `mnist_one_device.py`.

    tnt-jax -n 2 -- examples/flax/mnist_loop.py --data DATA
"""

import argparse

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from mnist import CNN
from real_data import add_arguments, fashion_mnist

import tnt_jax as tnt  # tnt

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


@tnt.distributed_step  # tnt
def train_step(state, batch):
    """Makes an update and returns the state, the loss and the accuracy before it."""
    params, opt_state = state
    images, labels = batch.inputs, batch.targets  # tnt

    def loss_fn(params):
        logits = nnx.merge(graphdef, params)(images)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
        return tnt.compute_average_loss(losses), logits  # tnt

    (loss, logits), grads = tnt.value_and_grad(loss_fn, has_aux=True)(params)  # tnt
    accuracy = tnt.reduce(logits.argmax(-1) == labels, "mean")  # tnt
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
    train_data = tnt.distribute(batches(images, labels, seed=0))  # tnt
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
