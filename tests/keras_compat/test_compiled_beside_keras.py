"""What `compile` makes of losses and metrics beside Keras: names in the logs, warnings, metrics
with a state, steep losses.
"""

import logging

import flax.linen as nn
import jax
import jax.experimental.sparse
import jax.numpy as jnp
import keras
import numpy as np
import pytest
from crashes import Crash, CrashAt

import tnt_jax as tnt
from tnt_jax.keras_compat.compiling.compiled import Layout
from tnt_jax.log import logger


class Binary(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(
            1, kernel_init=nn.initializers.constant(0.7), bias_init=nn.initializers.constant(-0.2)
        )(x)


def rows(num_rows=24):
    rng = np.random.default_rng(2)
    x = rng.normal(size=(num_rows, 3)).astype(np.float32)
    return (
        x,
        (x.sum(axis=1, keepdims=True) > 0).astype(np.float32),
        rng.random(num_rows).astype(np.float32),
    )


def keras_results(metrics, weighted_metrics):
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    model.set_weights([np.full((3, 1), 0.7), np.full(1, -0.2)])
    model.compile(
        "sgd",
        keras.losses.BinaryCrossentropy(from_logits=True),
        metrics=metrics,
        weighted_metrics=weighted_metrics,
    )
    x, y, weight = rows()
    return model.evaluate(x, y, sample_weight=weight, batch_size=12, verbose=0, return_dict=True)


def our_results(metrics, weighted_metrics=None):
    model = tnt.Model(Binary())
    model.compile(
        "sgd",
        tnt.losses.BinaryCrossentropy(from_logits=True),
        metrics=metrics,
        weighted_metrics=weighted_metrics,
    )
    x, y, weight = rows()
    return model.evaluate(x, y, sample_weight=weight, batch_size=12, verbose=0, return_dict=True)


@pytest.mark.parametrize(
    ("metrics", "weighted_metrics"),
    [
        (["accuracy"], ["accuracy"]),
        (["mae", "mae", "mse"], ["mse", "mae", "mae"]),
        (None, ["accuracy"]),
    ],
)
def test_metrics_of_one_name_all_stand_in_the_logs_by_the_names_of_keras(metrics, weighted_metrics):
    expected = keras_results(metrics, weighted_metrics)
    found = our_results(metrics, weighted_metrics)
    assert sorted(found) == sorted(expected)
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-5, err_msg=name)


def test_accuracy_of_logits_is_warned_of_by_itself_and_the_advice_holds(caplog):
    with caplog.at_level(logging.WARNING, logger="tnt_jax"):
        x, y, _ = rows()
        model = tnt.Model(Binary())
        model.compile("sgd", tnt.losses.BinaryCrossentropy(from_logits=True), metrics=["accuracy"])
        model.fit(x, y, batch_size=8, epochs=1, verbose=0)
    assert (
        "these look like logits. Pass tnt_jax.metrics.BinaryAccuracy(threshold=0.0)" in caplog.text
    )
    x, y, _ = rows()
    right = float(np.mean((x @ np.full((3, 1), 0.7) - 0.2 > 0) == y))
    assert our_results([tnt.metrics.BinaryAccuracy(threshold=0.0)])[
        "binary_accuracy"
    ] == pytest.approx(right)


@pytest.mark.parametrize("weighted", [False, True])
def test_an_ignored_class_of_a_weighted_metric_counts_as_in_keras(weighted):
    x, _, weight = rows()
    y, weight = np.arange(24) % 3, weight if weighted else None
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(3)])
    results = []
    for room, wrapped in ((keras, model), (tnt, tnt.Model(model))):
        metric = room.metrics.SparseCategoricalCrossentropy("ce", from_logits=True, ignore_class=1)
        wrapped.compile(
            "sgd",
            room.losses.SparseCategoricalCrossentropy(from_logits=True),
            weighted_metrics=[metric],
        )
        results.append(
            wrapped.evaluate(
                x, y, sample_weight=weight, batch_size=10, verbose=0, return_dict=True
            )["ce"]
        )
    np.testing.assert_allclose(results[1], results[0], rtol=1e-5)


