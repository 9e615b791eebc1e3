"""Flax's MNIST example (NNX) on all devices, here on Fashion-MNIST.

    python examples/flax/mnist.py --data DATA
    tnt-jax -n 2 -- examples/flax/mnist.py --data DATA

After the MNIST tutorial of Flax (Copyright The Flax Authors, Apache-2.0,
https://github.com/google/flax, docs_nnx/mnist_tutorial): the same network, loss and optimizer. The
lines marked with `tnt` stand in place of its steps and loops.
"""

import argparse
from functools import partial

import optax
from flax import nnx
from real_data import add_arguments, fashion_mnist

import tnt_jax as tnt


class CNN(nnx.Module):
    """Two convolutions and two dense layers; logits `[batch, 10]`."""

    def __init__(self, *, rngs: nnx.Rngs):
        self.conv1 = nnx.Conv(1, 32, kernel_size=(3, 3), rngs=rngs)
        self.conv2 = nnx.Conv(32, 64, kernel_size=(3, 3), rngs=rngs)
        self.avg_pool = partial(nnx.avg_pool, window_shape=(2, 2), strides=(2, 2))
        self.linear1 = nnx.Linear(3136, 256, rngs=rngs)
        self.linear2 = nnx.Linear(256, 10, rngs=rngs)

    def __call__(self, x):
        x = self.avg_pool(nnx.relu(self.conv1(x)))
        x = self.avg_pool(nnx.relu(self.conv2(x)))
        return self.linear2(nnx.relu(self.linear1(x.reshape(x.shape[0], -1))))


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_arguments(parser)
    args = parser.parse_args(argv)
    images, labels = fashion_mnist(args.data, "train", args.examples)
    test_images, test_labels = fashion_mnist(args.data, "t10k", args.examples)

    cnn = CNN(rngs=nnx.Rngs(0))
    model = tnt.Model(cnn)  # tnt
    loss = optax.softmax_cross_entropy_with_integer_labels
    model.compile(optax.adamw(0.005, 0.9), loss, metrics=["accuracy"])  # tnt
    model.fit(
        images,
        labels,
        batch_size=32,
        epochs=args.epochs,
        validation_data=(test_images, test_labels),
    )  # tnt

    cnn.eval()  # The module holds what was trained.
    predicted = cnn(test_images[:25]).argmax(axis=1)
    if tnt.is_master_rank():
        print(f"{(predicted == test_labels[:25]).sum()} of 25 test images are classified rightly")
    return model


if __name__ == "__main__":
    main()
