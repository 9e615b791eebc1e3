"""Trains a Keras 3 model as it is: `keras.applications.ResNet50`, or a small convolutional network,
on CIFAR-10 or scikit-learn's digits.

    python examples/keras_resnet.py   # the small model on 8x8 digits
    tnt-jax -n 4 -- examples/keras_resnet.py --model resnet50 --data cifar10

Keras must run on its JAX backend, so the variable KERAS_BACKEND is set before Keras is imported.
"""

import argparse
import os

os.environ["KERAS_BACKEND"] = "jax"
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np

import tnt_jax as tnt


def digits():
    """Returns training and test images `[n, 8, 8, 1]` in [0, 1] with labels; every fifth image is
    for testing.
    """
    from sklearn.datasets import load_digits

    loaded = load_digits()
    images = (loaded.images[..., None] / 16).astype(np.float32)
    is_test = np.arange(len(images)) % 5 == 0
    return (images[~is_test], loaded.target[~is_test]), (images[is_test], loaded.target[is_test])


def cifar10():
    """Returns the images of CIFAR-10, downloaded by Keras on the first run, in [0, 1] with
    labels.
    """
    train, test = keras.datasets.cifar10.load_data()
    return [(images.astype(np.float32) / 255, labels[:, 0]) for images, labels in (train, test)]


def small(shape):
    """Returns a convolutional network with BatchNormalization and dropout."""
    layers = keras.layers
    return keras.Sequential(
        [
            keras.Input(shape),
            layers.Conv2D(16, 3, padding="same", use_bias=False),
            layers.BatchNormalization(momentum=0.9),
            layers.ReLU(),
            layers.MaxPooling2D(),
            layers.Conv2D(
                32,
                3,
                padding="same",
                activation="relu",
                kernel_regularizer=keras.regularizers.L2(1e-4),
            ),
            layers.GlobalAveragePooling2D(),
            layers.Dropout(0.1),
            layers.Dense(10, activation="softmax"),
        ]
    )


def resnet50(shape):
    """Returns `keras.applications.ResNet50` with fresh weights, behind a layer that enlarges images
    below 32 x 32.
    """
    inputs = keras.Input(shape)
    x = inputs if min(shape[:2]) >= 32 else keras.layers.Resizing(32, 32)(inputs)
    x = x if shape[2] == 3 else keras.layers.Concatenate()([x, x, x])
    return keras.Model(
        inputs, keras.applications.ResNet50(weights=None, input_shape=x.shape[1:], classes=10)(x)
    )


def main():
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--model", choices=("small", "resnet50"), default="small", help="network")
    parser.add_argument(
        "--data",
        choices=("digits", "cifar10"),
        default="digits",
        help="images; cifar10 is downloaded",
    )
    parser.add_argument(
        "--batch_size", type=int, default=64, help="images of a step on all devices together"
    )
    parser.add_argument("--epochs", type=int, default=15, help="epochs")
    parser.add_argument("--learning_rate", type=float, default=3e-3, help="Adam's rate")
    parser.add_argument("--save", help="file of the trained Keras model, such as model.keras")
    args = parser.parse_args()

    # Keras makes arrays as soon as it makes a model, and a process must have joined its job before
    # that.
    tnt.init()
    train, test = {"digits": digits, "cifar10": cifar10}[args.data]()
    keras.utils.set_random_seed(0)
    keras_model = {"small": small, "resnet50": resnet50}[args.model](train[0].shape[1:])

    model = tnt.Model(keras_model, synchronize_batch_norm=True)
    model.compile(
        optimizer=keras.optimizers.Adam(args.learning_rate),
        loss="sparse_categorical_crossentropy",
        metrics=["accuracy"],
    )
    model.fit(
        *train, batch_size=args.batch_size, epochs=args.epochs, validation_data=test, verbose=2
    )
    _, accuracy = model.evaluate(*test, batch_size=args.batch_size, verbose=0)
    if tnt.is_master_rank():
        # fit has written the trained weights into the Keras model.
        alone = np.mean(np.argmax(keras_model.predict(test[0], verbose=0), axis=-1) == test[1])
        print(f"test accuracy: {accuracy:.4f}; of the Keras model by itself: {alone:.4f}")
        if args.save:
            keras_model.save(args.save)


if __name__ == "__main__":
    main()