class SumOfOutputs(tnt.metrics.Metric):
    """Written as one writes a metric for Keras: variables, `update_state`, `result`."""

    def __init__(self, scale=1.0, name="sum_of_outputs", **kwargs):
        super().__init__(name=name, **kwargs)
        self.scale = scale
        self.total = self.add_weight(name="total", initializer="zeros")

    def update_state(self, y_true, y_pred, sample_weight=None):
        weight = 1 if sample_weight is None else jnp.reshape(sample_weight, (-1, 1))
        self.total.assign_add(self.scale * jnp.sum(y_pred * weight))

    def result(self):
        return self.total


class LargestOutput(SumOfOutputs):
    def update_state(self, y_true, y_pred, sample_weight=None):
        self.total.assign(jnp.maximum(self.total.value, jnp.max(y_pred)))


class AbsoluteError(tnt.metrics.Mean):
    """Keras's idiom: a `Mean` that computes its values itself."""

    def update_state(self, y_true, y_pred, sample_weight=None):
        return super().update_state(jnp.abs(jnp.asarray(y_true) - y_pred), sample_weight)


def test_metrics_written_as_for_keras_train_with_exact_sums():
    x, y, weight = rows()
    pred = x @ np.full((3, 1), 0.7) - 0.2
    found = our_results(
        [SumOfOutputs(2.0), AbsoluteError("error")], [SumOfOutputs(name="of_weights")]
    )
    np.testing.assert_allclose(found["sum_of_outputs"], 2 * pred.sum(), rtol=1e-5)
    np.testing.assert_allclose(found["error"], np.abs(y - pred).mean(), rtol=1e-5)
    np.testing.assert_allclose(found["of_weights"], (pred[:, 0] * weight).sum(), rtol=1e-5)


def test_a_metric_whose_updates_do_not_add_up_is_refused():
    with pytest.raises(
        ValueError,
        match=r"The metric 'sum_of_outputs' cannot be computed from parts of the data: updates "
        r"of two",
    ):
        our_results([LargestOutput()])


def test_poisson_of_outputs_near_zero_trains_as_in_keras(use_ranks):
    """The loss is steep near 0, up to 1e7, so that one rounding grows to 1e-4 in two epochs.

    The rate is a power of two: its product with a gradient is exact, whether or not XLA fuses it
    with the subtraction. Then Keras and this package agree to the bit, while Keras differs by 7e-5
    from itself on the same batches in another order.
    """
    use_ranks(1)
    keras.utils.set_random_seed(1)
    rng = np.random.default_rng(0)
    x, y = (
        rng.normal(size=(256, 8)).astype("float32"),
        rng.poisson(0.3, size=(256, 3)).astype("float32"),
    )
    model = keras.Sequential(
        [
            keras.Input((8,)),
            keras.layers.Dense(16, activation="tanh"),
            keras.layers.Dense(3, activation="relu"),
        ]
    )
    weights = model.get_weights()

    def trained(trainer, optimizers, order):
        copied = keras.models.clone_model(model)
        copied.set_weights(weights)
        wrapped = trainer(copied)
        wrapped.compile(optimizers.SGD(0.125), loss="poisson")
        wrapped.fit(x[order], y[order], batch_size=32, epochs=2, shuffle=False, verbose=0)
        return copied.get_weights()

    in_order, backwards = np.arange(256), np.arange(256).reshape(8, 32)[:, ::-1].ravel()
    expected = trained(lambda copied: copied, keras.optimizers, in_order)
    found = trained(tnt.Model, tnt.optimizers, in_order)
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-6, atol=1e-6)
    # The data are such that a rounding shows.
    other = trained(lambda copied: copied, keras.optimizers, backwards)
    assert (
        max(np.abs(ours - theirs).max() for ours, theirs in zip(other, expected, strict=True))
        > 1e-6
    )


def two_outputs(structure):
    """A functional model with the outputs `p` and `q`, in a list or a dict."""
    keras.utils.set_random_seed(3)
    inputs = keras.Input((3,))
    p = keras.layers.Dense(1, name="p", kernel_regularizer="l2")(inputs)
    q = keras.layers.Dense(2, name="q")(inputs)
    return keras.Model(inputs, [p, q] if structure == "list" else {"q": q, "p": p})


