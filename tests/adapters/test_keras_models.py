"""Wrapped Keras models train as `keras_model.fit` does on one device, and alike on any number of
ranks.
"""

import keras
import numpy as np
import pytest
from keras import ops
from keras_fits import (
    NUM_CLASSES,
    NUM_FEATURES,
    TOLERANCE,
    assert_same,
    fit,
    fit_by_keras,
    functional,
    make_data,
    pair,
    sequential,
    settings,
)
from long_params import long_but_last

import tnt_jax as tnt
from tnt_jax.log import logger


class Penalised(keras.layers.Layer):
    """Adds a mean, a sum over rows and one value per row."""

    def call(self, x):
        self.add_loss(0.1 * ops.mean(ops.square(x)))
        self.add_loss(0.01 * ops.sum(ops.square(x)))
        self.add_loss(0.01 * ops.sum(ops.abs(x), axis=-1))
        return x


class Subclassed(keras.Model):
    def __init__(self):
        super().__init__()
        self.hidden = keras.layers.Dense(8, activation="relu")
        self.head = keras.layers.Dense(NUM_CLASSES)

    def call(self, x, training=None):
        return self.head(self.hidden(x))


def regularized():
    return functional(
        keras.layers.Dense(8, kernel_regularizer="l2", activity_regularizer="l1"), Penalised()
    )


def normalized():
    # A bias would have no gradient but rounding errors, which Adam makes as large as any other.
    return functional(
        keras.layers.Dense(8, use_bias=False), keras.layers.BatchNormalization(momentum=0.9)
    )


def recurrent():
    return functional(keras.layers.Reshape((NUM_FEATURES, 1)), keras.layers.LSTM(4))


def spectral():
    return functional(keras.layers.SpectralNormalization(keras.layers.Dense(8)))


def frozen():
    return functional(keras.layers.Dense(8), keras.layers.Dense(8, trainable=False))


# Those of the next test are `long`.
@pytest.mark.parametrize(
    "build",
    [
        *long_but_last(functional, frozen, sequential),
        Subclassed,
        regularized,
        normalized,
        recurrent,
    ],
)
@pytest.mark.parametrize(
    "optimizer",
    long_but_last(
        lambda: keras.optimizers.Adam(0.01), lambda: keras.optimizers.SGD(0.1, momentum=0.9)
    ),
)
def test_fit_equals_keras_fit_on_one_device(use_ranks, build, optimizer):
    use_ranks(1)
    model, expected = pair(build)
    expected_history = fit_by_keras(expected, 20, 10, optimizer())
    _, history = fit(model, 20, 10, optimizer=optimizer())
    assert_same(model.get_weights(), expected.get_weights())
    for name in ("loss", "accuracy"):
        np.testing.assert_allclose(history[name], expected_history[name], rtol=TOLERANCE)


# The last batch has 7 rows, so that ranks hold padding; with 4 ranks every batch is padded.
@pytest.mark.parametrize("num_ranks", [pytest.param(2, marks=pytest.mark.long), 4])
@pytest.mark.parametrize("build", [*long_but_last(recurrent, spectral, functional), frozen])
def test_any_number_of_ranks_equals_keras_fit(use_ranks, build, num_ranks):
    use_ranks(num_ranks)
    model, expected = pair(build)
    expected_history = fit_by_keras(expected, 27, 10)
    _, history = fit(model, 27, 10)
    assert_same(model.get_weights(), expected.get_weights())
    np.testing.assert_allclose(history["loss"], expected_history["loss"], rtol=TOLERANCE)


@pytest.mark.parametrize("num_ranks", [pytest.param(2, marks=pytest.mark.long), 4])
def test_added_losses_on_full_batches(use_ranks, num_ranks):
    use_ranks(num_ranks)
    model, expected = pair(regularized)
    expected_history = fit_by_keras(expected, 24, 12)
    wrapped, history = fit(model, 24, 12)
    assert_same(model.get_weights(), expected.get_weights())
    np.testing.assert_allclose(history["loss"], expected_history["loss"], rtol=TOLERANCE)
    x, y = make_data(24)
    values = wrapped.evaluate(x, y, batch_size=24, verbose=0)
    np.testing.assert_allclose(
        values, expected.evaluate(x, y, batch_size=24, verbose=0), rtol=TOLERANCE
    )


