"""Models that compare rows are trained as on one device: by the compiler's step over the whole
global batch, on any number of devices.
"""

import pickle
from itertools import cycle

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from batch_models import (
    MODELS,
    TOLERANCE,
    compiled,
    joined_shards,
    make_rows,
    plain_evaluation,
    plain_loop,
    plain_steps,
)
from flax import nnx
from long_params import long_but_last
from processes import SCRIPTS, launch

import tnt_jax as tnt
from tnt_jax.train.steps.global_step import GlobalSteps


@pytest.fixture(autouse=True)
def told(monkeypatch):
    monkeypatch.setenv("TNT_LOG_LEVEL", "INFO")


def assert_close(found, expected, tolerance=TOLERANCE):
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance),
        found,
        expected,
    )


def computes_whole_batches(model):
    return isinstance(model._core.trainer.steps, GlobalSteps)


LONG = pytest.mark.long


def in_turn(names):
    """Returns each name with 4 or 8 ranks, in turn; its other numbers of ranks are marked `long`."""
    return [
        pytest.param(name, num_ranks, marks=() if num_ranks == usual else LONG)
        for name, usual in zip(names, cycle((4, 8)))
        for num_ranks in (1, 2, 3, 4, 8)
    ]


# Rows that all devices can share equally, some of them, or one alone.
@pytest.mark.parametrize(
    ("num_examples", "size"),
    [pytest.param(29, 12, marks=LONG), pytest.param(24, 8, marks=LONG), (22, 9)],
)
@pytest.mark.parametrize(("name", "num_ranks"), in_turn(MODELS))
def test_models_that_compare_rows_equal_a_plain_loop(
    name, num_examples, size, num_ranks, use_ranks
):
    use_ranks(num_ranks)
    x, y = make_rows(num_examples)
    model, _ = compiled(name)
    history = model.fit(x, y, batch_size=size, epochs=2, shuffle=False, verbose=0).history
    losses, expected = plain_loop(name, num_examples, size)
    assert computes_whole_batches(model) == (num_ranks > 1)
    assert_close(history["loss"], losses)
    assert_close(model.variables, expected)
    loss, outputs = plain_evaluation(name, expected, x, y, num_examples)
    assert_close(model.evaluate(x, y, batch_size=num_examples, verbose=0), loss)
    assert_close(model.predict(x, batch_size=num_examples, verbose=0), outputs)


@pytest.mark.parametrize(("name", "num_ranks"), in_turn(["clip", "batch mean"]))
def test_evaluation_and_prediction_alone_equal_one_device(name, num_ranks, use_ranks):
    use_ranks(num_ranks)
    x, y = make_rows(21)
    model, variables = compiled(name)
    loss, outputs = plain_evaluation(name, variables, x, y, 8)
    assert_close(model.predict(x, batch_size=8, verbose=0), outputs)
    assert_close(model.evaluate(x, y, batch_size=8, verbose=0), loss)


@pytest.mark.parametrize(
    "options", [{"steps_per_execution": 2, "on_nan": "skip"}, {"on_nan": "rollback"}]
)
def test_options_of_compile_change_nothing(options, use_ranks):
    use_ranks(4)
    x, y = make_rows(22)
    model, _ = compiled("clip", **options)
    history = model.fit(x, y, batch_size=9, epochs=2, shuffle=False, verbose=0).history
    losses, expected = plain_loop("clip", 22, 9)
    assert_close(history["loss"], losses)
    assert_close(model.variables, expected)
    x, y = make_rows(21)
    _, outputs = plain_evaluation("clip", expected, x, y, 8)
    assert_close(model.predict(x, batch_size=8, verbose=0), outputs)


@pytest.mark.parametrize("num_ranks", long_but_last(1, 4))
def test_accumulated_steps_compare_the_rows_of_their_own_batch(num_ranks, use_ranks):
    use_ranks(num_ranks)
    x, y = make_rows(22)
    optimizer = tnt.optimizers.SGD(0.1, gradient_accumulation_steps=2)
    model, _ = compiled("clip", optimizer=optimizer)
    model.fit(x, y, batch_size=9, epochs=2, shuffle=False, verbose=0)
    assert_close(model.variables, plain_loop("clip", 22, 9, accumulated=2)[1])


