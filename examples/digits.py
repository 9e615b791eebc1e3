"""Trains a small convolutional network on handwritten digits: scikit-learn's bundled 8x8 images, or
any image set of TFDS.

    python examples/digits.py                     # every device of this machine, one process
    tnt-jax -n 2 -- examples/digits.py            # two processes
    tnt-jax -n 2 -- examples/digits.py --data tfds:mnist --epochs 3

The result does not depend on the number of devices: the global batch decides it.
"""

import argparse
import os

# TensorFlow only reads the data here: quietly, and with the same kernels on every processor.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "0")

import flax.linen as nn
import jax.numpy as jnp
import numpy as np
import tensorflow as tf

import tnt_jax as tnt


class DigitNet(nn.Module):
    """Two convolutions and two dense layers with BatchNorm and dropout; logits `[batch, 10]`."""

    @nn.compact
    def __call__(self, images, train: bool):
        x = images.astype(jnp.float32)
        for features in (16, 32):
            x = nn.Conv(features, (3, 3))(x)
            # Statistics over the whole global batch, on any number of ranks.
            x = nn.relu(
                nn.BatchNorm(use_running_average=not train, momentum=0.9, axis_name="data")(x)
            )
            x = nn.max_pool(x, (2, 2), (2, 2))
        x = nn.relu(nn.Dense(64)(x.reshape(len(x), -1)))
        x = nn.Dropout(0.3, deterministic=not train)(x)
        return nn.Dense(10)(x)


def sklearn_digits():
    """Returns training and test images `[n, 8, 8, 1]` in [0, 1] with labels; every fifth image is
    for testing.
    """
    from sklearn.datasets import load_digits

    digits = load_digits()
    images = (digits.images[..., None] / 16).astype(np.float32)
    is_test = np.arange(len(images)) % 5 == 0
    return (images[~is_test], digits.target[~is_test]), (images[is_test], digits.target[is_test])


def tfds_images(name):
    """Returns training and test images `[n, height, width, channels]` in [0, 1] with labels, of a
    prepared TFDS set.
    """
    import tensorflow_datasets as tfds

    sets = tfds.load(name, split=["train", "test"], as_supervised=True, batch_size=-1)
    return [(images.numpy().astype(np.float32) / 255, labels.numpy()) for images, labels in sets]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--data",
        default="sklearn",
        help="sklearn, or tfds:NAME such as tfds:mnist (default: sklearn)",
    )
    parser.add_argument(
        "--epochs", type=int, default=12, help="passes over the training images (default: 12)"
    )
    parser.add_argument(
        "--batch-size", type=int, default=64, help="global batch over all ranks (default: 64)"
    )
    parser.add_argument(
        "--learning-rate", type=float, default=2e-3, help="Adam's learning rate (default: 0.002)"
    )
    args = parser.parse_args()

    if args.data != "sklearn" and not args.data.startswith("tfds:"):
        parser.error(f"--data must be sklearn or tfds:NAME, but is {args.data!r}")
    train, test = (
        sklearn_digits() if args.data == "sklearn" else tfds_images(args.data.removeprefix("tfds:"))
    )
    train_set = (
        tf.data.Dataset.from_tensor_slices(train).shuffle(len(train[0])).batch(args.batch_size)
    )
    test_set = tf.data.Dataset.from_tensor_slices(test).batch(args.batch_size)

    model = tnt.Model(DigitNet())
    model.compile(
        optimizer=tnt.optimizers.Adam(learning_rate=args.learning_rate),
        loss=tnt.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    model.fit(train_set, epochs=args.epochs, validation_data=test_set)
    _, accuracy = model.evaluate(test_set, verbose=0)
    if tnt.is_master_rank():
        print(f"test accuracy: {accuracy:.2f}")


if __name__ == "__main__":
    main()
