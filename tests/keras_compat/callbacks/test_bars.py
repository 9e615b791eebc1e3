"""Bars on terminals of any width, which may change, and lines where the output is no terminal."""

import fcntl
import os
import pty
import re
import struct
import sys
import termios
import threading
import warnings
from contextlib import contextmanager, redirect_stdout

import flax.linen as nn
import numpy as np
import pytest
from tqdm import tqdm

import tnt_jax as tnt
from tnt_jax.keras_compat.callbacks import progbar

ITEMS = ["12,345 examples/s", "loss 0.1234", "accuracy 0.9876", "top_k_accuracy 0.9999"]


class PseudoTerminal:
    """A real terminal device of a number of columns, whose output is kept."""

    def __init__(self, columns):
        self.master, slave = pty.openpty()
        self.screen = os.fdopen(slave, "w")
        self.resize(columns)
        self.text = b""
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def resize(self, columns):
        size = struct.pack("HHHH", 24, columns, 0, 0)
        fcntl.ioctl(self.screen.fileno(), termios.TIOCSWINSZ, size)

    def _read(self):
        try:
            while data := os.read(self.master, 4096):
                self.text += data
        except OSError:  # Linux reports the end of a terminal in this way.
            pass

    def drawn(self):
        """Returns all lines that were drawn over one another, after closing the terminal."""
        self.screen.close()
        self._reader.join(10)
        return [line for line in re.split(r"[\r\n]+", self.text.decode()) if line.strip()]


@contextmanager
def terminal(columns):
    made = PseudoTerminal(columns)
    with redirect_stdout(made.screen):
        yield made


@pytest.mark.parametrize(
    ("columns", "shown", "left_out"),
    [
        (160, [*ITEMS, "512/3200", "<"], []),
        (80, ["512/3200", "<", *ITEMS[:2]], ITEMS[2:]),
        (70, ["512/3200", "<", ITEMS[0]], ITEMS[1:]),
        (60, ["512/3200", "<"], ITEMS),
        (30, ["Epoch 12/100: 512/3200"], ITEMS),
    ],
)
def test_a_bar_fits_the_terminal_and_shows_items_as_a_whole(columns, shown, left_out):
    with terminal(columns) as screen:
        bar = progbar.new_bar("Epoch 12/100", 3200)
        progbar.show_items(bar, 512, ITEMS)
        progbar.close(bar, 3200)
    lines = screen.drawn()
    assert max(len(line) for line in lines) < columns
    (line,) = [line for line in lines if "512/3200" in line]
    assert [part for part in shown if part not in line] == []
    assert [part for part in left_out if part.partition(" ")[0] in line] == []


def test_a_bar_follows_the_width_of_its_terminal():
    with terminal(120) as screen:
        bar = progbar.new_bar("Epoch 1/3", 100)
        progbar.show_items(bar, 10, ITEMS)
        screen.resize(60)
        progbar.show_items(bar, 20, ITEMS)
        screen.resize(120)
        progbar.show_items(bar, 30, ITEMS)
        progbar.close(bar, 100)
    widths = {}
    for line in screen.drawn():
        for step in (10, 20, 30):
            if f" {step}/100" in line:
                widths[step] = len(line.rstrip())
    assert 60 < widths[10] < 120
    assert widths[20] < 60
    assert widths[30] == widths[10]


def test_a_bar_without_a_known_end_fits_too():
    with terminal(40) as screen:
        bar = progbar.new_bar("Predict", None)
        progbar.show_items(bar, 7, ITEMS)
        progbar.close(bar, 7)
    lines = screen.drawn()
    assert max(len(line) for line in lines) < 40
    assert any("Predict: step 7 [" in line for line in lines)


def test_a_bar_is_removed_at_its_end():
    with terminal(80) as screen:
        bar = progbar.new_bar("Epoch 1/3", 10)
        progbar.show_items(bar, 4, [])
        progbar.close(bar, 10)
    screen.drawn()
    assert screen.text.decode().rsplit("\r", 2)[-2].strip() == ""


def test_there_is_no_bar_where_the_output_is_no_terminal(capsys):
    assert not sys.stdout.isatty()
    assert progbar.new_bar("Epoch 1/3", 10) is None
    assert capsys.readouterr().out == ""


class Failing(tnt.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        raise RuntimeError("full disk")

    on_test_batch_end = on_predict_batch_end = on_train_batch_end


def test_a_call_that_fails_leaves_no_bar_and_shows_warnings_as_before(two_ranks):
    model = tnt.Model(nn.Dense(1))
    model.compile("sgd", "mse")
    x, y = np.ones((8, 2), np.float32), np.ones((8, 1), np.float32)
    before = warnings.showwarning
    calls = [
        lambda: model.fit(x, y, batch_size=4, verbose=1, callbacks=[Failing()]),
        lambda: model.evaluate(x, y, batch_size=4, verbose=1, callbacks=[Failing()]),
        lambda: model.predict(x, batch_size=4, verbose=1, callbacks=[Failing()]),
    ]
    for call in calls:
        with terminal(80), pytest.raises(RuntimeError, match="full disk"):
            call()
        assert warnings.showwarning is before
        assert not tqdm._instances
