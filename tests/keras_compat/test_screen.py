"""What a terminal shows while a bar moves: warnings in lines of their own, a word while a step is
compiled, no false alarm.
"""

import io
import sys
import time
import warnings
from contextlib import ExitStack, redirect_stderr, redirect_stdout

import flax.linen as nn
import numpy as np
import pytest

import tnt_jax as tnt
from tnt_jax.keras_compat.fit import fit_loop
from tnt_jax.keras_compat.fit.hooks import Progress
from tnt_jax.log import logger

X, Y = np.ones((20, 4), np.float32), np.zeros(20, int)


class Terminal(io.StringIO):
    """A screen that keeps everything written to it."""

    def isatty(self):
        return True

    def lines(self):
        """Returns the lines as they stand at the end: `\\r` goes back to the beginning of a line,
        later characters cover earlier ones.
        """
        shown = []
        for raw in self.getvalue().split("\n"):
            line = ""
            for part in raw.split("\r"):
                line = part + line[len(part) :]
            shown.append(line.rstrip())
        return shown


@pytest.fixture
def terminal(use_ranks):
    """Returns a function that makes a terminal the screen of this test."""
    use_ranks(1)
    with ExitStack() as stack:

        def show():
            screen = Terminal()
            stack.enter_context(redirect_stdout(screen))
            stack.enter_context(redirect_stderr(screen))
            return screen

        yield show


def fit(*, callbacks=(), epochs=1, module=None, x=X, y=Y):
    model = tnt.Model(module or nn.Dense(2))
    model.compile("sgd", tnt.losses.SparseCategoricalCrossentropy(from_logits=True))
    model.fit(
        x,
        y,
        **({"batch_size": 8} if y is not None else {}),
        epochs=epochs,
        callbacks=list(callbacks),
    )


def test_warnings_stand_in_lines_of_their_own(terminal):
    screen = terminal()

    def warn(batch, logs):
        logger.warning("from the logger")
        warnings.warn("from Python", UserWarning, stacklevel=1)

    before = warnings.showwarning
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        # pytest records warnings; this is what Python does by itself.
        warnings.showwarning = lambda message, *rest: print(
            f"UserWarning: {message}", file=sys.stderr
        )
        fit(callbacks=[tnt.callbacks.LambdaCallback(on_train_batch_end=warn)])
    assert warnings.showwarning is before
    told = [line for line in screen.lines() if "from the logger" in line or "from Python" in line]
    assert told == ["[tnt_jax] WARNING: from the logger", "UserWarning: from Python"] * 3
    assert "Epoch 1/1: " in screen.getvalue(), "There was no bar."


def test_the_bar_says_that_the_step_is_compiled_for_the_first_and_the_last_batch_once(terminal):
    screen = terminal()
    fit(epochs=2)
    assert screen.getvalue().count(", compiling]") == 1
    assert screen.getvalue().count(", compiling for a batch of another size]") == 1


class Batches:
    """Equal batches, each of which takes a while to read."""

    def __init__(self, num_batches, seconds):
        self.num_batches, self.seconds = num_batches, seconds

    def __iter__(self):
        for _ in range(self.num_batches):
            time.sleep(self.seconds)
            yield X, Y


@pytest.mark.parametrize("is_busy", [True, False])
def test_data_that_is_read_while_a_step_runs_is_not_waited_for(
    is_busy, use_ranks, monkeypatch, capsys
):
    use_ranks(1)
    tnt.shutdown()
    monkeypatch.setattr(fit_loop.PhaseHooks, "is_busy", lambda self: is_busy)
    fit(x=Batches(6, 0.2), y=None)
    assert ("waits for its data" in capsys.readouterr().err) is not is_busy


def test_a_step_is_busy_until_its_results_are_there():
    class Sums:
        ready = False
        shape = ()

        def is_ready(self):
            return self.ready

    progress = Progress(epoch_sums={"loss": (Sums(), Sums())})
    hooks = fit_loop.PhaseHooks(
        "train", tnt.callbacks.CallbackList([], params={}), progress=progress, read=dict
    )
    assert hooks.is_busy()
    progress.epoch_sums["loss"][0].ready = True
    assert not hooks.is_busy()
    progress.epoch_sums = None
    assert not hooks.is_busy()
