"""`fit` that explains its steps: causes that are planted in the script are named."""

import json
import time

import flax.linen as nn
import jax
import numpy as np
import pytest

import tnt_jax as tnt
from tnt_jax.launch.explanation import Explanation
from tnt_jax.settings import EXPLAIN_MARK, TrialsDone

RNG = np.random.default_rng(0)
ROWS = 8
X, Y = RNG.normal(size=(64, 16)).astype("f4"), RNG.normal(size=(64, 3)).astype("f4")


@pytest.fixture
def explain(use_ranks, monkeypatch, capfd):
    """Explains a `fit`, and returns what was measured and the causes that were found."""

    def run(x, y=None, *, callbacks=None, module=None, ranks=1, steps=6, **fit):
        monkeypatch.setenv("TNT_EXPLAIN_STEPS", str(steps))
        monkeypatch.setenv("TNT_EXPLAIN_ROUNDS", "3")
        use_ranks(ranks)
        model = tnt.Model(module or nn.Dense(3))
        model.compile("sgd", "mse", metrics=["mae"])
        monkeypatch.setattr("sys.__stdout__", __import__("sys").stdout)
        with pytest.raises(TrialsDone):
            model.fit(x, y, callbacks=callbacks, verbose=0, **fit)
        lines = capfd.readouterr().out.splitlines()
        line = next(line for line in lines if line.startswith(EXPLAIN_MARK))
        return Explanation("train.py", json.loads(line.removeprefix(EXPLAIN_MARK)))

    return run


def causes(explanation):
    return [finding.cause for finding in explanation.findings]


def share(explanation, name):
    return next(part.share for part in explanation.parts if part.name == name)


class Sleeps(tnt.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        time.sleep(0.05)


class Decodes:
    """Batches, each of which is decoded; rows are added if `grows`."""

    def __init__(self, seconds=0.0, first_s=0.0, grows=False):
        self.seconds, self.first_s, self.grows = seconds, first_s, grows
        self.number = 0

    def __iter__(self):
        time.sleep(self.first_s)
        for _ in range(8):
            time.sleep(self.seconds)
            self.number += 1
            width = 16 + self.number * self.grows
            yield np.ones((ROWS, width), "f4"), Y[:ROWS]


class Sums(nn.Module):
    """Takes inputs of any width."""

    @nn.compact
    def __call__(self, x):
        return nn.Dense(3)(x.sum(1, keepdims=True))


def test_a_slow_callback_is_named_and_leaving_it_out_is_tried(explain):
    found = explain(X, Y, batch_size=ROWS, callbacks=[Sleeps()])
    (finding,) = [finding for finding in found.findings if finding.cause == "callback"]
    assert finding.text.startswith("Sleeps holds steps up")
    assert finding.gain.median > 0.5
    assert share(found, "callbacks") > 0.5


class SleepsBefore(tnt.callbacks.Callback):
    def on_train_batch_begin(self, batch, logs=None):
        time.sleep(0.05)


def test_a_callback_that_acts_before_steps_is_named(explain):
    found = explain(X, Y, batch_size=ROWS, callbacks=[SleepsBefore()])
    (finding,) = [finding for finding in found.findings if finding.cause == "callback"]
    assert finding.text.startswith("SleepsBefore holds steps up")
    assert finding.gain.median > 0.5


def test_slow_reading_is_named_and_keeping_batches_is_tried(explain):
    found = explain(Decodes(seconds=0.05))
    (finding,) = [finding for finding in found.findings if finding.cause == "reading"]
    assert "longer than the rest of a step" in finding.text
    assert "as dataset.cache() does" in finding.advice
    assert finding.gain.median > 0.5
    assert share(found, "reading") > 0.5


def test_a_slow_first_batch_is_named(explain):
    assert "first batch" in causes(explain(Decodes(first_s=1.0)))


def test_shapes_that_change_at_every_step_are_named(explain):
    found = explain(Decodes(grows=True), module=Sums(), steps=1)
    (finding,) = [finding for finding in found.findings if finding.cause == "recompilation"]
    assert "batches come in" in finding.text
    assert "float32[8, 17], float32[8, 3]; float32[8, 18]" in finding.text
    assert finding.advice == "Pad them to a few shapes"
    assert share(found, "compiling") > 0.3


@pytest.mark.long  # Other work on the machine can hide the gain.
def test_small_batches_are_named_and_several_steps_in_a_program_are_tried(explain):
    found = explain(X, Y, batch_size=ROWS, steps=32)
    (finding,) = [finding for finding in found.findings if finding.cause == "small batch"]
    assert "compile(steps_per_execution=8): tried" in finding.line


def test_sums_between_ranks_are_counted(explain):
    found = explain(X, Y, batch_size=ROWS, ranks=2)
    assert found.measured["sums"]["number"] >= 1
    assert found.measured["sums"]["bytes"] >= 4 * 17 * 3
    assert {"no sums", "half the rows"} < set(found.measured["seconds"])
    assert "one rank" not in found.measured["seconds"], "There is one process."


def test_callbacks_that_save_are_not_called(explain, tmp_path):
    saving = tnt.callbacks.ModelCheckpoint(tmp_path / "saved", save_freq=1)
    found = explain(X, Y, batch_size=ROWS, callbacks=[saving])
    assert found.measured["callbacks_left_out"] == ["ModelCheckpoint"]
    assert "Not called: ModelCheckpoint, which would save." in found.text
    assert list(tmp_path.iterdir()) == []


def test_a_model_that_compares_rows_is_explained_too(explain):
    class Compares(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = nn.Dense(3)(x)
            return x - jax.numpy.mean(x, 0)

    found = explain(X, Y, batch_size=ROWS, ranks=2, module=Compares())
    assert {"no sums", "half the rows"} < set(found.measured["seconds"])
    assert "by reduce_sum (test_explain_loop.py:" in found.measured["comparison"]
