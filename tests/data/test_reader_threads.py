"""The interpreter ends in order while threads read ahead."""

import subprocess
import sys
import time

import pytest

# An object that is deleted late holds the end up, while the thread would go on.
SCRIPT = """
import atexit, itertools, sys, time
import jax, numpy as np
from tnt_jax.data.feed import Feed

class Slow:
    def __del__(self, sleep=time.sleep):
        sleep(2)

big = np.ones(1 << 24, np.float32)

def prepare(item):
    for _ in range(20 if item else 1):
        jax.block_until_ready(jax.device_put(big))
    return item

atexit.held = Slow()
with Feed(itertools.count(), prepare) as feed:
    print(next(iter(feed)))
    {end}
"""


def run(script):
    start = time.monotonic()
    ended = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=120
    )
    return ended, time.monotonic() - start


@pytest.mark.parametrize(
    ("end", "code"),
    [
        pytest.param("", 0, marks=pytest.mark.long),
        pytest.param("raise SystemExit(3)", 3, marks=pytest.mark.long),
        ("held = feed; 1 / 0", 1),
    ],
)
def test_a_thread_that_puts_batches_on_the_devices_does_not_abort_the_process(end, code):
    ended, _ = run(SCRIPT.format(end=end))
    assert (ended.returncode, ended.stdout) == (code, "0\n")
    assert "terminate" not in ended.stderr
    assert ("ZeroDivisionError" in ended.stderr) == (code == 1)


@pytest.mark.long
def test_a_loop_that_was_left_open_ends_as_well():
    # The interpreter closes it, after the thread has been told.
    script = SCRIPT.replace("with Feed", "feed = Feed").replace(" as feed:", ".__enter__()\nif 1:")
    ended, _ = run(script.format(end=""))
    assert (ended.returncode, ended.stdout) == (0, "0\n")


def test_a_reader_that_is_stuck_holds_the_end_up_for_seconds_only():
    script = """
import time
from tnt_jax.data.feed import Feed

def items():
    yield 0
    time.sleep(1000)

with Feed(items(), lambda item: item) as feed:
    print(next(iter(feed)))
"""
    ended, seconds = run(script)
    assert (ended.returncode, ended.stdout) == (0, "0\n")
    assert seconds < 60
