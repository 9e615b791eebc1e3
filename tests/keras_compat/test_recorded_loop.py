"""Steps of `fit` and of a custom loop that are recorded, in one process with several devices."""

import sys

import flax.linen as nn
import jax
import numpy as np
import pytest

import tnt_jax as tnt
from tnt_jax.launch.verify.comparison import Rounding, compare, read_lines
from tnt_jax.settings import RECORD_MARK, TrialsDone

RNG = np.random.default_rng(0)
X, Y = RNG.normal(size=(40, 4)).astype("f4"), RNG.normal(size=(40, 2)).astype("f4")


@pytest.fixture
def recorded(use_ranks, monkeypatch, capfd):
    """Runs a training that is recorded, and returns the recording."""

    def run(train, *, ranks=1, kind="plain", steps=4):
        monkeypatch.setenv("TNT_SCALE_FROM", "1")
        monkeypatch.setenv("TNT_RECORD_STEPS", str(steps))
        monkeypatch.setenv("TNT_RECORD_AS", kind)
        monkeypatch.setattr("sys.__stdout__", sys.stdout)
        use_ranks(ranks)
        with pytest.raises(TrialsDone):
            train()
        lines = capfd.readouterr().out.splitlines()
        return read_lines(line for line in lines if line.startswith(RECORD_MARK))

    return run


def fit(batch_size, *, made=None, compiled=None, **arguments):
    model = tnt.Model(nn.Dense(2))
    model.compile(tnt.optimizers.SGD(0.1, momentum=0.9), "mse", **(compiled or {}))
    if made is not None:
        made.append(model)
    model.fit(X, Y, batch_size=batch_size, verbose=0, **{"epochs": 3} | arguments)


def test_two_passes_have_half_of_the_rows_of_a_rank_each(recorded):
    models = []
    plain = recorded(lambda: fit(15))
    passes = recorded(lambda: fit(15, made=models), kind="passes")
    assert models[0]._core.at_once.training == 8
    assert compare(plain, passes, Rounding(plain, None)) is None


def test_one_row_is_not_computed_in_passes(recorded):
    assert recorded(lambda: fit(1), kind="passes").left_out == "A rank has one row."
    assert recorded(lambda: fit(2), kind="passes", ranks=2).left_out == "A rank has one row."


@pytest.mark.parametrize(("epochs", "first"), [(3, 4), (1, 2)])
def test_the_incomplete_batch_is_among_the_steps(recorded, epochs, first):
    """Of 40 rows in batches of 7, the last has 5."""
    steps = recorded(lambda: fit(7, epochs=epochs)).steps
    numbers = [(step.place["epoch"], step.place["batch"]) for step in steps]
    assert numbers == [divmod(number, 6) for number in range(first, first + 4)]
    assert [step.place["num_rows"] for step in steps].count(5) == 1


def test_rows_that_ranks_share_unevenly_are_compared_without_padding(recorded):
    one, two = (recorded(lambda: fit(7), ranks=ranks) for ranks in (1, 2))
    assert [len(step.rows[0]) for step in two.steps] == [7, 5, 7, 7]
    assert compare(one, two, Rounding(one, None)) is None


def test_the_state_of_the_optimizer_is_sharded(recorded):
    models = []
    plain = recorded(lambda: fit(8), ranks=2)
    sharded = recorded(lambda: fit(8, made=models), ranks=2, kind="sharded")
    momentum = jax.tree.leaves(models[0]._core.trainer.require_state().opt_state)
    assert any(not x.is_fully_replicated for x in momentum)
    assert compare(plain, sharded, Rounding(plain, None)) is None


def test_weights_are_changed_by_rounding_errors_after_the_start(recorded):
    plain, rounded = (recorded(lambda: fit(8), kind=kind) for kind in ("plain", "rounded"))
    assert plain.start.arrays == rounded.start.arrays
    path = "params/kernel"
    ours, theirs = (run.steps[0].arrays[path]["sums"] for run in (plain, rounded))
    assert ours != theirs
    np.testing.assert_allclose(ours, theirs, atol=1e-5)


class Counts(tnt.callbacks.Callback):
    calls = 0

    def on_train_batch_end(self, batch, logs=None):
        Counts.calls += 1


def test_of_the_callbacks_only_those_of_the_rate_take_part(recorded):
    scheduler = tnt.callbacks.LearningRateScheduler(lambda epoch: 0.0)
    callbacks = [Counts(), scheduler]
    found = recorded(lambda: fit(8, callbacks=callbacks, validation_data=(X, Y)))
    assert Counts.calls == 0
    assert found.start.arrays["params/kernel"] == found.steps[-1].arrays["params/kernel"]


def test_steps_run_one_at_a_time(recorded):
    found = recorded(lambda: fit(8, compiled={"steps_per_execution": 4}))
    assert [step.step for step in found.steps] == [1, 2, 3, 4]


def test_the_global_batch_is_that_of_the_lowest_number_of_ranks(recorded):
    found = recorded(lambda: fit(None, tnt_micro_batch_size=8), ranks=2)
    assert {step.place["num_rows"] for step in found.steps} == {8}


def loop(*, targets=True, stacked=None):
    dataset = tnt.distribute((X, Y) if targets else X, batch_size=8)

    @tnt.distributed_step
    def train_step(weights, batch):
        def loss_of(weights):
            out = batch.inputs @ weights
            return tnt.compute_average_loss(((out - (batch.targets if targets else 1)) ** 2).sum(1))

        loss, grads = tnt.value_and_grad(loss_of)(weights)
        return weights - 0.1 * grads, {"loss": loss}

    weights = jax.numpy.ones((4, 2))
    for _ in range(8):
        if stacked:
            for group in dataset.stacked(stacked):
                weights, _ = train_step.scan(weights, group)
        else:
            for batch in dataset:
                weights, _ = train_step(weights, batch)


@pytest.mark.parametrize("targets", [True, False])
def test_steps_of_a_custom_loop_are_recorded_with_and_without_targets(recorded, targets):
    one, two = (recorded(lambda: loop(targets=targets), ranks=ranks) for ranks in (1, 2))
    assert [len(rows) for rows in one.steps[0].rows] == [8, 8]
    assert one.steps[0].rows == two.steps[0].rows
    assert compare(one, two, Rounding(one, None)) is None


def test_stacked_steps_are_recorded_with_the_number_of_the_last(recorded):
    single = recorded(loop, steps=4)
    stacked = recorded(lambda: loop(stacked=2), steps=2)
    assert [step.step for step in stacked.steps] == [2, 4]
    assert [step.place["batch"] for step in stacked.steps] == [1, 3]
    assert stacked.facts["rows_of_rank"] == single.facts["rows_of_rank"] == 8
    for step in stacked.steps:
        (ours,), (theirs,) = (run.at(step.step).arrays.values() for run in (stacked, single))
        np.testing.assert_allclose(ours["sums"], theirs["sums"], rtol=1e-6)
