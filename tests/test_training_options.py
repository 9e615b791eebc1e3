"""Options of training: accumulation, several steps in one program, own objectives, views."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import keras
import numpy as np
import optax
import pytest
from reference_trainer import Net, make_data

import tnt_jax as tnt
from tnt_jax.data.sources import HostBatch
from tnt_jax.execution import Placed, choose_num_steps, in_groups
from tnt_jax.log import logger
from tnt_jax.step import Batch

TOLERANCE = 1e-5


def crossentropy():
    return tnt.losses.SparseCategoricalCrossentropy(from_logits=True)


def fit(net, optimizer, num_examples=24, size=8, *, epochs=2, callbacks=None, compile_options=None, **options):
    x, y, _ = make_data(num_examples)
    model = tnt.Model(net, **options)
    model.compile(optimizer, loss=crossentropy(), metrics=["accuracy"], **(compile_options or {}))
    history = model.fit(x, y, batch_size=size, epochs=epochs, shuffle=False, verbose=0, callbacks=callbacks).history
    return model, history


def assert_close(actual, expected, tolerance=TOLERANCE):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance), actual, expected)


# ---- Gradient accumulation ----


def train_accumulating(optimizer, num_examples, size, num_steps, *, epochs=2):
    """Keras's rule by hand: every `num_steps`-th step updates by the mean gradient, also across epochs."""
    x, y, _ = make_data(num_examples)
    net = Net()
    params = net.init(jax.random.key(0), x[:1], train=False)["params"]
    opt_state, total, step = optimizer.init(params), jax.tree.map(jnp.zeros_like, params), 0

    def loss_of(params, x, y):
        return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(net.apply({"params": params}, x, train=True), y))

    for _ in range(epochs):
        for start in range(0, num_examples, size):
            grads = jax.grad(loss_of)(params, x[start : start + size], y[start : start + size])
            total, step = jax.tree.map(jnp.add, total, grads), step + 1
            if step % num_steps == 0:
                updates, opt_state = optimizer.update(jax.tree.map(lambda g: g / num_steps, total), opt_state, params)
                params, total = optax.apply_updates(params, updates), jax.tree.map(jnp.zeros_like, total)
    return params


@pytest.mark.parametrize("num_ranks", [1, 4])
@pytest.mark.parametrize("num_steps", [2, 5])
def test_accumulation_updates_by_the_mean_gradient(use_ranks, num_ranks, num_steps):
    use_ranks(num_ranks)
    # 4 batches an epoch, the last of 3 rows; 5 steps do not divide the 8 of two epochs.
    model, _ = fit(Net(), tnt.optimizers.SGD(0.1, momentum=0.9, gradient_accumulation_steps=num_steps), 27)
    expected = train_accumulating(optax.sgd(0.1, momentum=0.9), 27, 8, num_steps)
    assert_close(model.variables["params"], expected)


def test_accumulation_equals_that_of_keras(use_ranks):
    use_ranks(2)
    models = []
    for _ in range(2):
        keras.utils.set_random_seed(0)
        models.append(keras.Sequential([keras.Input((6,)), keras.layers.Dense(8, activation="relu"), keras.layers.Dense(3)]))
    x, y, _ = make_data(27)
    make_optimizer = lambda: keras.optimizers.Adam(0.01, gradient_accumulation_steps=3)  # noqa: E731
    settings = {"loss": keras.losses.SparseCategoricalCrossentropy(from_logits=True)}
    models[0].compile(make_optimizer(), **settings)
    models[0].fit(x, y, batch_size=8, epochs=2, shuffle=False, verbose=0)
    wrapped = tnt.Model(models[1])
    wrapped.compile(make_optimizer(), **settings)
    wrapped.fit(x, y, batch_size=8, epochs=2, shuffle=False, verbose=0)
    assert_close(models[1].get_weights(), models[0].get_weights())


