"""A model and the object that it wraps: changes between calls are seen, results are stored also
after an interruption.
"""

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest
from callback_runs import NnxNet
from keras_beside import Net, data

import tnt_jax as tnt

X, Y = data(24)
LOSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def make_keras():
    keras.utils.set_random_seed(5)
    layers = keras.layers
    return keras.Sequential(
        [
            keras.Input((4,)),
            layers.Dense(8, activation="relu", name="body"),
            layers.Dropout(0.0),
            layers.Dense(3, name="head"),
        ]
    )


def compiled(module, **sgd):
    model = tnt.Model(module)
    model.compile(keras.optimizers.SGD(0.1, **sgd), loss=LOSS)
    return model


def fit(model, **options):
    return model.fit(
        X, Y, **{"batch_size": 8, "epochs": 1, "shuffle": False, "verbose": 0} | options
    ).history["loss"]


def arrays(module):
    if isinstance(module, keras.Model):
        return [np.array(weight) for weight in module.get_weights()]
    return [
        np.array(part[...])
        for layer in (module.dense_0, module.dense_1)
        for part in (layer.kernel, layer.bias)
    ]


def halve(module):
    if isinstance(module, keras.Model):
        module.set_weights([weight / 2 for weight in module.get_weights()])
    else:
        for layer in (module.dense_0, module.dense_1):
            layer.kernel[...], layer.bias[...] = layer.kernel[...] / 2, layer.bias[...] / 2


@pytest.mark.parametrize("make", [make_keras, NnxNet])
def test_weights_changed_between_calls_count(make, two_ranks):
    module, other = make(), make()
    model = compiled(module)
    fit(model)
    before = model.evaluate(X, Y, verbose=0)
    halve(module)
    after = model.evaluate(X, Y, verbose=0)
    assert abs(after - before) > 1e-3
    fresh = compiled(other)
    fit(fresh)
    halve(other)
    again = compiled(other)
    assert after == pytest.approx(again.evaluate(X, Y, verbose=0), rel=1e-6)
    np.testing.assert_allclose(fit(model, epochs=2), fit(again, epochs=2), rtol=1e-6)
    for mine, theirs in zip(arrays(module), arrays(other), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-6)
    assert model.optimizer.iterations == 9, "The optimizer goes on."


@pytest.mark.parametrize("make", [make_keras, NnxNet])
def test_weights_set_and_loaded_reach_the_module(make, two_ranks, tmp_path):
    module = make()
    model = compiled(module)
    fit(model)
    trained = arrays(module)
    model.save_weights(tmp_path / "saved")
    model.set_weights([weight * 0 for weight in model.get_weights()])
    assert all((array == 0).all() for array in arrays(module))
    assert model.evaluate(X, Y, verbose=0) == pytest.approx(np.log(3), rel=1e-5)
    model.load_weights(tmp_path / "saved")
    for mine, theirs in zip(arrays(module), trained, strict=True):
        np.testing.assert_array_equal(mine, theirs)


def test_a_call_in_training_mode_changes_nothing(two_ranks):
    module = make_keras()
    model = compiled(module)
    fit(model)
    expected = model.evaluate(X, Y, verbose=0)
    module(jnp.asarray(X), training=True)
    assert model.evaluate(X, Y, verbose=0) == expected


def test_layers_are_unfrozen_as_in_keras(two_ranks):
    models = [make_keras() for _ in range(2)]
    for wrap, module in zip((tnt.Model, lambda module: module), models, strict=True):
        model = wrap(module)
        for trainable in (False, True, False):
            module.get_layer("body").trainable = trainable
            before = module.get_layer("body").get_weights()
            model.compile(keras.optimizers.SGD(0.1, momentum=0.9), loss=LOSS)
            fit(model, epochs=2)
            moved = np.abs(module.get_layer("body").get_weights()[0] - before[0]).max()
            assert bool(moved > 1e-4) is trainable
    for mine, theirs in zip(*map(arrays, models), strict=True):
        np.testing.assert_allclose(mine, theirs, atol=1e-5)


class InterruptAfter(keras.callbacks.Callback):
    def __init__(self, batch, *, loses_state=False):
        super().__init__()
        self.batch, self.loses_state = batch, loses_state

    def on_train_batch_end(self, batch, logs=None):
        if batch == self.batch:
            for leaf in jax.tree.leaves(self.model.state.params) if self.loses_state else []:
                leaf.delete()
            raise KeyboardInterrupt


@pytest.mark.parametrize("make", [make_keras, NnxNet])
def test_an_interrupted_fit_leaves_what_was_learned(make, two_ranks):
    module, other = make(), make()
    model, expected = compiled(module, momentum=0.9), compiled(other, momentum=0.9)
    with pytest.raises(KeyboardInterrupt):
        fit(model, callbacks=[InterruptAfter(1)], epochs=3)
    expected.fit(X[:16], Y[:16], batch_size=8, shuffle=False, verbose=0)
    for mine, theirs in zip(arrays(module), arrays(other), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-6)
    np.testing.assert_allclose(fit(model), fit(expected), rtol=1e-6)


def test_an_interruption_within_a_step_is_reported_as_such(two_ranks):
    module = make_keras()
    start = arrays(module)
    with pytest.raises(KeyboardInterrupt):
        fit(compiled(module), callbacks=[InterruptAfter(1, loses_state=True)])
    for mine, theirs in zip(arrays(module), start, strict=True):
        np.testing.assert_array_equal(mine, theirs)


def test_linen_modules_hold_nothing_to_read(two_ranks):
    model = tnt.Model(Net())
    model.compile("sgd", loss=tnt.losses.SparseCategoricalCrossentropy(from_logits=True))
    with pytest.raises(KeyboardInterrupt):
        fit(model, callbacks=[InterruptAfter(0)])
    assert model.optimizer.iterations == 1
