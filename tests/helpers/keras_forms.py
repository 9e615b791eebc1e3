"""Keras models of every form, trained and saved in every format; run with a directory, it loads
and goes on in a process of its own.
"""

import os
import sys
from pathlib import Path

os.environ.setdefault("KERAS_BACKEND", "jax")

import jax
import keras
import numpy as np

import tnt_jax as tnt
from tnt_jax.train.state import state_arrays

ROWS, FEATURES, CLASSES = 12, 5, 3


def listed():
    return keras.Sequential(
        [
            keras.Input((FEATURES,)),
            keras.layers.Dense(8),
            keras.layers.BatchNormalization(),
            keras.layers.Dense(CLASSES),
        ]
    )


def added():
    model = keras.Sequential()
    model.add(keras.Input((FEATURES,)))
    model.add(keras.layers.Dense(8, name="FC1"))
    model.add(keras.layers.Dense(CLASSES))
    return model


def deferred():
    return keras.Sequential(
        [
            keras.layers.Dense(8, name="FC1"),
            keras.layers.Dropout(0.3),
            keras.layers.Dense(8),
            keras.layers.Dense(CLASSES),
        ]
    )


def nested():
    inner = keras.Sequential([keras.layers.Dense(6), keras.layers.Dense(6)])
    return keras.Sequential([inner, keras.Sequential([keras.layers.Dense(CLASSES)])])


def functional():
    x = keras.Input((FEATURES,))
    inner = keras.Model(x, keras.layers.Add()([keras.layers.Dense(4)(x), keras.layers.Dense(4)(x)]))
    y = keras.Input((FEATURES,))
    return keras.Model(y, keras.layers.Dense(CLASSES)(inner(y)))


@keras.saving.register_keras_serializable("tests")
class Scaled(keras.layers.Layer):
    """Holds two variables without a name."""

    def build(self, input_shape):
        self.factor = self.add_weight(shape=(input_shape[-1],), initializer="ones")
        self.shift = self.add_weight(shape=(input_shape[-1],), initializer="zeros")

    def call(self, x):
        return x * self.factor + self.shift


@keras.saving.register_keras_serializable("tests")
class Subclassed(keras.Model):
    def __init__(self, **options):
        super().__init__(**options)
        self.blocks = [keras.layers.Dense(6), keras.layers.Dense(6)]
        self.head, self.norm = keras.layers.Dense(CLASSES), keras.layers.BatchNormalization()
        self.scaled = Scaled()

    def call(self, x, training=None):
        for block in self.blocks:
            x = block(x)
        return self.head(self.scaled(self.norm(x, training=training)))


FORMS = {form.__name__: form for form in (listed, added, deferred, nested, functional, Subclassed)}
# Names of files of weights; the others hold whole models.
WEIGHTS = ("weights", "some.weights.h5")


def files(form):
    """Returns the names of the files of a form: Keras writes no subclassed model to its old
    format.
    """
    return ("whole", "whole.keras", *(() if form == "Subclassed" else ("whole.h5",)), *WEIGHTS)


def data():
    rng = np.random.default_rng(0)
    return rng.normal(size=(ROWS, FEATURES)).astype("float32"), rng.integers(0, CLASSES, ROWS)


def wrap(form):
    model = tnt.Model(FORMS[form](), seed=3)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(0.01), loss=loss, metrics=["accuracy"])
    return model


def fit(model, first, last):
    model.fit(*data(), batch_size=4, initial_epoch=first, epochs=last, shuffle=False, verbose=0)


def arrays_of(model):
    """Returns the training state by path, but for the states of seed generators, which training
    does not use.
    """
    arrays = {
        path: np.asarray(leaf)
        for path, leaf in state_arrays(model.state).items()
        if "seed_generator" not in path
    }
    assert len(arrays) > 10
    return arrays


def read(directory, form, name):
    """Returns a model with what was saved."""
    if name not in WEIGHTS:
        return tnt.models.load_model(directory / name)
    model = wrap(form)
    model.build(jax.ShapeDtypeStruct((1, FEATURES), np.float32))
    model.load_weights(directory / name)
    return model


def train_on(directory, form, name):
    """Returns the state after an epoch with what was saved."""
    model = read(directory, form, name)
    fit(model, 1, 2)
    return arrays_of(model)


def save(directory, form):
    """Trains a model, saves it in every format, and returns the state after another epoch."""
    model = wrap(form)
    fit(model, 0, 1)
    for name in files(form):
        write = model.save_weights if name in WEIGHTS else model.save
        write(directory / name)
    fit(model, 1, 2)
    return arrays_of(model)


if __name__ == "__main__":
    root = Path(sys.argv[1])
    for form in FORMS:
        expected = dict(np.load(root / form / "expected.npz"))
        for name in files(form):
            found = {
                path.replace("/", "|"): leaf
                for path, leaf in train_on(root / form, form, name).items()
            }
            same = set(found) == set(expected) and all(
                np.array_equal(found[path], expected[path]) for path in expected
            )
            print(form, name, "same" if same else "different")
