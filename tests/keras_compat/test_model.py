"""The facade: what it accepts, what it refuses, and what it returns."""

import copy
import pickle
from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.core import freeze

import tnt_jax as tnt

LOGITS_LOSS = {"loss": "sparse_categorical_crossentropy"}


pytestmark = pytest.mark.usefixtures("four_ranks")


def make_model(module=None, **compile_arguments):
    model = tnt.Model(module or nn.Dense(3))
    model.compile(
        **(
            {"optimizer": "sgd", "loss": tnt.losses.SparseCategoricalCrossentropy(from_logits=True)}
            | compile_arguments
        )
    )
    return model


def data(num_examples=24, *, labels=3):
    rng = np.random.default_rng(0)
    return rng.normal(size=(num_examples, 5)).astype(np.float32), rng.integers(
        0, labels, num_examples
    )


def test_training_and_evaluation_need_compile():
    model = tnt.Model(nn.Dense(3))
    with pytest.raises(RuntimeError, match="must be compiled first"):
        model.fit(*data())
    with pytest.raises(RuntimeError, match="must be compiled first"):
        model.evaluate(*data())
    assert model.predict(data()[0], verbose=0).shape == (24, 3)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"optimizer": "sdg"}, "sgd"),
        ({"loss": "mean_square_error"}, "mean_squared_error"),
    ],
)
def test_unknown_names_are_refused_with_the_known_ones(arguments, message):
    with pytest.raises(ValueError, match=message):
        make_model(**arguments)


def test_training_needs_a_loss_and_evaluation_does_not():
    model = make_model(loss=None, metrics=["accuracy"])
    with pytest.raises(ValueError, match="no loss to train by"):
        model.fit(*data(), verbose=0)
    assert set(model.evaluate(*data(), verbose=0, return_dict=True)) == {"loss", "accuracy"}


def test_an_unknown_metric_is_refused_with_the_known_ones():
    with pytest.raises(ValueError, match="accuracy"):
        make_model(metrics=["acuracy"]).fit(*data(), verbose=0)


def test_a_class_or_another_object_is_no_model():
    with pytest.raises(TypeError, match=r"got the class Dense. Create one: Dense\(...\)"):
        tnt.Model(nn.Dense)
    with pytest.raises(TypeError, match=r"builtins\.dict"):
        tnt.Model({})


def test_logits_for_a_loss_of_probabilities_are_refused_with_both_remedies():
    with pytest.raises(ValueError, match=r"(?s)from_logits=True.*softmax"):
        make_model(**LOGITS_LOSS).fit(*data(), verbose=0)


