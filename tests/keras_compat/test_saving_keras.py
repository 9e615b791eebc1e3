"""Wrapped Keras models are saved in Keras's own files, and Keras reads them."""

import os

os.environ.setdefault("KERAS_BACKEND", "jax")

import numpy as np
import optax
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


def train():
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(24, 5)).astype(np.float32), rng.integers(0, 3, 24)
    inner = make_keras_model()
    model = tnt.Model(inner)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(0.1, momentum=0.9), loss=loss, metrics=["accuracy"])
    model.fit(x, y, epochs=2, batch_size=8, verbose=0)
    return model, inner, x, y


@pytest.fixture(scope="module")
def trained():
    """Trains a model for the tests that leave it as it is."""
    tnt.shutdown()
    tnt.init(devices=range(2))
    yield train()
    tnt.shutdown()


def copied(inner):
    copy = make_keras_model()
    copy.set_weights(inner.get_weights())
    return copy


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


T, K = tnt, keras
DECAY = {"initial_learning_rate": 0.05, "decay_steps": 3, "decay_rate": 0.5}
COMPILED = {
    "names": {"optimizer": "adam", "loss": "mse", "metrics": ["mae", "accuracy"]},
    "a name that Keras lacks": {"optimizer": "lamb", "loss": "huber"},
    "objects": {
        "optimizer": T.optimizers.SGD(0.05, momentum=0.9, clipnorm=1.0),
        "loss": T.losses.Huber(0.5),
        "metrics": [T.metrics.RootMeanSquaredError(name="error"), T.metrics.mean_absolute_error],
        "weighted_metrics": ["mse"],
    },
    "a schedule inside loss scaling": {
        "optimizer": T.optimizers.LossScaleOptimizer(
            T.optimizers.AdamW(T.schedules.ExponentialDecay(**DECAY), weight_decay=0.01)
        ),
        "loss": T.losses.mean_squared_error,
    },
    "objects of Keras": {
        "optimizer": K.optimizers.RMSprop(K.optimizers.schedules.ExponentialDecay(**DECAY)),
        "loss": K.losses.LogCosh(),
        "metrics": [K.metrics.CategoricalAccuracy(name="share")],
    },
}


@pytest.mark.parametrize("kind", COMPILED)
def test_keras_opens_the_model_compiled(trained, tmp_path, kind):
    _, inner, x, _ = trained
    inner = copied(inner)
    model = tnt.Model(inner)
    model.compile(**COMPILED[kind])
    y = np.eye(3, dtype=np.float32)[np.arange(24) % 3]
    model.fit(x, y, batch_size=8, epochs=2, verbose=0)
    expected = model.evaluate(x, y, verbose=0, return_dict=True)
    ours = {key: value for key, value in model.optimizer.get_config().items() if key != "name"}
    for name in ("model.keras", "model.h5"):
        model.save(tmp_path / name)
        read = keras.models.load_model(tmp_path / name)
        assert "get_compile_config" not in vars(inner)
        if name == "model.h5" and kind == "a name that Keras lacks":
            assert not read.compiled  # Its reader of these files knows no Lamb.
            continue
        assert read.compiled
        assert type(read.optimizer).__module__.startswith("keras.")
        found = read.evaluate(x, y, verbose=0, return_dict=True)
        if name == "model.h5":  # It names a metric of a function as the function.
            assert sorted(found.values()) == pytest.approx(sorted(expected.values()), rel=1e-5)
        else:
            assert found == pytest.approx(expected, rel=1e-5)
        theirs = read.optimizer.get_config()
        for key, value in ours.items():
            if isinstance(value, (int, float)):
                assert theirs[key] == pytest.approx(value, rel=1e-6), key
        read.fit(x, y, verbose=0)


@pytest.mark.parametrize(
    "arguments",
    [
        {"optimizer": optax.sgd(0.1), "loss": "mse"},
        {"optimizer": "sgd", "loss": lambda y_true, y_pred: (y_true - y_pred).mean(-1)},
        {"optimizer": "sgd", "objective": lambda forward, x, y: ((forward(x) - y) ** 2).mean(-1)},
    ],
    ids=["Optax", "function", "objective"],
)
def test_keras_opens_the_model_without_what_it_lacks(trained, tmp_path, arguments):
    _, inner, _, _ = trained
    model = tnt.Model(inner)
    model.compile(**arguments)
    for name in ("model.keras", "model.h5"):
        model.save(tmp_path / name)
        read = keras.models.load_model(tmp_path / name)
        assert not read.compiled
        assert [layer.get_config() for layer in read.layers] == [
            layer.get_config() for layer in inner.layers
        ]
        for a, b in zip(read.get_weights(), inner.get_weights(), strict=True):
            np.testing.assert_array_equal(a, b)


def make_other_head():
    keras.utils.set_random_seed(4)
    return keras.Sequential(
        [keras.Input((5,)), *make_keras_model().layers[:2], keras.layers.Dense(7)]
    )