_X, _P, _ = rows(27)  # The last batch has three rows.
_Q = np.stack([_X[:, 0], _X[:, 1] ** 2], axis=1)
PARTIAL = {
    "a loss by name of a list": ("list", {"loss": {"p": "mse", "q": "mae"}}, [_P, _Q]),
    "targets by name of a list": ("list", {"loss": ["mse", "mae"]}, {"p": _P, "q": _Q}),
    "factors by name": (
        "list",
        {"loss": {"p": "mse", "q": "mae"}, "loss_weights": {"p": 0.2, "q": 3.0}},
        [_P, _Q],
    ),
    "a loss for one of a list, one target": ("list", {"loss": [None, "mse"]}, _Q),
    "a loss for one of a dict": ("dict", {"loss": {"p": "mse"}}, {"p": _P, "q": _Q}),
    "a list of losses for an output": (
        "list",
        {"loss": ["mse", ["mse", "mae"]], "metrics": {"q": ["mae", "mse"]}},
        [_P, _Q],
    ),
    "a metric for one output": (
        "dict",
        {"loss": {"p": "mse", "q": ["mae"]}, "metrics": {"q": "mae"}},
        {"p": _P, "q": _Q},
    ),
    "metrics in a list for each output": (
        "list",
        {"loss": "mse", "metrics": [["mae"], ["mse", "mae"]], "weighted_metrics": ["mae", "mse"]},
        [_P, _Q],
    ),
}


def rows_of(targets, num_rows):
    return jax.tree.map(lambda rows: rows[:num_rows], targets)


@pytest.mark.parametrize("case", PARTIAL)
def test_losses_of_several_outputs_train_as_in_keras(case, four_ranks):
    structure, arguments, targets = PARTIAL[case]
    # One case has a last batch of three rows.
    num_rows = 27 if case == "metrics in a list for each output" else 24
    histories, models = [], []
    for wrap in (tnt.Model, lambda module: module):
        models.append(two_outputs(structure))
        model = wrap(models[-1])
        model.compile(keras.optimizers.SGD(0.05), **arguments)
        options = {"batch_size": 8, "epochs": 2, "verbose": 0, "shuffle": False}
        fitted = model.fit(_X[:num_rows], rows_of(targets, num_rows), **options)
        histories.append(fitted.history)
    assert set(histories[0]) == set(histories[1])
    for name, values in histories[0].items():
        np.testing.assert_allclose(values, histories[1][name], rtol=2e-5, err_msg=name)
    for mine, theirs in zip(*(model.get_weights() for model in models), strict=True):
        np.testing.assert_allclose(mine, theirs, atol=1e-5)


@pytest.mark.parametrize(
    ("asked", "named"),
    [
        ({"loss": {"output_a": "mse"}}, "loss"),
        ({"loss": "mse", "metrics": {"output_a": ["mae"]}}, "metrics"),
        ({"loss": ["mse"], "metrics": {"other": {"nested": "mae"}}}, "metrics"),
    ],
)
def test_a_single_output_is_logged_without_its_name_as_in_keras(asked, named):
    inputs = keras.Input((3,))
    module = keras.Model(inputs, keras.layers.Dense(1, name="output_a")(inputs))
    logs = []
    for model in (tnt.Model(module), module):
        model.compile("sgd", **asked)
        logs.append(model.evaluate(_X, _P, batch_size=27, verbose=0, return_dict=True))
    assert logs[0] == pytest.approx(logs[1], rel=1e-5)


class WithAuxiliary(nn.Module):
    other: str

    @nn.compact
    def __call__(self, x):
        p = nn.Dense(1, kernel_init=nn.initializers.constant(0.3))(x)
        return p, {"none": None, "array": x * 2, "dict": {"features": x, "norm": x**2}}[self.other]