def test_probabilities_for_a_loss_of_probabilities_train():
    class Probabilities(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.softmax(nn.Dense(3)(x))

    history = (
        make_model(Probabilities(), **LOGITS_LOSS).fit(*data(), epochs=3, verbose=0).history["loss"]
    )
    assert history[-1] < history[0]


def test_a_label_out_of_range_is_named():
    x, y = data()
    y[17] = 3
    with pytest.raises(ValueError, match=r"\[0, 3\).*row 17 .*holds 3"):
        make_model().fit(x, y, shuffle=False, verbose=0)


def test_y_beside_a_dataset_and_mismatching_lengths_are_refused():
    x, y = data()
    with pytest.raises(ValueError, match="y was passed with a list"):
        make_model().fit([(x, y)], y, verbose=0)
    with pytest.raises(ValueError, match=r"\[0\]: 24, \[1\]: 23"):
        make_model().fit(x, y[:-1], verbose=0)


def test_missing_targets_are_refused():
    with pytest.raises(ValueError, match="holds no targets"):
        make_model().fit(data()[0], verbose=0)


def test_nan_in_the_inputs_is_reported(caplog):
    x, y = data()
    x[3, 2] = np.nan
    import logging

    records = []
    handler = logging.Handler()
    handler.emit = records.append
    logging.getLogger("tnt_jax").addHandler(handler)
    try:
        history = make_model().fit(x, y, verbose=0)
    finally:
        logging.getLogger("tnt_jax").removeHandler(handler)
    assert np.isnan(history.history["loss"][0])
    assert any("training loss of epoch 1 is nan" in record.getMessage() for record in records)


def test_evaluate_returns_a_number_a_list_or_a_dict():
    x, y = data()
    assert isinstance(make_model().evaluate(x, y, verbose=0), float)
    model = make_model(metrics=["accuracy"])
    values = model.evaluate(x, y, verbose=0)
    named = model.evaluate(x, y, verbose=0, return_dict=True)
    assert model.metrics_names == ["loss", "accuracy"] == list(named)
    assert values == list(named.values())


def test_variables_are_ready_for_module_apply_and_can_be_given():
    x, y = data()
    module = nn.Dense(3)
    variables = module.init(jax.random.key(7), x[:1])
    model = tnt.Model(module, variables=variables)
    model.compile(optax.sgd(0.1), loss=tnt.losses.SparseCategoricalCrossentropy(from_logits=True))
    np.testing.assert_allclose(model.predict(x, verbose=0), module.apply(variables, x), rtol=1e-6)
    before = model.variables
    model.fit(x, y, verbose=0)
    np.testing.assert_allclose(
        model.predict(x, verbose=0), module.apply(model.variables, x), rtol=1e-5
    )
    np.testing.assert_array_equal(before["params"]["kernel"], variables["params"]["kernel"])


def test_fresh_variables_are_those_of_module_init():
    model = tnt.Model(nn.Dense(3), seed=11)
    model.build((None, 5))
    jax.tree.map(
        np.testing.assert_array_equal,
        model.variables,
        nn.Dense(3).init(jax.random.key(11), np.zeros((1, 5))),
    )


def test_variables_without_params_are_refused():
    with pytest.raises(ValueError, match=r"collection 'params'.*\['kernel'\]"):
        tnt.Model(nn.Dense(3), variables={"kernel": np.zeros((5, 3))})


def test_summary_lists_every_array(capsys):
    model = tnt.Model(nn.Dense(3))
    with pytest.raises(RuntimeError, match="no variables yet"):
        model.summary()
    model.build((None, 5))
    model.summary()
    text = capsys.readouterr().out
    assert "kernel" in text
    assert "(5, 3)" in text
    assert "18 values in 2 arrays" in text


@pytest.mark.parametrize(
    "flag", ["train", "training", "is_training", "deterministic", "use_running_average"]
)
def test_the_mode_is_found_by_the_name_of_the_argument(flag):
    seen = []

    def call(self, x, **kwargs):
        seen.append(kwargs[flag])
        return nn.Dense(3, parent=self)(x)

    namespace = {}
    exec(
        f"def call(self, x, {flag}):\n    seen.append({flag})\n    return Dense(3)(x)",
        {"seen": seen, "Dense": nn.Dense},
        namespace,
    )
    module = type("Net", (nn.Module,), {"__call__": nn.compact(namespace["call"])})()
    x, y = data()
    model = make_model(module)
    model.predict(x, verbose=0)
    inference = flag in ("deterministic", "use_running_average")
    assert set(seen) == {inference}
    seen.clear()
    model.fit(x, y, verbose=0)
    assert (not inference) in seen


def test_dict_and_tuple_inputs_and_several_outputs():
    class TwoInTwoOut(nn.Module):
        @nn.compact
        def __call__(self, left, right):
            both = jnp.concatenate([left, right], axis=-1)
            return {"class": nn.Dense(3)(both), "value": nn.Dense(1)(both)}

    x, y = data()
    targets = {"class": y, "value": x[:, :1]}
    losses = {"class": tnt.losses.SparseCategoricalCrossentropy(from_logits=True), "value": "mse"}
    results = []
    for inputs in ({"left": x, "right": x[:, :2]}, (x, x[:, :2])):
        model = make_model(
            TwoInTwoOut(),
            loss=losses,
            loss_weights={"class": 2.0, "value": 0.5},
            metrics={"class": ["accuracy"]},
        )
        model.fit(inputs, targets, batch_size=8, epochs=2, shuffle=False, verbose=0)
        results.append(model.history.history)
    assert results[0] == results[1]
    history = results[0]
    assert set(history) == {"loss", "class_loss", "value_loss", "class_accuracy"}
    assert history["loss"][0] == pytest.approx(
        2 * history["class_loss"][0] + 0.5 * history["value_loss"][0], rel=1e-5
    )


def test_class_weights_multiply_sample_weights():
    x, y = data()
    weight = np.linspace(0.5, 1.5, len(y)).astype(np.float32)
    table = {0: 3.0, 2: 0.5}
    combined = weight * np.array([table.get(label, 1.0) for label in y], np.float32)
    by_class = (
        make_model()
        .fit(x, y, class_weight=table, sample_weight=weight, epochs=2, verbose=0)
        .history
    )
    by_row = make_model().fit(x, y, sample_weight=combined, epochs=2, verbose=0).history
    np.testing.assert_allclose(by_class["loss"], by_row["loss"], rtol=1e-6)
    with pytest.raises(ValueError, match="class indices to weights"):
        make_model().fit(x, y, class_weight=[1, 2], verbose=0)


def test_validation_runs_when_it_is_due():
    x, y = data()
    fit = partial(make_model().fit, x, y, epochs=4, validation_data=(x, y), verbose=0)
    every_other = fit(validation_freq=2).history
    listed = fit(validation_freq=[1, 4]).history
    assert len(every_other["val_loss"]) == 2
    assert len(listed["val_loss"]) == 2
    assert len(every_other["loss"]) == 4


@pytest.mark.parametrize("share", [-0.5, 1.5])
def test_a_validation_split_that_leaves_nothing_is_refused(share):
    with pytest.raises(ValueError, match="validation_split"):
        make_model().fit(*data(), validation_split=share, verbose=0)


def test_stop_training_ends_after_the_step():
    class StopAt(tnt.callbacks.Callback):
        steps = 0

        def on_train_batch_end(self, batch, logs=None):
            self.steps += 1
            self.model.stop_training = batch == 2

    stop = StopAt()
    make_model().fit(*data(), batch_size=4, epochs=3, callbacks=[stop], verbose=0)
    assert stop.steps == 3


def test_initial_epoch_continues_the_count():
    history = make_model().fit(*data(), epochs=5, initial_epoch=3, verbose=0)
    assert history.epoch == [3, 4]


@pytest.mark.parametrize(("verbose", "lines"), [(0, 0), (2, 3)])
def test_verbose_prints_a_line_per_epoch(verbose, lines, capsys):
    make_model(metrics=["accuracy"]).fit(*data(), epochs=3, verbose=verbose)
    printed = capsys.readouterr().out.splitlines()
    assert len(printed) == lines
    if lines:
        assert "examples/s" in printed[0]
        assert "accuracy:" in printed[0]


def test_an_unknown_verbosity_is_refused():
    with pytest.raises(ValueError, match="verbose must be"):
        make_model().fit(*data(), verbose=7)


def test_recompiling_keeps_the_weights_and_restarts_the_optimizer():
    x, y = data()
    model = make_model(optimizer=optax.sgd(0.1, momentum=0.9))
    model.fit(x, y, epochs=2, verbose=0)
    weights = model.variables
    model.compile(optax.sgd(0.0), loss=tnt.losses.SparseCategoricalCrossentropy(from_logits=True))
    model.fit(x, y, verbose=0)
    jax.tree.map(np.testing.assert_array_equal, model.variables, weights)


def test_sown_losses_are_added_once():
    class Penalised(nn.Module):
        @nn.compact
        def __call__(self, x):
            layer = nn.Dense(3)
            y = layer(x)
            self.sow("losses", "l2", 0.5 * jnp.sum(layer.variables["params"]["kernel"] ** 2))
            return y

    x, y = data(29)
    module = Penalised()
    variables = {"params": module.init(jax.random.key(0), x[:1])["params"]}

    def loss_of(params, rows):
        logits, sown = module.apply({"params": params}, x[rows], mutable=["losses"])
        cross_entropy = optax.softmax_cross_entropy_with_integer_labels(logits, y[rows]).mean()
        return cross_entropy + sum(jax.tree.leaves(sown["losses"]))

    params = variables["params"]
    for rows in (slice(0, 15), slice(15, 29)):
        grads = jax.jit(jax.grad(partial(loss_of, rows=rows)))(params)
        params = jax.tree.map(lambda p, g: p - 0.1 * np.asarray(g), params, grads)
    model = tnt.Model(module, variables=variables)
    model.compile(optax.sgd(0.1), loss=tnt.losses.SparseCategoricalCrossentropy(from_logits=True))
    model.fit(x, y, batch_size=15, shuffle=False, verbose=0)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), model.variables["params"], params
    )


