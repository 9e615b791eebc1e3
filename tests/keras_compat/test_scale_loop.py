"""`fit` in a process of `tnt-jax scale`: what it times, and with which global batch."""

from dataclasses import replace
from fractions import Fraction

import flax.linen as nn
import numpy as np
import pytest
import tensorflow as tf

import tnt_jax as tnt
from tnt_jax.data.dispatch import with_larger_batches
from tnt_jax.data.indexed.random_access import RandomAccess
from tnt_jax.data.recipes.token_batches import TokenBatches
from tnt_jax.keras_compat.fit.data_intake import DataArguments
from tnt_jax.keras_compat.fit.trials.timed import check_sums, scale_batch
from tnt_jax.launch.scale.scaling import MARK, read_line
from tnt_jax.settings import Settings, TrialsDone

X, Y = np.ones((50, 3), np.float32), np.ones((50, 4), np.float32)


class Fails(tnt.callbacks.Callback):
    def on_train_begin(self, logs=None):
        raise AssertionError("Callbacks do not run.")


@pytest.fixture
def measure(monkeypatch, use_ranks, capfd):
    """Returns what a `fit` on two ranks measures."""

    def measure(*data, weak=False, compile_options=None, **arguments):
        monkeypatch.setenv("TNT_SCALE_STEPS", "6")
        monkeypatch.setenv("TNT_SCALE_WEAK", str(int(weak)))
        use_ranks(2)
        model = tnt.Model(nn.Dense(4))
        model.compile("sgd", loss="mse", **(compile_options or {}))
        with pytest.raises(TrialsDone):
            model.fit(*data, callbacks=[Fails()], **arguments)
        (line,) = [x for x in capfd.readouterr().out.splitlines() if x.startswith(MARK)]
        return read_line(line, round=0, hosts=1)

    return measure


def test_steps_go_on_from_epoch_to_epoch_without_incomplete_batches(measure):
    # Four full batches of 12 rows in an epoch, and one of 2.
    run = measure(X, Y, batch_size=12)
    assert (run.ranks, run.processes, run.steps, run.rows, run.global_batch) == (2, 1, 6, 72, 12)
    assert run.gradient_bytes == 4 * (3 * 4 + 4)
    assert run.seconds > 0
    assert run.compile_s > 0
    assert run.memory_of == "process"
    assert run.memory_bytes > 2**20


@pytest.mark.parametrize("steps", [4, "auto"])
def test_steps_of_a_program_are_those_of_training(measure, steps):
    run = measure(X, Y, batch_size=10, compile_options={"steps_per_execution": steps})
    assert run.steps % (4 if steps == 4 else 1) == 0
    assert run.rows == run.steps * 10


def test_a_pipeline_gets_larger_batches_with_weak_scaling(measure):
    dataset = tf.data.Dataset.from_tensor_slices((X, Y)).shuffle(50, seed=0).batch(8)
    assert measure(dataset).rows == 6 * 8
    run = measure(dataset, weak=True)
    assert (run.global_batch, run.rows) == (16, 6 * 16)


def test_a_generator_that_ends_is_an_error(monkeypatch, use_ranks):
    monkeypatch.setenv("TNT_SCALE_STEPS", "6")
    use_ranks(2)
    model = tnt.Model(nn.Dense(4))
    model.compile("sgd", loss="mse")
    with pytest.raises(ValueError, match=r"has ended after 1 epoch\(s\), before all steps"):
        model.fit((x for x in [(X, Y)] * 4), verbose=0)


def test_data_smaller_than_a_batch_of_weak_scaling_is_an_error(monkeypatch, use_ranks):
    monkeypatch.setenv("TNT_SCALE_STEPS", "6")
    monkeypatch.setenv("TNT_SCALE_WEAK", "1")
    use_ranks(2)
    model = tnt.Model(nn.Dense(4))
    model.compile("sgd", loss="mse")
    with pytest.raises(ValueError, match=r"The data has 50 rows, fewer than one global batch \(64"):
        model.fit(X, Y, batch_size=32, verbose=0)


DATASET = tf.data.Dataset.from_tensor_slices((X, Y))


def rows_of_a_batch(x):
    return next(iter(x))[0].shape[0]


def test_batches_of_all_kinds_of_data_become_larger():
    half = Fraction(3, 2)
    assert with_larger_batches(X, None, half) == (X, 48)
    assert with_larger_batches(X, 10, half)[1] == 15
    examples = list(zip(X, Y, strict=True))
    spec = RandomAccess(examples, batch_size=10, seed=3)
    assert with_larger_batches(spec, None, half) == (replace(spec, batch_size=15), None)
    tokens = TokenBatches([], tokens_per_batch=100)
    assert with_larger_batches(tokens, None, half)[0].tokens_per_batch == 150
    assert rows_of_a_batch(with_larger_batches(DATASET.batch(10), None, half)[0]) == 15


@pytest.mark.parametrize(
    ("x", "batch_size", "message"),
    [
        (X, 5, "a global batch of 5 becomes 3/2 times as large, which is no whole number"),
        ([(X, Y)], None, "The batches of a list are made by the script"),
        (
            DATASET.bucket_by_sequence_length(lambda x, y: tf.shape(x)[0], [2], [2, 3]),
            None,
            "differ in size",
        ),
    ],
    ids=["no whole number", "own batches", "buckets"],
)
def test_batches_that_cannot_become_larger_are_refused(x, batch_size, message):
    with pytest.raises(ValueError, match=message):
        with_larger_batches(x, batch_size, Fraction(3, 2))


WEAK, STRONG = Settings(scale_from=2, scale_weak=True), Settings(scale_from=2)


def test_strong_scaling_keeps_the_batch_of_the_lowest_number_of_ranks():
    assert scale_batch(DataArguments(X, Y, batch_size=32), 8, STRONG).batch_size == 32
    micro = DataArguments(X, Y, micro_batch_size=12)
    assert scale_batch(micro, 2, STRONG).micro_batch_size == 12
    assert scale_batch(micro, 8, STRONG).micro_batch_size == 3
    with pytest.raises(ValueError, match="tnt_micro_batch_size=12 cannot be divided by 8"):
        scale_batch(micro, 16, STRONG)
    with pytest.raises(ValueError, match="measure with --weak"):
        scale_batch(DataArguments([(X, Y)], distribute=False), 4, STRONG)


def test_weak_scaling_multiplies_the_batch():
    assert scale_batch(DataArguments(X, Y, batch_size=32), 8, WEAK).batch_size == 128
    assert scale_batch(DataArguments(X, Y), 4, WEAK).batch_size == 64
    for grows in (DataArguments(X, Y, micro_batch_size=12), DataArguments([], distribute=False)):
        assert scale_batch(grows, 8, WEAK) == grows


def test_commands_that_know_one_kind_of_steps_refuse_local_steps():
    model = tnt.Model(nn.Dense(1), sync=tnt.LocalSteps())
    check_sums(tnt.Model(nn.Dense(1))._core, "tune")
    with pytest.raises(ValueError, match=r"tnt-jax tune .* sync=LocalSteps .* tnt-jax scale"):
        check_sums(model._core, "tune")