@pytest.mark.parametrize(("other", "num_ranks"), [("none", 1), ("array", 4), ("dict", 4)])
def test_an_auxiliary_output_needs_no_target(other, num_ranks, use_ranks):
    use_ranks(num_ranks)
    model, plain = tnt.Model(WithAuxiliary(other)), tnt.Model(Binary())
    loss = ["mse", *[None] * (2 if other == "dict" else 1)]
    for fitted, given in ((model, loss), (plain, "mse")):
        fitted.compile(tnt.optimizers.SGD(0.1), given, metrics=["mae"] if fitted is plain else None)
        fitted.build((None, 3))
        fitted.set_weights([np.zeros(1), np.full((3, 1), 0.3)])
        fitted.fit(_X[:24], _P[:24], batch_size=8, epochs=2, verbose=0, shuffle=False)
    for mine, theirs in zip(model.get_weights(), plain.get_weights(), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-6)


def test_targets_that_are_missing_or_too_many_are_named():
    model = tnt.Model(two_outputs("list"))
    model.compile("sgd", loss={"p": "mse"}, metrics={"q": "mae"})
    with pytest.raises(ValueError, match="'q' has a loss or a metric, but the data has no target"):
        model.fit(_X, {"p": _P}, verbose=0)
    with pytest.raises(
        ValueError, match=r"2 output\(s\) \(p, q\), of which 2 have a loss or metri"
    ):
        model.fit(_X, [_P, _Q, _Q], verbose=0)
    model.compile("sgd", loss={"z": "mse"})
    with pytest.raises(ValueError, match=r"loss names the output\(s\) \['z'\]"):
        model.fit(_X, [_P, _Q], verbose=0)


class Penalised(keras.layers.Layer):
    def call(self, x):
        self.add_loss(keras.ops.mean(keras.ops.square(x)))
        return x


@pytest.mark.parametrize(("num_ranks", "y"), [(1, _P), (4, None)])
def test_added_losses_alone_train_as_in_keras(num_ranks, y, use_ranks):
    use_ranks(num_ranks)
    modules, losses = [], []
    for wrap in (tnt.Model, lambda module: module):
        keras.utils.set_random_seed(1)
        modules.append(keras.Sequential([keras.Input((3,)), keras.layers.Dense(2), Penalised()]))
        model = wrap(modules[-1])
        model.compile(keras.optimizers.SGD(0.1))
        fitted = model.fit(_X[:24], y if y is None else y[:24], batch_size=8, epochs=2, verbose=0,
                           shuffle=False)  # fmt: skip
        losses.append(fitted.history["loss"])
    np.testing.assert_allclose(*losses, rtol=1e-5)
    for mine, theirs in zip(*(module.get_weights() for module in modules), strict=True):
        np.testing.assert_allclose(mine, theirs, atol=1e-6)


class OverEpochs(keras.metrics.MeanSquaredError):
    def reset_state(self):
        pass


def fit_over_epochs(*callbacks, of_keras=False):
    network = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    network.set_weights([np.full((3, 1), 0.7), np.full(1, -0.2)])
    model = network if of_keras else tnt.Model(network)
    model.compile("sgd", "mse", metrics=[OverEpochs(name="kept"), "mae"])
    x, y, _ = rows()
    return model.fit(
        x, y, batch_size=8, epochs=3, shuffle=False, verbose=0, callbacks=list(callbacks)
    ).history


@pytest.mark.parametrize(("num_ranks", "save_freq", "crash_after"), [(1, "epoch", 7), (4, 2, 5)])
def test_a_metric_that_is_not_reset_goes_on_over_epochs_as_in_keras(
    num_ranks, save_freq, crash_after, use_ranks, tmp_path
):
    use_ranks(num_ranks)
    expected, history = fit_over_epochs(of_keras=True), fit_over_epochs()
    for name, values in expected.items():
        np.testing.assert_allclose(history[name], values, rtol=1e-5)
    backup = tnt.callbacks.BackupAndRestore(tmp_path, save_freq)
    with pytest.raises(Crash):
        fit_over_epochs(backup, CrashAt(crash_after))
    backup = tnt.callbacks.BackupAndRestore(tmp_path, save_freq)
    assert fit_over_epochs(backup, CrashAt(-1)) == history


