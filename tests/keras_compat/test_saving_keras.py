"""Wrapped Keras models are saved in Keras's own files, and Keras reads them."""

import os

os.environ.setdefault("KERAS_BACKEND", "jax")

import numpy as np
import pytest

import tnt_jax as tnt

keras = pytest.importorskip("keras")


def make_keras_model():
    keras.utils.set_random_seed(3)
    layers = [
        keras.Input((5,)),
        keras.layers.Dense(8, activation="relu"),
        keras.layers.BatchNormalization(),
        keras.layers.Dense(3),
    ]
    return keras.Sequential(layers)


@pytest.fixture
def trained():
    tnt.shutdown()
    tnt.init(devices=range(2))
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(24, 5)).astype(np.float32), rng.integers(0, 3, 24)
    inner = make_keras_model()
    model = tnt.Model(inner)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(0.1, momentum=0.9), loss=loss, metrics=["accuracy"])
    model.fit(x, y, epochs=2, batch_size=8, verbose=0)
    yield model, inner, x, y
    tnt.shutdown()


def test_keras_reads_the_whole_model(trained, tmp_path):
    model, inner, x, _ = trained
    model.save(tmp_path / "model.keras")
    read = keras.models.load_model(tmp_path / "model.keras")
    np.testing.assert_allclose(
        read.predict(x, verbose=0), model.predict(x, verbose=0), rtol=1e-5, atol=1e-6
    )
    for a, b in zip(read.get_weights(), inner.get_weights(), strict=True):
        np.testing.assert_array_equal(a, b)


def test_weights_go_to_a_fresh_model_of_either_kind(trained, tmp_path):
    model, _, x, _ = trained
    path = tmp_path / "model.weights.h5"
    model.save_weights(path)
    plain = make_keras_model()
    plain.load_weights(path)
    np.testing.assert_allclose(
        plain.predict(x, verbose=0), model.predict(x, verbose=0), rtol=1e-5, atol=1e-6
    )
    wrapped = tnt.Model(make_keras_model())
    wrapped.compile("sgd", loss=tnt.losses.SparseCategoricalCrossentropy(from_logits=True))
    wrapped.load_weights(path)
    np.testing.assert_array_equal(wrapped.predict(x, verbose=0), model.predict(x, verbose=0))


def test_loading_the_file_gives_a_model_that_trains_on(trained, tmp_path):
    model, _, x, y = trained
    model.save(tmp_path / "model.keras")
    read = tnt.models.load_model(tmp_path / "model.keras")
    assert read.evaluate(x, y, verbose=0) == pytest.approx(
        model.evaluate(x, y, verbose=0), rel=1e-5
    )
    for one in (read, model):
        one.fit(x, y, batch_size=8, shuffle=False, verbose=0)
    for a, b in zip(read.get_weights(), model.get_weights(), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