@pytest.mark.parametrize("name", ["model.weights.h5", "model.keras", "model.h5"])
def test_skip_mismatch_keeps_what_keras_keeps(trained, tmp_path, name):
    model, *_ = trained
    (model.save_weights if name.endswith("weights.h5") else model.save)(tmp_path / name)
    plain, wrapped = make_other_head(), tnt.Model(make_other_head())
    wrapped.compile("sgd", loss="mse")
    wrapped.build((None, 5))
    changed = [weight + 1 for weight in plain.get_weights()]
    for one in (plain, wrapped):
        one.set_weights(changed)
        with pytest.raises(ValueError, match=r"could not be loaded|mismatch|shape|axes"):
            one.load_weights(tmp_path / name)
        one.set_weights(changed)
        with pytest.warns(UserWarning, match=r"could not be loaded|Skipping loading"):
            one.load_weights(tmp_path / name, skip_mismatch=True)
    for a, b, before in zip(wrapped.get_weights(), plain.get_weights(), changed, strict=True):
        np.testing.assert_array_equal(a, b)
        assert (a.shape[-1] == 7) == np.array_equal(a, before)


def test_sharded_weights_of_keras_are_loaded(trained, tmp_path):
    model, inner, x, _ = trained
    keras.saving.save_weights(inner, tmp_path / "a.weights.json", max_shard_size=3e-7)
    assert len(list(tmp_path.glob("a_*.weights.h5"))) > 1
    fresh = tnt.Model(make_keras_model())
    fresh.compile("sgd", loss="mse")
    fresh.build((None, 5))
    fresh.load_weights(tmp_path / "a.weights.json")
    np.testing.assert_array_equal(fresh.predict(x, verbose=0), model.predict(x, verbose=0))


def test_unzipped_models_of_keras_are_loaded(trained, tmp_path):
    model, _, x, _ = trained
    keras.saving.save_model(model.module, tmp_path / "run", zipped=False)
    read = tnt.models.load_model(tmp_path / "run")
    np.testing.assert_array_equal(read.predict(x, verbose=0), model.predict(x, verbose=0))


@keras.saving.register_keras_serializable("tnt_jax_tests")
class OfBuiltLayers(keras.Model):
    """Holds a layer that is built before the model is called."""

    def __init__(self, units, **kwargs):
        super().__init__(**kwargs)
        self.units = units
        self.dense = keras.layers.Dense(units)
        self.dense.build((None, 5))

    def call(self, x):
        return self.dense(x)

    def get_config(self):
        return super().get_config() | {"units": self.units}


@pytest.mark.filterwarnings("ignore:You are saving a model that has not yet been built")
def test_a_model_of_built_layers_is_saved_before_it_is_called(trained, tmp_path):
    _, _, x, y = trained
    inner = OfBuiltLayers(3)
    tnt.models.save_model(inner, tmp_path / "model.keras")
    for load in (keras.models.load_model, tnt.models.load_model):
        for a, b in zip(
            load(tmp_path / "model.keras").get_weights(), inner.get_weights(), strict=True
        ):
            np.testing.assert_array_equal(a, b)
    read = tnt.models.load_model(tmp_path / "model.keras")
    assert read.built
    read.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    plain = OfBuiltLayers(3)
    plain.set_weights(inner.get_weights())
    plain.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    for model in (read, plain):
        model.fit(x, y, batch_size=8, shuffle=False, verbose=0)
    for a, b in zip(read.get_weights(), plain.get_weights(), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_a_file_that_cannot_say_how_its_model_was_compiled_warns(trained, tmp_path, caplog):
    model = tnt.Model(copied(trained[1]))
    model.compile(optax.sgd(lambda step: 0.1), "mse")
    model.save(tmp_path / "model.keras")
    assert tnt.models.load_model(tmp_path / "model.keras").optimizer is None
    assert "The model is not compiled" in caplog.text


def test_loading_the_file_gives_a_model_that_trains_on(trained, tmp_path):
    model, _, x, y = train()
    model.save(tmp_path / "model.keras")
    read = tnt.models.load_model(tmp_path / "model.keras")
    assert read.evaluate(x, y, verbose=0) == pytest.approx(
        model.evaluate(x, y, verbose=0), rel=1e-5
    )
    for one in (read, model):
        one.fit(x, y, batch_size=8, shuffle=False, verbose=0)
    for a, b in zip(read.get_weights(), model.get_weights(), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["run", "run.keras"])
def test_inputs_of_any_size_need_no_sample(tmp_path, name):
    layers = [keras.layers.Conv2D(2, 3), keras.layers.GlobalAveragePooling2D()]
    module = keras.Sequential([keras.Input((None, None, 3)), *layers])
    model = tnt.Model(module)
    model.compile("sgd", "mse")
    model.summary()
    model.set_weights([2 * x for x in model.get_weights()])
    model.save(tmp_path / name)
    loaded = tnt.models.load_model(tmp_path / name)
    for mine, theirs in zip(loaded.get_weights(), module.get_weights(), strict=True):
        np.testing.assert_array_equal(mine, theirs)
    for size in (4, 5):
        x = np.ones((2, size, size, 3), np.float32)
        np.testing.assert_allclose(loaded.predict(x, verbose=0), module(x), rtol=1e-5)
        loaded.fit(x, np.zeros((2, 2)), verbose=0)
        module.set_weights(loaded.get_weights())
