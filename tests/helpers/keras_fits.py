"""Small Keras models, trained by Keras and by us on the same rows."""

from contextlib import contextmanager
from unittest import mock

import keras
import numpy as np

import tnt_jax as tnt

NUM_FEATURES, NUM_CLASSES, EPOCHS = 5, 3, 2
TOLERANCE = 1e-5


def make_data(num_examples):
    rng = np.random.default_rng(0)
    return rng.normal(size=(num_examples, NUM_FEATURES)).astype(np.float32), rng.integers(
        0, NUM_CLASSES, num_examples
    )


def functional(*layers):
    x = inputs = keras.Input((NUM_FEATURES,))
    for layer in layers:
        x = layer(x)
    return keras.Model(inputs, keras.layers.Dense(NUM_CLASSES)(x))


def sequential():
    return keras.Sequential(
        [keras.layers.Dense(8, activation="tanh"), keras.layers.Dense(NUM_CLASSES)]
    )


def pair(build):
    """Returns two models of equal weights, also where they are drawn later."""
    models = []
    for _ in range(2):
        keras.utils.set_random_seed(1)
        models.append(build())
    return models


def settings(optimizer):
    return {
        "optimizer": optimizer,
        "loss": keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        "metrics": ["accuracy"],
    }


def fit(model, num_examples, size, *, optimizer=None, **options):
    x, y = make_data(num_examples)
    wrapped = tnt.Model(model, **options)
    wrapped.compile(**settings(optimizer or keras.optimizers.SGD(0.1)))
    return wrapped, wrapped.fit(
        x, y, batch_size=size, epochs=EPOCHS, shuffle=False, verbose=0
    ).history


@contextmanager
def losses_kept():
    """Keeps the losses that layers add, which Keras knows by `id`: once one is gone, another may
    get its `id`, and Keras may leave that one out, or count it twice.
    """
    kept, add_loss = [], keras.layers.Layer.add_loss

    def keep(layer, loss):
        kept.append(loss)
        add_loss(layer, loss)

    with mock.patch.object(keras.layers.Layer, "add_loss", keep):
        yield


def fit_by_keras(model, num_examples, size, optimizer=None):
    x, y = make_data(num_examples)
    model.compile(**settings(optimizer or keras.optimizers.SGD(0.1)))
    with losses_kept():
        return model.fit(x, y, batch_size=size, epochs=EPOCHS, shuffle=False, verbose=0).history


def assert_same(actual, expected, tolerance=TOLERANCE):
    assert len(actual) == len(expected)
    for a, b in zip(actual, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance)