def test_a_function_of_single_rows_is_a_loss():
    def absolute(y_true, y_pred):
        return jnp.abs(y_pred[:, 0] - y_true)

    x, y = data()
    history = make_model(loss=absolute).fit(x, y.astype(np.float32), epochs=2, verbose=0).history
    expected = (
        make_model(loss="mae", module=nn.Dense(1))
        .fit(x, y.astype(np.float32), epochs=2, verbose=0)
        .history
    )
    assert len(history["loss"]) == len(expected["loss"])
    assert history["loss"][1] < history["loss"][0]


def test_a_slow_source_is_reported_once(capsys):
    import time

    tnt.shutdown()
    x, y = data()

    class Slow:
        def __iter__(self):
            for _ in range(4):
                time.sleep(0.4)
                yield x, y

    model = make_model()
    model.fit([(x, y)], verbose=0)
    model.fit(Slow(), epochs=2, verbose=0)
    warnings = capsys.readouterr().err
    assert warnings.count("Training waits for its data") == 1
    assert "num_parallel_calls" in warnings


def test_a_metric_called_loss_does_not_replace_the_loss():
    x, y = np.ones((8, 4), np.float32), np.ones((8, 1), np.float32)
    module = nn.Dense(1, kernel_init=nn.initializers.ones)

    def objective(params, batch, rngs):
        error = ((module.apply({"params": params}, batch.inputs) - batch.targets) ** 2)[:, 0]
        return error + 5, {"loss": error}

    model = tnt.Model(module)
    model.compile("sgd", objective=objective)
    assert model.evaluate(x, y, verbose=0, return_dict=True) == {"loss": 14.0, "loss_1": 9.0}
    assert model.metrics_names == ["loss", "loss_1"]