def test_gradients_are_exchanged_in_the_branch_that_updates_only(use_ranks):
    use_ranks(2)
    model, _ = fit(Net(), "sgd")
    x, y, _ = make_data(8)
    trainer = model._trainer
    model.compile(tnt.optimizers.SGD(0.1, gradient_accumulation_steps=4), loss=crossentropy())
    model.fit(x, y, batch_size=8, verbose=0)
    placed = Placed(trainer._place(Batch(x, y)), 8)
    text = trainer._train_step.lower(trainer.state, trainer._zero_sums(placed), placed.batch).as_text()
    outside, _, inside = text.partition("stablehlo.case")
    num_params = len(jax.tree.leaves(model.variables["params"]))
    # Outside are the loss of the batch and its one term.
    assert outside.count("stablehlo.all_reduce") == 2
    assert inside.count("stablehlo.all_reduce") == num_params


def test_accumulation_needs_at_least_two_steps():
    with pytest.raises(ValueError, match="gradient_accumulation_steps must be at least 2 or None, got 1"):
        tnt.optimizers.SGD(0.1, gradient_accumulation_steps=1)


# ---- Several steps in one program ----


class Batches(tnt.callbacks.Callback):
    def __init__(self):
        super().__init__()
        self.begun, self.ended, self.losses = [], [], []

    def on_train_batch_begin(self, batch, logs=None):
        self.begun.append(batch)

    def on_train_batch_end(self, batch, logs=None):
        self.ended.append(batch)
        self.losses.append(logs["loss"])


@pytest.mark.parametrize("num_ranks", [1, 4])
def test_steps_in_one_program_equal_single_steps(use_ranks, num_ranks):
    use_ranks(num_ranks)
    # 7 batches, the last of 3 rows: two programs of 3 steps, and one step.
    net = Net(batch_norm=True, dropout=0.3, axis_name="data")
    single, fused = Batches(), Batches()
    expected, expected_history = fit(net, "adam", 51, callbacks=[single])
    model, history = fit(net, "adam", 51, callbacks=[fused], compile_options={"steps_per_execution": 3})
    assert_close(model.variables, expected.variables)
    assert_close(history, expected_history)
    assert (fused.begun, fused.ended) == ([0, 3, 6] * 2, [2, 5, 6] * 2)
    assert_close(fused.losses, [single.losses[index] for index in (2, 5, 6, 9, 12, 13)])


class InferenceBatches(keras.callbacks.Callback):
    def __init__(self):
        super().__init__()
        self.calls, self.losses = [], []

    def on_test_batch_begin(self, batch, logs=None):
        self.calls.append(("begin", batch))

    def on_test_batch_end(self, batch, logs=None):
        self.calls.append(("end", batch))
        self.losses.append(logs["loss"])

    def on_predict_batch_begin(self, batch, logs=None):
        self.calls.append(("predict begin", batch))

    def on_predict_batch_end(self, batch, logs=None):
        self.calls.append(("predict end", batch))


def infer(model, x, y, recorder):
    values = model.evaluate(x, y, batch_size=8, verbose=0, callbacks=[recorder])
    return values, model.predict(x, batch_size=8, verbose=0, callbacks=[recorder])


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_evaluation_and_prediction_run_several_steps_in_one_program(use_ranks, num_ranks):
    use_ranks(num_ranks)
    x, y, _ = make_data(51)
    model, fused, single = tnt.Model(Net(batch_norm=True)), InferenceBatches(), InferenceBatches()
    model.compile("sgd", loss=crossentropy(), metrics=["accuracy"])
    expected = infer(model, x, y, single)
    model.compile("sgd", loss=crossentropy(), metrics=["accuracy"], steps_per_execution=3)
    assert_close(infer(model, x, y, fused), expected)
    assert_close(fused.losses, [single.losses[index] for index in (2, 5, 6)])
    groups = [("begin", 0), ("end", 2), ("begin", 3), ("end", 5), ("begin", 6), ("end", 6)]
    assert fused.calls == groups + [(f"predict {moment}", batch) for moment, batch in groups]


