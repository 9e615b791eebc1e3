"""Where `fit` begins after callbacks have spoken: once, and with the sums that were there."""

import json
import os
import subprocess
import sys
from importlib import metadata
from types import SimpleNamespace

import flax.linen as nn
import jax
import numpy as np
import pytest

import tnt_jax as tnt
from tnt_jax.data.layout import RankSlice
from tnt_jax.data.sources import ArraySource
from tnt_jax.data.streams import EpochStream
from tnt_jax.keras_compat.comparable import comparable, flat
from tnt_jax.keras_compat.fit import start_check
from tnt_jax.keras_compat.fit.hooks import Place, Progress
from tnt_jax.keras_compat.fit.resume import CHANGES, Resumption, differences
from tnt_jax.train.checkpoints.checkpoint import Position
from tnt_jax.train.checkpoints.data_position import describe_position

X = np.arange(24, dtype=np.float32).reshape(12, 2) / 24
Y = X.sum(axis=1, keepdims=True)


@pytest.mark.parametrize(("by_keras", "epoch"), [(None, 3), (5, 5)])
def test_fit_begins_at_its_argument_unless_keras_says_otherwise_once(by_keras, epoch):
    resumption = Resumption(core=None, progress=Progress())
    resumption.initial_epoch = by_keras
    assert resumption.take(3, None) == Place(epoch, 0, 0, None)
    assert resumption.take(3, None) == Place(3, 0, 0, None)


def test_a_class_may_move_within_the_package():
    settings = flat("loss", comparable(tnt.losses.MeanSquaredError()))
    now = {key: {} for key in (*CHANGES, "seed")} | {"loss": settings, "versions": {}}
    assert settings["loss.class"] == "tnt_jax.losses.MeanSquaredError"
    for name, found in (("MeanSquaredError", []), ("MeanAbsoluteError", ["loss"])):
        there = {"loss.class": f"tnt_jax.keras_compat.losses.some.file.{name}"}
        then = now | {"loss": settings | there}
        assert list(differences(then, now, has_ended=False)) == found


def test_a_position_counts_once_and_before_every_other_word():
    core = SimpleNamespace(
        trainer=SimpleNamespace(require_state=lambda: SimpleNamespace(step=14)),
        require_compiled=lambda: SimpleNamespace(accumulation_steps=1),
    )
    source = ArraySource(X, global_batch_size=4, rank_slice=RankSlice(1), shuffle=False, seed=0)
    stream = EpochStream(source)
    resumption = Resumption(core, Progress())
    resumption.begin(stream, 0)
    resumption.initial_epoch = 1
    noted = describe_position(stream, 0, 8)
    assert resumption.resume_at(Position(4, 2), noted, []) == Position(4, 2)
    assert resumption.take(0, None) == Place(4, 2, 8, None)
    assert resumption.take(0, None) == Place(0, 0, 0, None)


class Interrupted(tnt.callbacks.Callback):
    """Keeps the position, its sums and the weights after two batches of the first epoch."""

    def on_train_batch_end(self, batch, logs=None):
        if batch == 1:
            self.position, self.data, sums = self.model.resumption.reached()
            self.sums = [np.asarray(leaf) for leaf in sums]
            self.weights = self.model.get_weights()
            self.model.stop_training = True


class Resuming(tnt.callbacks.Callback):
    def __init__(self, interrupted):
        super().__init__()
        self.interrupted = interrupted

    def on_train_begin(self, logs=None):
        self.model.set_weights(self.interrupted.weights)
        run = self.interrupted
        self.model.resumption.resume_at(run.position, run.data, run.sums)


def losses(*callbacks):
    model = tnt.Model(nn.Dense(1))
    model.compile("sgd", loss="mse")
    fitted = model.fit(X, Y, batch_size=4, epochs=2, shuffle=False, verbose=0, callbacks=callbacks)
    return fitted.history["loss"]