class AddsInOneMode(keras.layers.Layer):
    """Adds a loss in training or in inference only."""

    def __init__(self, loss, training):
        super().__init__()
        self.loss = loss
        self.when = training

    def call(self, x, training=False):
        if training == self.when:
            self.add_loss(self.loss)
        return x


def test_an_added_loss_may_have_the_id_of_another_layers_last_one(use_ranks):
    use_ranks(2)
    loss = ops.convert_to_tensor(0.5)
    x, y = make_data(24)
    plain, adding = (
        tnt.Model(functional(keras.layers.Dense(4), *layers))
        for layers in ((), (AddsInOneMode(loss, False), AddsInOneMode(loss, True)))
    )
    losses = []
    for model in (plain, adding):
        model.compile(**settings(keras.optimizers.SGD(0.1)))
        model.set_weights([np.ones_like(weight) for weight in model.get_weights()])
        model.fit(x, y, batch_size=24, verbose=0)
        losses.append(model.evaluate(x, y, batch_size=24, verbose=0)[0])
    np.testing.assert_allclose(losses[1], losses[0] + 0.5, rtol=TOLERANCE)


class PerRow(keras.layers.Layer):
    def call(self, x):
        self.add_loss(0.01 * ops.sum(ops.abs(x), axis=-1))
        return x


def regularized_by_layers():
    return functional(
        keras.layers.Dense(8, kernel_regularizer="l2", activity_regularizer="l1l2"), PerRow()
    )


@pytest.mark.parametrize("num_ranks", [pytest.param(2, marks=pytest.mark.long), 4])
def test_regularisers_and_losses_per_row_leave_padding_out(use_ranks, num_ranks):
    use_ranks(num_ranks)
    model, expected = pair(regularized_by_layers)
    fit_by_keras(expected, 27, 10)
    fit(model, 27, 10)
    assert_same(model.get_weights(), expected.get_weights())


@pytest.mark.parametrize(
    ("build", "num_examples", "warnings"),
    [
        (lambda: functional(Penalised()), 3, 1),
        (lambda: functional(Penalised()), 4, 0),
        (regularized_by_layers, 3, 0),
    ],
)
def test_repeated_rows_in_added_losses_are_told(
    use_ranks, caplog, monkeypatch, build, num_examples, warnings
):
    use_ranks(2)
    monkeypatch.setattr(logger, "propagate", True)
    fit(build(), num_examples, num_examples)
    # A record comes once for each handler between the logger and the root.
    assert (
        len(
            {
                id(record)
                for record in caplog.records
                if "it includes repeated rows" in record.message
            }
        )
        == warnings
    )


@pytest.mark.parametrize("num_ranks", [pytest.param(2, marks=pytest.mark.long), 4])
@pytest.mark.parametrize("num_examples", long_but_last(24, 27))
def test_synchronised_batch_norm_equals_keras_fit(use_ranks, num_ranks, num_examples):
    use_ranks(num_ranks)
    model, expected = pair(normalized)
    fit_by_keras(expected, num_examples, 10)
    fit(model, num_examples, 10, synchronize_batch_norm=True)
    assert_same(model.get_weights(), expected.get_weights())


def noisy():
    return functional(
        keras.layers.Dense(16), keras.layers.Dropout(0.5), keras.layers.GaussianNoise(0.1)
    )


@pytest.mark.long  # Four programs; other tests of dropout have fewer.
@pytest.mark.parametrize("num_examples", [24, 27])
def test_dropout_does_not_depend_on_the_ranks(use_ranks, num_examples):
    models = [pair(noisy)[0] for _ in range(3)]
    start = models[0].get_weights()
    for model, num_ranks in zip(models, (1, 2, 4), strict=True):
        model.set_weights(start)
        use_ranks(num_ranks)
        fit(model, num_examples, 10)
    for model in models[1:]:
        assert_same(model.get_weights(), models[0].get_weights())
    assert np.abs(models[0].get_weights()[0] - start[0]).max() > 1e-3


class Counting(keras.layers.Layer):
    def __init__(self):
        super().__init__()
        self.seen = keras.metrics.Mean(name="mean_input")
        self.total = keras.metrics.Sum(name="sum_input")

    def call(self, x):
        self.seen.update_state(x)
        self.total.update_state(x)
        return x