class Convolving(nn.Module):
    @nn.compact
    def __call__(self, x, train):
        x = nn.Conv(3, (3,))(x[..., None])
        return nn.Dense(3)(nn.Dropout(0.3, deterministic=not train)(x.reshape(len(x), -1)))


def test_convolutions_on_a_cpu_run_step_by_step(use_ranks, caplog, monkeypatch):
    use_ranks(2)
    expected, expected_history = fit(Convolving(), "sgd", 51)
    monkeypatch.setattr(logger, "propagate", True)
    with caplog.at_level("INFO", logger="tnt_jax"):
        model, history = fit(Convolving(), "sgd", 51, compile_options={"steps_per_execution": 3})
        fit(Net(), "sgd", 51, compile_options={"steps_per_execution": 3})
        seen = InferenceBatches()
        infer(model, *make_data(51)[:2], seen)
    assert len(seen.losses) == 7
    # A record comes once for each handler between the logger and the root.
    assert len({id(record) for record in caplog.records if "Steps run one by one" in record.message}) == 1
    assert not hasattr(model._trainer._train_steps, "lower"), "No program of several steps is compiled."
    jax.tree.map(np.testing.assert_array_equal, model.variables, expected.variables)
    assert history == expected_history


def test_accumulation_within_a_program(use_ranks):
    use_ranks(2)
    model, _ = fit(Net(), tnt.optimizers.SGD(0.1, gradient_accumulation_steps=2), 56, compile_options={"steps_per_execution": 3})
    assert_close(model.variables["params"], train_accumulating(optax.sgd(0.1), 56, 8, 2))


def test_auto_chooses_after_timed_steps_and_trains_alike(use_ranks):
    use_ranks(2)
    steps = Batches()
    expected, _ = fit(Net(), "sgd", 400, 8, epochs=1)
    model, _ = fit(Net(), "sgd", 400, 8, epochs=1, callbacks=[steps], compile_options={"steps_per_execution": "auto"})
    assert_close(model.variables, expected.variables)
    assert steps.ended[:16] == list(range(16))
    assert steps.ended[-1] == 49
    assert model._steps_per_execution >= 1


@pytest.mark.parametrize(
    ("step_s", "available", "expected"),
    [(1.0, 100, 1), (0.005, 100, 1), (0.003, 100, 2), (0.0006, 100, 16), (1e-5, 100, 32), (1e-5, None, 128), (1e-5, 1, 1)],
)
def test_choose_num_steps(step_s, available, expected):
    assert choose_num_steps(step_s, available=available) == expected


def test_groups_hold_equal_shapes_and_keep_the_order():
    sizes = [4, 4, 4, 4, 2, 2, 4, 4]
    items = [HostBatch(np.full((size, 1), index), None, size) for index, size in enumerate(sizes)]
    groups = [[int(item.data[0, 0]) for item in group] for group in in_groups(iter(items), 3)]
    assert groups == [[0, 1, 2], [3], [4], [5], [6], [7]]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"steps_per_execution": 0}, "steps_per_execution must be a number from 1 on or 'auto', but is 0"),
        ({"run_eagerly": True}, "jax.disable_jit"),
        ({"jit_compile": "no"}, "jit_compile must be True, False or 'auto'"),
        ({"objective": lambda params, batch, rngs: 0}, "or an objective"),
    ],
)
def test_invalid_options_of_compile(options, message):
    with pytest.raises(ValueError, match=message):
        tnt.Model(Net()).compile("sgd", loss="mse", **options)


# ---- An objective of the user's own ----