def test_metrics_of_the_model_have_the_results_of_the_last_call():
    model = tnt.Model(Binary())
    metrics = [
        "mae",
        tnt.metrics.BinaryAccuracy(threshold=0.0),
        keras.metrics.AUC(from_logits=True),
    ]
    model.compile("sgd", tnt.losses.BinaryCrossentropy(from_logits=True), metrics=metrics)
    x, y, _ = rows()
    history = model.fit(x, y, epochs=2, verbose=0).history
    for metric in model.metrics:
        assert float(metric.result()) == pytest.approx(history[metric.name][-1], rel=1e-6)
    logs = model.evaluate(x, y, verbose=0, return_dict=True)
    for metric in model.metrics:
        assert float(metric.result()) == pytest.approx(logs[metric.name], rel=1e-6)


def two_inputs():
    inputs = [keras.Input((3,)), keras.Input((2,))]
    keras.utils.set_random_seed(2)
    return keras.Model(inputs, keras.layers.Dense(1)(keras.layers.Concatenate()(inputs)))


@pytest.mark.parametrize(("num_ranks", "is_compiled"), [(1, False), (4, True)])
def test_single_batches_of_two_inputs_are_inputs(num_ranks, is_compiled, use_ranks):
    use_ranks(num_ranks)
    module = two_inputs()
    model, inputs = tnt.Model(module), [_X, _Q]
    expected = np.asarray(module(inputs))
    if is_compiled:
        model.compile("sgd", "mse")
    for found in (model.predict_on_batch(inputs), model(inputs), model.predict(inputs, verbose=0)):
        np.testing.assert_allclose(found, expected, rtol=1e-5)


class StopAfter(keras.callbacks.Callback):
    def __init__(self, batch):
        super().__init__()
        self.batch, self.calls = batch, []

    def on_test_batch_end(self, batch, logs=None):
        self.calls.append(batch)
        self.model.stop_evaluating = batch == self.batch

    def on_predict_batch_end(self, batch, logs=None):
        self.calls.append(batch)
        self.model.stop_predicting = batch == self.batch


def test_a_callback_stops_evaluation_and_prediction_as_in_keras(four_ranks):
    module = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    results = []
    for model in (tnt.Model(module), module):
        model.compile("sgd", "mse")
        stop, shown = StopAfter(1), {"batch_size": 8, "verbose": 0}
        loss = model.evaluate(_X, _P, callbacks=[stop], **shown)
        outputs = model.predict(_X, callbacks=[stop], **shown)
        assert stop.calls == [0, 1, 0, 1]
        results.append((loss, outputs))
    assert results[0][0] == pytest.approx(results[1][0], rel=1e-5)
    assert results[0][1].shape == (16, 1)
    np.testing.assert_allclose(results[0][1], results[1][1], rtol=1e-5)


def test_the_bar_of_keras_shows_an_evaluation(capsys):
    model = tnt.Model(Binary())
    model.compile("sgd", "mse")
    model.evaluate(_X, _P, callbacks=[keras.callbacks.ProgbarLogger()], verbose=1)
    model.predict(_X, callbacks=[keras.callbacks.ProgbarLogger()], verbose=1)
    assert "1/1" in capsys.readouterr().out


class Subclassed(keras.Model):
    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(1, kernel_regularizer="l2")

    def call(self, x):
        return self.dense(x)


def test_a_subclassed_model_that_was_called_has_variables():
    module = Subclassed()
    module(_X[:1])
    model = tnt.Model(module)
    assert model.count_params() == 4
    assert len(model.trainable_weights) == 2
    model.set_weights([np.ones((3, 1)), np.zeros(1)])
    np.testing.assert_array_equal(module.get_weights()[0], np.ones((3, 1)))
    losses = []
    for trained in (model, module):
        module.set_weights([np.ones((3, 1)), np.zeros(1)])
        trained.compile(keras.optimizers.SGD(0.1), "mse")
        fitted = trained.fit(_X[:24], _P[:24], batch_size=8, epochs=2, verbose=0, shuffle=False)
        losses.append(fitted.history["loss"])
    np.testing.assert_allclose(*losses, rtol=1e-5)