@pytest.mark.parametrize("num_ranks", long_but_last(1, 4))
def test_metrics_of_layers_appear_in_the_logs(use_ranks, num_ranks):
    use_ranks(num_ranks)
    x, y = make_data(24)
    wrapped = tnt.Model(functional(Counting()))
    wrapped.compile(**settings(keras.optimizers.SGD(0.1)))
    history = wrapped.fit(
        x, y, batch_size=12, epochs=1, verbose=0, validation_data=(x[:12], y[:12])
    ).history
    assert history["mean_input"][0] == pytest.approx(x.mean(), rel=1e-4)
    assert history["sum_input"][0] == pytest.approx(x.sum(), rel=1e-4)
    assert history["val_mean_input"][0] == pytest.approx(x[:12].mean(), rel=1e-4)
    assert wrapped.metrics_names == ["loss", "accuracy", "mean_input", "sum_input"]
    logs = wrapped.evaluate(x, y, batch_size=12, verbose=0, return_dict=True)
    assert list(logs) == wrapped.metrics_names
    assert [type(metric).__name__ for metric in wrapped.metrics] == [
        "SparseCategoricalAccuracy",
        "Mean",
        "Sum",
    ]


def test_written_back_model_is_saved_and_loaded_by_keras(use_ranks, tmp_path):
    use_ranks(2)
    model, _ = pair(
        lambda: functional(
            keras.layers.Dense(8), keras.layers.BatchNormalization(), keras.layers.Dropout(0.3)
        )
    )
    wrapped, _ = fit(model, 24, 12)
    x, _ = make_data(24)
    expected = wrapped.predict(x, verbose=0)
    model.save(tmp_path / "m.keras")
    np.testing.assert_allclose(
        keras.models.load_model(tmp_path / "m.keras").predict(x, verbose=0),
        expected,
        rtol=1e-4,
        atol=1e-6,
    )
    assert_same(wrapped.variables, model.get_weights())


def test_several_inputs_and_outputs(use_ranks):
    use_ranks(2)

    def build():
        a, b = keras.Input((2,), name="a"), keras.Input((3,), name="b")
        h = keras.layers.Dense(4)(keras.layers.Concatenate()([a, b]))
        return keras.Model(
            {"a": a, "b": b},
            {"p": keras.layers.Dense(1, name="p")(h), "q": keras.layers.Dense(2, name="q")(h)},
        )

    keras.utils.set_random_seed(0)
    model, expected = build(), build()
    expected.set_weights(model.get_weights())
    x, _ = make_data(24)
    data = {"a": x[:, :2], "b": x[:, 2:]}, {"p": x[:, :1], "q": x[:, 1:3]}
    expected.compile(
        keras.optimizers.SGD(0.1), loss={"p": "mse", "q": "mae"}, loss_weights={"p": 1.0, "q": 0.5}
    )
    expected.fit(*data, batch_size=12, epochs=2, shuffle=False, verbose=0)
    wrapped = tnt.Model(model)
    wrapped.compile(
        keras.optimizers.SGD(0.1), loss={"p": "mse", "q": "mae"}, loss_weights={"p": 1.0, "q": 0.5}
    )
    wrapped.fit(*data, batch_size=12, epochs=2, shuffle=False, verbose=0)
    assert_same(model.get_weights(), expected.get_weights())


class Product(keras.layers.Layer):
    def call(self, x):
        self.add_loss(ops.sum(x) ** 3)
        return x


class Uncountable(keras.layers.Layer):
    def __init__(self):
        super().__init__()
        self.auc = keras.metrics.AUC(name="auc")

    def call(self, x):
        return x


def test_errors_name_what_is_wrong(use_ranks, monkeypatch):
    use_ranks(1)
    with pytest.raises(ValueError, match=r"neither a mean nor a sum over the rows"):
        fit(functional(Product()), 24, 12)
    with pytest.raises(ValueError, match=r"'auc' \(AUC\) inside the model cannot be summed"):
        fit(functional(Uncountable()), 24, 12)
    monkeypatch.setattr(keras.backend, "backend", lambda: "tensorflow")
    with pytest.raises(ValueError, match="KERAS_BACKEND=jax before the first import of keras"):
        tnt.Model(functional())