@pytest.mark.parametrize("num_ranks", [1, 4])
def test_objective_equals_the_loss_it_spells_out(use_ranks, num_ranks):
    use_ranks(num_ranks)
    net = Net(dropout=0.3)
    x, y, weight = make_data(27)

    def objective(params, batch, rngs):
        logits = net.apply({"params": params}, batch.inputs, train=bool(rngs), rngs=rngs)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch.targets)
        return losses, {"accuracy": (jnp.argmax(logits, -1) == batch.targets).astype(jnp.float32)}

    results = []
    for settings in ({"loss": crossentropy(), "metrics": ["accuracy"]}, {"objective": objective}):
        model = tnt.Model(net)
        model.compile(optax.sgd(0.1), **settings)
        history = model.fit(x, y, batch_size=8, epochs=2, shuffle=False, verbose=0, sample_weight=weight).history
        results.append((history, model.variables, model.evaluate(x, y, batch_size=10, verbose=0, return_dict=True)))
    assert_close(results[1], results[0])
    assert model.metrics_names == ["loss", "accuracy"]


def test_objective_with_the_models_own_forward_pass_keeps_model_state(use_ranks):
    use_ranks(4)
    x, y, _ = make_data(27)
    net = Net(batch_norm=True, dropout=0.3, axis_name="data")

    def objective(params, batch, rngs, apply):
        return optax.softmax_cross_entropy_with_integer_labels(apply(params, batch.inputs), batch.targets)

    model = tnt.Model(net)
    model.compile(optax.sgd(0.1), objective=objective)
    model.fit(x, y, batch_size=8, epochs=1, verbose=0)
    means = model.variables["batch_stats"]["BatchNorm_0"]["mean"]
    assert np.abs(means).max() > 1e-3


@pytest.mark.parametrize(
    ("objective", "error", "message"),
    [
        (lambda params, batch, rngs: jnp.mean(batch.inputs), ValueError, r"one value per row, shape \(4,\)"),
        (lambda params, batch, rngs: (batch.inputs, 3), TypeError, "a dict of metrics"),
        (lambda params, batch, rngs: (batch.inputs, {"m": jnp.zeros(3)}), ValueError, r"but m has the shape \(3,\)"),
    ],
)
def test_objective_must_give_values_per_row(use_ranks, objective, error, message):
    use_ranks(2)
    x, y, _ = make_data(8)
    model = tnt.Model(Net())
    model.compile("sgd", objective=objective)
    with pytest.raises(error, match=message):
        model.fit(x, y, batch_size=8, verbose=0)


# ---- Views ----


class Doubled(nn.Module):
    """Computes with the variables of `Net` in another way, and for inference only."""

    @nn.compact
    def __call__(self, x):
        x = nn.relu(nn.Dense(16)(x))
        return 2 * nn.Dense(3)(x)


def test_view_follows_the_variables_of_its_model(use_ranks):
    use_ranks(2)
    model = tnt.Model(Net())
    view = model.view(Doubled())
    x, y, _ = make_data(24)
    with pytest.raises(RuntimeError, match="made from has no variables yet"):
        view.predict(x, verbose=0)
    model.compile("sgd", loss=crossentropy())
    for _ in range(2):
        model.fit(x, y, batch_size=8, verbose=0)
        assert_close(view.predict(x, verbose=0), 2 * model.predict(x, verbose=0))
    view.compile(loss=crossentropy())
    assert view.evaluate(x, y, verbose=0) != model.evaluate(x, y, verbose=0)
    with pytest.raises(RuntimeError, match="A view cannot be trained"):
        view.fit(x, y)
    model.fit(x, y, batch_size=8, verbose=0)


def test_view_of_a_keras_model_over_shared_layers(use_ranks):
    use_ranks(2)
    inputs = keras.Input((6,))
    hidden = keras.layers.Dense(4)(inputs)
    model = tnt.Model(keras.Model(inputs, keras.layers.Dense(3)(hidden)))
    features = model.view(keras.Model(inputs, hidden))
    x, y, _ = make_data(24)
    model.compile("sgd", loss=crossentropy())
    model.fit(x, y, batch_size=8, verbose=0)
    kernel, bias = model.variables[:2]
    assert_close(features.predict(x, verbose=0), x @ kernel + bias)
    with pytest.raises(ValueError, match=r"which the variables given to it lack. A view needs a model made of the same layers"):
        model.view(keras.Sequential([keras.Input((6,)), keras.layers.Dense(4)])).predict(x, verbose=0)