@pytest.mark.parametrize(("kind", "num_ranks"), [("scipy", 4), ("jax", 1), ("tensorflow", 4)])
def test_sparse_batches_train_as_dense_ones(kind, num_ranks, use_ranks):
    use_ranks(num_ranks)

    def sparse(rows):
        if kind == "scipy":
            return pytest.importorskip("scipy.sparse").coo_matrix(rows)
        if kind == "jax":
            return jax.experimental.sparse.BCOO.fromdense(rows)
        return pytest.importorskip("tensorflow").sparse.from_dense(rows)

    thin = np.where(np.abs(_X) > 0.5, _X, 0).astype(np.float32)
    losses = []
    for make in (sparse, np.asarray):
        batches = [(make(thin[start : start + 8]), _P[start : start + 8]) for start in (0, 8, 16)]
        model = tnt.Model(Binary())
        model.compile(tnt.optimizers.SGD(0.1), "mse")
        losses.append(model.fit(batches, epochs=2, verbose=0).history["loss"])
    np.testing.assert_array_equal(*losses)
    with pytest.raises(ValueError, match="one sparse array"):
        model.fit(sparse(thin), _P, verbose=0)


def test_a_generator_that_ends_early_ends_training_with_a_warning(monkeypatch):
    def batches():
        yield from [(_X[:8], _P[:8]), (_X[8:16], _P[8:16])]

    texts = []
    monkeypatch.setattr(logger, "warning", lambda text, *args: texts.append(text % args))
    model = tnt.Model(Binary())
    model.compile("sgd", "mse")
    assert len(model.fit(batches(), epochs=3, verbose=0).history["loss"]) == 1
    assert any("ended after 1 of 3 epochs" in text and "steps_per_epoch" in text for text in texts)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"epochs": "3"}, "epochs must be a whole number, but is '3'"),
        (
            {"x": _X.tolist()},
            "x is a list of 27 arrays of shape \\(3,\\). As in Keras, a list means",
        ),
        ({"x": _X[:2].tolist(), "y": _P[:2, 0].astype(int)}, "x is a list of 2 arrays of shape"),
        ({"x": {"a": _X, "b": None}}, "x\\['b'\\] is None"),
        ({"class_weight": {2: 1.0, 7: 2.0}}, "class_weight names class 7, but"),
    ],
)
def test_mistakes_in_the_arguments_of_fit_are_named(arguments, message):
    model = tnt.Model(keras.Sequential([keras.Input((3,)), keras.layers.Dense(3)]))
    model.compile("sgd", tnt.losses.SparseCategoricalCrossentropy(from_logits=True))
    given = {"x": _X, "y": _P[:, 0].astype(int), "verbose": 0} | arguments
    with pytest.raises((ValueError, TypeError), match=message):
        model.fit(**given)


class OwnStep(keras.Model):
    def train_step(self, *args):
        return super().train_step(*args)


def test_an_overridden_train_step_is_named_without_a_loss_too():
    inputs = keras.Input((3,))
    with pytest.raises(ValueError, match="overrides train_step"):
        tnt.Model(OwnStep(inputs, keras.layers.Dense(1)(inputs))).compile("sgd")


def test_what_cannot_be_set_says_so():
    model = tnt.Model(Binary())
    for name in ("metrics_names", "metrics", "layers", "module"):
        with pytest.raises(AttributeError, match="has no setter"):
            setattr(model, name, [])


@pytest.mark.parametrize(
    ("outputs", "given", "expected"),
    [
        ({"age": 0, "sex": 0}, {"sex": 1, "age": 2}, [2, 1]),
        ({"age": 0, "sex": 0}, {"label_of_sex": 1, "x_age": 2}, None),
        ({"age": 0, "sex": 0}, {"agee": 2, "sex": 1}, None),
        ((0, 0), {"age": 2, "sex": 1}, None),
        ({"a": {"b": 0, "c": 0}, "d": 0}, {"a": {"b": 1, "c": 2}, "d": 3}, [1, 2, 3]),
        ({"a": {"b": 0, "c": 0}, "d": 0}, {"a": {"c": 2}, "d": 3}, [None, 2, 3]),
        ((0, {"b": 0}), (1, {"c": 2}), [1, 2]),
        (0, {"label": 1}, [1]),
    ],
)
def test_names_of_several_outputs_must_be_known(outputs, given, expected):
    layout = Layout(outputs)
    needed = [True] * len(layout.keys)
    if expected is not None:
        assert layout.data(given, needed, "target") == expected
        return
    with pytest.raises(ValueError, match=r"but the data has a dict of .* target\(s\)"):
        layout.data(given, needed, "target")
