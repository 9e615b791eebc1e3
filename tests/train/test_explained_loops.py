"""Custom loops whose steps are explained, and what is left as it is in them."""

import json
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tnt_jax as tnt
from tnt_jax.launch.explanation import Explanation
from tnt_jax.settings import EXPLAIN_MARK, TrialsDone
from tnt_jax.train.explaining import channels_first, with_channels_last

RNG = np.random.default_rng(0)
X, Y = RNG.normal(size=(70, 5)).astype("f4"), RNG.normal(size=70).astype("f4")
STEPS, ROUNDS = 4, 2


@tnt.distributed_step
def train_step(w, batch):
    def loss_fn(w, batch):
        return tnt.compute_average_loss(jnp.square(batch.inputs @ w - batch.targets))

    loss, grads = tnt.value_and_grad(loss_fn)(w, batch)
    return w - 0.1 * grads, {"loss": loss}


def train(dataset, *, between=lambda metrics: None, w=None):
    """Trains for two epochs, and returns what the first step of the next one would begin with."""
    w = jnp.zeros(5) if w is None else w
    for _ in range(2):
        for batch in dataset:
            w, metrics = train_step(w, batch)
            between(metrics)
    return w


def train_stacked(dataset):
    w = jnp.zeros(5)
    for _ in range(2):
        for batches in dataset.stacked(2):
            w, _ = train_step.scan(w, batches)


@pytest.fixture
def explain(use_ranks, monkeypatch, capfd):
    """Explains a loop on a number of ranks, and returns what was found."""

    def run(ranks, loop):
        monkeypatch.setenv("TNT_EXPLAIN_STEPS", str(STEPS))
        monkeypatch.setenv("TNT_EXPLAIN_ROUNDS", str(ROUNDS))
        use_ranks(ranks)
        monkeypatch.setattr(sys, "__stdout__", sys.stdout)
        with pytest.raises(TrialsDone):
            loop(tnt.distribute(X, Y, batch_size=16, shuffle=False))
        lines = capfd.readouterr().out.splitlines()
        line = next(line for line in lines if line.startswith(EXPLAIN_MARK))
        return Explanation("train.py", json.loads(line.removeprefix(EXPLAIN_MARK)))

    return run


def test_every_kind_of_step_is_timed_in_every_round(explain):
    found = explain(2, train)
    measured = found.measured
    assert measured["trained_by"] == "train_step"
    assert (measured["ranks"], measured["rows"], measured["num_shapes"]) == (2, 16, 1)
    assert set(measured["seconds"]) == {
        "as is", "no callbacks", "kept batches", "placed batches", "no sums", "half the rows",
    }  # fmt: skip
    for kind in measured["seconds"]:
        assert len(found.slowest(kind)) == ROUNDS
        assert min(found.slowest(kind)) > 0
    assert measured["sums"]["number"] >= 1
    assert sum(part.share for part in found.parts) == pytest.approx(1)


def test_the_loop_makes_its_own_steps_without_an_end_and_incomplete_batches(explain):
    rows = []

    def loop(dataset):
        w = jnp.zeros(5)
        for batch in dataset:
            rows.append(batch.num_rows)
            w, _ = train_step(w, batch)

    found = explain(1, loop)
    # Eight are kept; two are not timed in each turn, one of which warms up. Epochs have 4.375.
    assert len(rows) >= 8 + (ROUNDS + 1) * (2 + STEPS)
    assert set(rows) == {16}
    assert found.measured["steps_of_epoch"] == 5


def test_what_the_loop_does_between_steps_is_named_with_its_line(explain):
    def slow(metrics):
        time.sleep(0.03)

    found = explain(1, lambda dataset: train(dataset, between=slow))
    (first, *_) = found.findings
    assert first.cause == "callback"
    assert f"most of it in {__file__}, line " in first.text
    assert "(time.sleep(0.03))" in first.text
    assert first.gain.median > 0.5
    assert "the loop between steps" in found.sentence


def test_stacked_steps_are_explained_too(explain):
    measured = explain(2, train_stacked).measured
    assert measured["steps_per_execution"] == 2
    assert measured["trials"] == [] or {x["what"] for x in measured["trials"]} == {"sums"}


def test_a_loop_that_evaluates_before_it_trains_is_explained(explain):
    @tnt.distributed_eval_step
    def evaluate(w, batch):
        return tnt.reduce(jnp.square(batch.inputs @ w - batch.targets), "mean")

    def loop(dataset):
        held_out = tnt.distribute(X, Y, batch_size=32)
        assert len([float(evaluate(jnp.zeros(5), batch)) for batch in held_out]) == 2
        train(dataset)

    assert explain(2, loop).measured["trained_by"] == "train_step"


def test_checkpoints_of_the_loop_are_neither_read_nor_written(explain, tmp_path):
    checkpoints = tnt.LoopCheckpoints(tmp_path / "runs")

    def loop(dataset):
        w = checkpoints.restore(jnp.zeros(5), dataset)
        train(dataset, w=w, between=lambda metrics: checkpoints.save(w, dataset))

    assert explain(1, loop).measured["callbacks_left_out"] == ["LoopCheckpoints"]
    assert list(tmp_path.iterdir()) == []


def test_channels_that_come_first_are_found_and_computed_with_channels_last():
    x, kernel = RNG.normal(size=(2, 3, 8, 6)), RNG.normal(size=(4, 3, 3, 2))

    def first(x, kernel):
        return jax.lax.conv_general_dilated(x, kernel, (2, 1), "SAME")

    (equation,) = channels_first(jax.make_jaxpr(first)(x, kernel).jaxpr)
    params, shapes = with_channels_last(equation)
    operands = x.transpose(0, 2, 3, 1), kernel.transpose(2, 3, 1, 0)
    assert shapes == [operand.shape for operand in operands]

    def last(x, kernel):
        return jax.lax.conv_general_dilated(x, kernel, **params)

    expected = first(x, kernel).transpose(0, 2, 3, 1)
    np.testing.assert_allclose(last(*operands), expected, rtol=1e-5, atol=1e-5)
    assert channels_first(jax.make_jaxpr(last)(*operands).jaxpr) == []