def test_a_compile_that_raises_changes_nothing():
    model = tnt.Model(nn.Dense(1), sync=tnt.LocalSteps(every=2))
    with pytest.raises(ValueError, match="gradient_accumulation_steps"):
        model.compile(tnt.optimizers.SGD(0.1, gradient_accumulation_steps=2), "mse")
    assert not model.compiled


class AtEnd(tnt.callbacks.Callback):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def on_epoch_end(self, epoch, logs=None):
        self.function(self.model)


def test_compile_is_refused_within_fit():
    model = make_model()
    with pytest.raises(RuntimeError, match="compile was called while fit runs"):
        model.fit(*data(), verbose=0, callbacks=[AtEnd(lambda model: model.compile("sgd", "mse"))])
    model.fit(*data(), verbose=0)


def test_fit_within_fit_has_a_history_of_its_own():
    inner = []
    model = make_model()
    again = AtEnd(lambda model: inner.append(model.fit(*data(), epochs=1, verbose=0)))
    history = model.fit(*data(), epochs=2, verbose=0, callbacks=[again])
    assert history.epoch == [0, 1]
    assert [each.epoch for each in inner] == [[0], [0]]


class TwoOutputs(nn.Module):
    @nn.compact
    def __call__(self, x):
        y = nn.Dense(1)(x)
        return y, jnp.mean(y)


def test_models_refuse_what_they_cannot_do_in_words():
    x, y = np.ones((8, 4), np.float32), np.ones((8, 1), np.float32)
    model = tnt.Model(TwoOutputs())
    model.compile("sgd", ["mse", None])
    with pytest.raises(ValueError, match=r"the output\[1\] is a scalar"):
        model.fit(x, y, verbose=0)
    with pytest.raises(ValueError, match=r"in \(None, None, 4\) dimension 1 is None"):
        tnt.Model(nn.Dense(1)).build((None, None, 4))
    for duplicate in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match="clone_model"):
            duplicate(model)


def test_sizes_of_numpy_build_a_model():
    model = tnt.Model(nn.Dense(1))
    model.build((None, np.int64(4)))
    assert model.variables["params"]["kernel"].shape == (4, 1)


@pytest.mark.parametrize("options", [{"steps_per_execution": 2}, {"on_nan": "skip"}])
def test_frozen_dicts_of_variables_are_trained(options):
    class Normed(nn.Module):
        @nn.compact
        def __call__(self, x, train=False):
            return nn.Dense(1)(nn.BatchNorm(use_running_average=not train)(x))

    x, y = np.arange(32, dtype=np.float32).reshape(8, 4), np.ones((8, 1), np.float32)
    variables = Normed().init(jax.random.key(0), x)
    trained = []
    for given in (variables, freeze(variables)):
        model = tnt.Model(Normed(), variables=given)
        model.compile("sgd", "mse", **options)
        model.fit(x, y, batch_size=4, verbose=0)
        trained.append(model.variables)
    jax.tree.map(np.testing.assert_array_equal, *trained)