def test_a_warm_optimizer_and_its_sums_go_on_in_the_other_step(use_ranks):
    """A model that is trained on with another loss, which compares rows, and then with the first
    one again, keeps its optimizer and the gradients that it has accumulated.
    """
    found = []
    for num_ranks in (1, 4):
        use_ranks(num_ranks)
        x, y = make_rows(24)
        optimizer = tnt.optimizers.SGD(0.1, momentum=0.9, gradient_accumulation_steps=2)
        model = tnt.Model(nn.Dense(3), seed=1)
        for compares in (False, True, False):
            loss = tnt.losses.SparseCategoricalCrossentropy(from_logits=True)
            model.compile(optimizer, loss=spread if compares else loss)
            # Three steps: the last one has accumulated and not updated.
            model.fit(x["image"], y, batch_size=8, shuffle=False, verbose=0)
            assert computes_whole_batches(model) == (compares and num_ranks > 1)
        found.append(model.variables)
    assert_close(*found)


def spread(y_true, y_pred):
    return jnp.mean((y_pred - y_pred.mean(0)) ** 2, -1)


class Dropping(nn.Module):
    @nn.compact
    def __call__(self, x, train: bool = False):
        x = nn.Dropout(0.5, deterministic=not train)(nn.Dense(8)(x))
        # Not draws for each row, though their first dimension is the rows of one of 2, 4 or 8 ranks.
        shapes = ((4, 1), (2, 1), (1, 1)) if train else ()
        noise = [jax.random.uniform(self.make_rng("dropout"), shape) for shape in shapes]
        return nn.Dense(3)(x - x.mean(0)) + sum(map(jnp.mean, noise))


def train_with_dropout():
    model = tnt.Model(Dropping(), seed=3)
    model.compile("sgd", tnt.losses.SparseCategoricalCrossentropy(from_logits=True))
    x, y = make_rows(16)
    history = model.fit(x["image"], y, batch_size=8, epochs=2, verbose=0).history
    return history["loss"], model.variables


@pytest.fixture(scope="module")
def dropout_on_one_device():
    tnt.shutdown()
    tnt.init(devices=[0])
    return train_with_dropout()


@pytest.mark.parametrize("num_ranks", long_but_last(2, 4, 8))
def test_dropout_draws_what_one_device_draws(num_ranks, use_ranks, dropout_on_one_device):
    use_ranks(num_ranks)
    assert_close(train_with_dropout(), dropout_on_one_device)


class Block(nnx.Module):
    def __init__(self, rngs):
        self.dense = nnx.Linear(6, 6, rngs=rngs)
        self.norm = nnx.BatchNorm(6, rngs=rngs)
        self.drop = nnx.Dropout(0.3, rngs=rngs)

    def __call__(self, x):
        return self.drop(nnx.relu(self.norm(self.dense(x))))


class Scanned(nnx.Module):
    """Blocks with statistics and random numbers in a scan, and rows that are compared."""

    def __init__(self, seed):
        rngs = nnx.Rngs(seed)

        @nnx.split_rngs(splits=2)
        @nnx.vmap(in_axes=0, out_axes=0)
        def make(rngs):
            return Block(rngs)

        self.blocks = make(rngs)
        self.head = nnx.Linear(6, 3, rngs=rngs)

    def __call__(self, x):
        @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        def apply(x, block):
            return block(x)

        x = apply(x, self.blocks)
        return self.head(x - x.mean(0))


@pytest.mark.parametrize("ranks", long_but_last(3, 8))
def test_an_nnx_module_with_statistics_and_dropout_in_a_scan_equals_one_device(ranks, use_ranks):
    found = []
    for num_ranks in (1, ranks):
        use_ranks(num_ranks)
        module = Scanned(0)
        model = tnt.Model(module)
        model.compile("sgd", tnt.losses.SparseCategoricalCrossentropy(from_logits=True))
        x, y = make_rows(16)
        history = model.fit(x["image"], y, batch_size=8, epochs=2, verbose=0).history
        # The statistics are those of the global batch, though no axis is named.
        found.append((history["loss"], nnx.to_pure_dict(nnx.state(module, nnx.Not(nnx.RngState)))))
    assert_close(found[1], found[0])