def test_the_logs_of_a_resumed_epoch_count_the_batches_before(use_ranks):
    use_ranks(2)
    interrupted = Interrupted()
    losses(interrupted)
    assert interrupted.position == Position(0, 2)
    assert interrupted.data["rows"] == 8
    # Gradient descent has no other state, so the run must go on as if nothing had happened.
    assert losses(Resuming(interrupted)) == losses()


DESCRIBE = """
import contextlib, functools, json, os, sys
os.environ["KERAS_BACKEND"] = "jax"
sys.modules["tensorflow"] = None  # Keras would import it for a check when it describes a layer.
import flax.linen as nn, jax, keras, numpy as np, optax
from flax import nnx
import tnt_jax as tnt
from tnt_jax.keras_compat.fit import resume
from tnt_jax.keras_compat.fit.fit_loop import FitLoop

class Net(nn.Module):
    activation: object = jax.nn.gelu
    start: object = nn.initializers.normal(0.3)
    sizes: object = frozenset({"b", "a", "c"})

    @nn.compact
    def __call__(self, x):
        return nn.Dense(1, kernel_init=self.start)(self.activation(nn.Dense(4)(x)))

class Nnx(nnx.Module):
    def __init__(self):
        self.dense, self.act = nnx.Linear(2, 1, rngs=nnx.Rngs(0)), lambda x: 2 * x
        self.other = functools.partial(jax.nn.leaky_relu, negative_slope=0.3)

    def __call__(self, x):
        return self.other(self.act(self.dense(x)))

linear = keras.Sequential([keras.layers.Dense(3, "relu"), keras.layers.Dropout(0.1), keras.layers.Dense(1)])
seen, describe = [], resume.describe_run

class Described(Exception): pass

def end(*arguments):
    seen.append(describe(*arguments))
    raise Described  # Before the first step, for which nothing is compiled.

resume.describe_run, FitLoop.trains = end, False
x = np.arange(24, dtype=np.float32).reshape(12, 2) / 24
for module, optimizer in [
    (Net(), "adam"), (Nnx(), optax.adamw(lambda step: 0.1 / (1 + step))), (linear, keras.optimizers.Lion(0.1)),
]:
    rates = [tnt.callbacks.ReduceLROnPlateau("loss")] if optimizer == "adam" else []
    model = tnt.Model(module)
    model.compile(optimizer, loss=lambda y, p: (y - p) ** 2, metrics=["mae", tnt.metrics.MeanSquaredError()])
    with contextlib.suppress(Described):
        model.fit(x, x[:, :1], batch_size=4, verbose=0, callbacks=[tnt.callbacks.BackupAndRestore("runs"), *rates])
print(json.dumps(seen))
"""


def test_descriptions_of_a_run_are_the_same_in_every_process(tmp_path):
    script = tmp_path / "describe.py"
    script.write_text(DESCRIBE)
    started = [
        subprocess.Popen(
            [sys.executable, str(script)],
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONHASHSEED": str(seed), "XLA_FLAGS": ""},
        )
        for seed in (1, 2)
    ]
    texts = [process.communicate(timeout=120)[0] for process in started]
    assert [process.returncode for process in started] == [0, 0]
    assert texts[0] == texts[1]
    assert " 0x" not in texts[0]
    linen, nnx, keras = json.loads(texts[0])
    assert "gelu" in linen["model"]["model.activation.function"]
    assert "callback 1, ReduceLROnPlateau.patience" in linen["learning_rate"]
    assert any("code" in value for name, value in nnx["model"].items() if name.endswith("act"))
    assert keras["model"]["model.layers[1].rate"] == "0.1"
    assert keras["optimizer"]["optimizer.beta_1"] == "0.9"


def test_versions_are_those_of_packages_that_are_installed(monkeypatch):
    """A source tree in PYTHONPATH is none."""
    plain = metadata.version

    def version(name):
        if name == "tnt-jax":
            raise metadata.PackageNotFoundError(name)
        return plain(name)

    monkeypatch.setattr(metadata, "version", version)
    found = start_check.installed_versions.__wrapped__()
    assert found["jax"] == jax.__version__
    assert "tnt-jax" not in found
