"""The end of a pass does not wait for the end of its pipeline, and the pipeline does end."""

import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tnt_jax.data.tf.tfdata import elements_of


class Stream:
    """Elements 0, 1, 2; the end of an iterator waits until it may, as TensorFlow's tuner lets it."""

    def __init__(self, fails=False):
        self.may_end, self.has_ended = threading.Event(), threading.Event()
        self.fails = fails

    def as_numpy_iterator(self):
        return Elements(self)


class Elements:
    def __init__(self, stream):
        self.stream, self.number = stream, 0

    def __iter__(self):
        return self

    def __next__(self):
        if self.number == 3:
            raise ValueError("broken") if self.stream.fails else StopIteration
        self.number += 1
        return self.number - 1

    def __del__(self):
        if self.stream.may_end.wait(30):
            self.stream.has_ended.set()


@pytest.fixture
def stream():
    made = Stream()
    yield made
    made.may_end.set()


def test_a_pass_ends_before_its_pipeline(stream):
    assert list(elements_of(stream)) == [0, 1, 2]
    assert not stream.has_ended.is_set()
    stream.may_end.set()
    assert stream.has_ended.wait(30)


def test_so_does_one_that_is_left(stream):
    elements = elements_of(stream)
    assert next(elements) == 0
    elements.close()
    assert not stream.has_ended.is_set()
    stream.may_end.set()
    assert stream.has_ended.wait(30)


def test_an_error_comes_through(stream):
    stream.fails = True
    stream.may_end.set()
    with pytest.raises(ValueError, match="broken"):
        list(elements_of(stream))


LEFT_TO_THE_INTERPRETER = """
from test_ending import Stream
from tnt_jax.data.tf.tfdata import elements_of

stream = Stream()
stream.may_end.set()
elements = elements_of(stream)
print(next(elements))
{when}
"""


@pytest.mark.parametrize("when", ["", "import atexit; atexit.register(elements.close)"])
def test_a_pass_that_ends_with_the_interpreter_does_not_hold_it_up(when):
    script = LEFT_TO_THE_INTERPRETER.format(when=when)
    env = os.environ | {"PYTHONPATH": str(Path(__file__).parent)}
    ended = subprocess.run(
        [sys.executable, "-c", script], env=env, capture_output=True, text=True, timeout=60
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "0\n", "")


def test_without_threads_the_caller_waits(stream, monkeypatch):
    def refuse(self, function):
        raise RuntimeError("cannot schedule new futures after interpreter shutdown")

    monkeypatch.setattr(ThreadPoolExecutor, "submit", refuse)
    stream.may_end.set()
    assert list(elements_of(stream)) == [0, 1, 2]
    assert stream.has_ended.is_set()