def test_a_keras_model_that_compares_rows_equals_one_device(use_ranks):
    keras = pytest.importorskip("keras")

    class Centred(keras.layers.Layer):
        def call(self, x):
            return x - keras.ops.mean(x, axis=0)

    found = []
    for num_ranks in (1, 4):
        use_ranks(num_ranks)
        keras.utils.set_random_seed(1)
        layers = [keras.layers.Dense(8), Centred(), keras.layers.BatchNormalization()]
        module = keras.Sequential(
            [keras.Input((6,)), *layers, keras.layers.Dropout(0.3), keras.layers.Dense(3)]
        )
        model = tnt.Model(module)
        loss = tnt.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(tnt.optimizers.SGD(0.05, momentum=0.9), loss, metrics=["accuracy"])
        x, y = make_rows(16)
        history = model.fit(x["image"], y, batch_size=8, epochs=2, shuffle=False, verbose=0).history
        evaluated = model.evaluate(x["image"], y, batch_size=8, verbose=0)
        found.append((history, evaluated, module.get_weights()))
    assert_close(found[0], found[1])


@jax.custom_vjp
def centred(x):
    return x - x.mean(0)


centred.defvjp(lambda x: (centred(x), None), lambda _, g: (g - g.mean(0),))


class Centred(nn.Module):
    """Compares rows in training, in evaluation, or once it was called often enough."""

    when: str

    @nn.compact
    def __call__(self, x, train: bool = False):
        calls = self.variable("counts", "calls", lambda: jnp.zeros((), jnp.int32))
        if train and not self.is_initializing():
            calls.value += 1
        x = nn.Dense(6)(x)
        if self.when == "late":
            x = jax.lax.cond(calls.value > 2, centred, lambda x: x, x)
        elif (self.when == "evaluation") != train:
            x = centred(x)
        return nn.Dense(3)(x)


@pytest.mark.parametrize(
    ("when", "precision"),
    [
        ("training", "float32"),
        ("evaluation", "float32"),
        ("late", "mixed_bfloat16"),
        pytest.param("late", "float32", marks=LONG),
        pytest.param("training", "mixed_bfloat16", marks=LONG),
        pytest.param("evaluation", "mixed_bfloat16", marks=LONG),
    ],
)
def test_a_comparison_is_found_wherever_it_is(when, precision, use_ranks):
    found = []
    for num_ranks in (1, 4):
        use_ranks(num_ranks)
        model = tnt.Model(Centred(when), seed=1, precision=precision)
        model.compile("sgd", tnt.losses.SparseCategoricalCrossentropy(from_logits=True))
        x, y = make_rows(16)
        data = x["image"], y
        history = model.fit(
            *data, batch_size=8, epochs=2, shuffle=False, verbose=0, validation_data=data
        ).history
        found.append((history, model.variables["params"]))
        assert computes_whole_batches(model) == (num_ranks > 1)
    assert_close(*found, TOLERANCE if precision == "float32" else 2e-2)


