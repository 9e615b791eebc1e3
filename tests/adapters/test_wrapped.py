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
from long_params import long_but_last

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


def with_statistics():
    keras.utils.set_random_seed(5)
    layers = keras.layers
    return keras.Sequential(
        [
            keras.Input((4,)),
            layers.Dense(8, activation="relu", name="body"),
            layers.BatchNormalization(name="norm"),
            layers.BatchNormalization(name="bare", center=False, scale=False),
            layers.Dense(3, name="head", kernel_regularizer="l2"),
        ]
    )


def freeze_all(model):
    model.trainable = False


def freeze_body(model):
    for layer in model.layers[:-1]:
        layer.trainable = False


def freeze_bare(model):
    model.get_layer("bare").trainable = False


def freeze_head(model):
    model.get_layer(index=-1).trainable = False


# By default, each of either with one of the other.
@pytest.mark.parametrize(
    ("freeze", "when"),
    [
        pytest.param(
            freeze,
            when,
            marks=[] if when == "after build" or freeze is freeze_body else pytest.mark.long,
        )
        for freeze in [freeze_all, freeze_body, freeze_bare, freeze_head]
        for when in ["before build", "after build", "after compile", "after fit"]
    ],
)
@pytest.mark.parametrize("num_ranks", long_but_last(1, 4))
def test_a_frozen_keras_model_trains_as_in_keras(freeze, num_ranks, when, use_ranks):
    use_ranks(num_ranks)
    modules = [with_statistics() for _ in range(2)]
    model = tnt.Model(modules[0], synchronize_batch_norm=True)
    histories = []
    for trained, module in zip((model, modules[1]), modules, strict=True):
        if when == "before build":
            freeze(trained)
        elif when == "after build" and trained is model:
            model.build((None, 4))
        if when == "after build":
            freeze(trained)
        trained.compile(keras.optimizers.SGD(0.1, momentum=0.9), loss=LOSS)
        if when == "after compile":
            freeze(trained)
        if when == "after fit":
            fit(trained)
            freeze(trained)
            trained.compile(keras.optimizers.SGD(0.1, momentum=0.9), loss=LOSS)
        before = module.get_weights()
        histories.append(fit(trained, epochs=2))
        moved = [
            np.abs(a - b).max() > 1e-6 for a, b in zip(before, module.get_weights(), strict=True)
        ]
        assert not any(moved) if freeze is freeze_all else any(moved)
    np.testing.assert_allclose(*histories, rtol=1e-5)
    for mine, theirs in zip(*map(arrays, modules), strict=True):
        np.testing.assert_allclose(mine, theirs, atol=1e-5)
    trainable = [variable.path for variable in modules[0].trainable_variables]
    assert [variable.path for variable in model.trainable_weights] == trainable
    slots = jax.tree.leaves(model.state.opt_state)
    assert sum(slot.ndim > 0 for slot in slots) == len(trainable)


def test_the_flag_of_a_frozen_model_reads_as_in_keras(two_ranks):
    model = compiled(make_keras())
    fit(model)
    model.trainable = False
    assert model.trainable is False
    assert model.trainable_weights == []
    assert len(model.non_trainable_weights) == 4
    model.trainable = True
    assert len(model.trainable_weights) == 4
    with pytest.raises(ValueError, match=r"Pass tnt_jax.Model\(module, frozen"):
        tnt.Model(NnxNet()).trainable = False


class FreezeInTraining(keras.callbacks.Callback):
    def on_epoch_begin(self, epoch, logs=None):
        if epoch == 1:
            freeze_body(self.model)


def test_freezing_while_training_is_refused_as_in_keras(two_ranks):
    with pytest.raises(ValueError, match="frozen or unfrozen while the model was being trained"):
        fit(compiled(make_keras()), callbacks=[FreezeInTraining()], epochs=3)


class Annealed(keras.layers.Layer):
    """Adds a loss with a factor that a callback changes."""

    def build(self, shape):
        self.factor = self.add_weight(shape=(), initializer="zeros", trainable=False, name="factor")

    def call(self, x):
        self.add_loss(self.factor * keras.ops.mean(keras.ops.square(x)))
        return x


class Anneal(keras.callbacks.Callback):
    def __init__(self, every):
        super().__init__()
        self.every = every

    def on_epoch_begin(self, epoch, logs=None):
        if self.every == "epoch":
            self.variable.assign(0.2 * epoch)

    def on_train_batch_begin(self, batch, logs=None):
        if self.every == "batch":
            self.variable.assign_add(0.1)

    def on_train_end(self, logs=None):
        self.variable.assign_add(5.0)

    @property
    def variable(self):
        module = getattr(self.model, "module", self.model)
        return module.get_layer("annealed").factor


@pytest.mark.parametrize(("every", "num_ranks"), [("epoch", 1), ("batch", 4)])
def test_a_variable_assigned_by_a_callback_counts_as_in_keras(every, num_ranks, use_ranks):
    use_ranks(num_ranks)
    modules = []
    for _ in range(2):
        base = make_keras()
        outputs = Annealed(name="annealed")(base.layers[0].output)
        modules.append(keras.Model(base.inputs, base.layers[-1](outputs)))
    losses = []
    for trained in (tnt.Model(modules[0]), modules[1]):
        trained.compile(keras.optimizers.SGD(0.1), loss=LOSS)
        losses.append(fit(trained, epochs=3, callbacks=[Anneal(every)]))
    np.testing.assert_allclose(*losses, rtol=1e-5)
    for mine, theirs in zip(*map(arrays, modules), strict=True):
        np.testing.assert_allclose(mine, theirs, atol=1e-5)


class HalveInTraining(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        halve(getattr(self.model, "module", self.model))

    def on_epoch_end(self, epoch, logs=None):
        self.seen = arrays(self.model.module)


@pytest.mark.parametrize("make", [make_keras, NnxNet])
def test_a_callback_reads_and_assigns_trained_variables(make, two_ranks):
    module, callback = make(), HalveInTraining()
    fit(compiled(module), callbacks=[callback])
    for kept, held in zip(callback.seen, arrays(module), strict=True):
        np.testing.assert_array_equal(kept, held)
    expected = make()
    model = compiled(expected)
    for start in range(0, 24, 8):
        model.train_on_batch(X[start : start + 8], Y[start : start + 8])
        halve(expected)
    for mine, theirs in zip(arrays(module), arrays(expected), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-6)