def test_a_callback_may_find_the_comparison_between_steps(use_ranks):
    """Training is independent; the prediction of a callback is not, and changes the step."""

    class Predicting(tnt.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            predictions.append(self.model.predict(x["image"], batch_size=8, verbose=0))

    found = []
    for num_ranks in (1, 4):
        use_ranks(num_ranks)
        x, y = make_rows(16)
        model, predictions = tnt.Model(Centred("evaluation"), seed=1), []
        model.compile("sgd", tnt.losses.SparseCategoricalCrossentropy(from_logits=True))
        history = model.fit(
            x["image"], y, batch_size=8, shuffle=False, verbose=0, callbacks=[Predicting()]
        ).history
        found.append((history, predictions, model.variables["params"]))
    assert_close(*found)


def test_the_step_and_its_reason_are_logged(use_ranks, capsys):
    use_ranks(4)
    x, y = make_rows(12)
    compiled("batch mean")[0].fit(x, y, batch_size=12, verbose=0)
    said = capsys.readouterr().err
    (text,) = [line for line in said.splitlines() if "divides each step" in line]
    assert "INFO: The model 'BatchMean' compares rows of a batch" in text
    assert "not in fused buckets" in text
    assert "Statistics" not in said


def test_the_collectives_are_those_of_the_step_that_runs(use_ranks):
    use_ranks(4)
    x, y = make_rows(12)
    model, _ = compiled("batch mean")
    description = model.describe_collectives(x, y, 12)
    assert computes_whole_batches(model)
    assert description.compiled
    assert not description.planned
    assert "chosen by the compiler: The model 'BatchMean' compares rows" in str(description)


def test_the_optimizers_state_is_sharded(use_ranks):
    use_ranks(4)
    x, y = make_rows(12)
    model, _ = compiled("batch mean", optimizer=optax.adam(1e-2))
    model.fit(x, y, batch_size=12, verbose=0)
    state = model._core.trainer.state
    moments = [m for m in jax.tree.leaves(state.opt_state) if m.ndim == 2 and m.shape[0] % 4 == 0]
    assert moments
    assert not any(m.is_fully_replicated for m in moments)
    assert all(m.is_fully_replicated for m in jax.tree.leaves(state.params))


def test_a_library_s_batch_normalisation_beside_a_comparison_is_that_of_one_device(use_ranks):
    class Net(nn.Module):
        @nn.compact
        def __call__(self, x, train=False):
            x = nn.BatchNorm(use_running_average=not train, axis_name="data")(nn.Dense(8)(x))
            return nn.Dense(3)(nn.relu(x) - x.mean(0))

    def fit(num_ranks):
        use_ranks(num_ranks)
        x, y = make_rows(16)
        model = tnt.Model(Net())
        loss = tnt.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(optax.sgd(0.1), loss)
        history = model.fit(x["image"], y, batch_size=8, shuffle=False, verbose=0).history
        return history, model.variables

    assert_close(fit(4), fit(1))


def test_a_batch_of_one_row_is_trained_on_one_device(use_ranks):
    use_ranks(1)
    x, y = make_rows(3)
    model, _ = compiled("batch mean")
    history = model.fit(x, y, batch_size=1, shuffle=False, verbose=0).history
    assert_close(history["loss"], plain_loop("batch mean", 3, 1, epochs=1)[0])


def test_batches_smaller_than_the_ranks_are_refused(use_ranks):
    use_ranks(4)
    x, y = make_rows(12)
    with pytest.raises(ValueError, match=r"batch size \(3\) must be at least the number of ranks"):
        compiled("batch mean")[0].fit(x, y, batch_size=3, verbose=0)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"reproducible": True}, "reproducible=True"),
        ({"gradient_compression": "bfloat16"}, "gradient_compression"),
    ],
)
def test_options_that_need_independent_rows_are_refused_with_the_reason(options, named, use_ranks):
    use_ranks(4)
    x, y = make_rows(16)
    model, _ = compiled("batch mean", model_options=options)
    with pytest.raises(ValueError, match=f"compares rows of a batch.*{named} computes parts"):
        model.fit(x, y, batch_size=16, verbose=0)


def test_training_is_resumed_on_another_number_of_devices(use_ranks, tmp_path):
    x, y = make_rows(18)
    optimizer = optax.sgd(0.1, momentum=0.9)

    def fit(num_ranks, epochs):
        use_ranks(num_ranks)
        model, _ = compiled("clip", optimizer=optimizer)
        saving = tnt.callbacks.BackupAndRestore(str(tmp_path), delete_checkpoint=False)
        model.fit(x, y, batch_size=9, epochs=epochs, shuffle=False, verbose=0, callbacks=[saving])
        return model

    fit(4, 1)
    resumed = fit(3, 3)
    assert computes_whole_batches(resumed)
    assert_close(resumed.variables, plain_loop("clip", 18, 9, epochs=3, momentum=0.9)[1])


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.parametrize("num_processes", long_but_last(4, 2))
def test_processes_equal_a_plain_loop(num_processes, tmp_path):
    result = launch(num_processes, SCRIPTS / "train_comparing.py", tmp_path)
    assert result.returncode == 0, result.stderr
    found = pickle.loads((tmp_path / "results").read_bytes())
    losses, variables = plain_loop("clip", 22, 9)
    _, outputs = plain_evaluation("clip", variables, *make_rows(22), 22)
    assert_close(found["clip"], (losses, variables, outputs))
    batches = joined_shards(num_processes)
    losses, variables = plain_steps("batch mean", batches)
    assert_close(found["shards"][:2], (losses, variables))
    # Rows are predicted in global batches, and come shard by shard.
    outputs = [np.asarray(plain_evaluation("batch mean", variables, *b, 99)[1]) for b in batches]
    assert_close(np.sort(found["shards"][2], 0), np.sort(np.concatenate(outputs), 0))
