"""Threads of C++ that fail, in a process that goes on without them."""

import subprocess
import sys

import pytest

SCRIPT = """
import atexit, ctypes, sys, threading, time
from tnt_jax import _jax

def fail(when):
    when.wait()
    ctypes.CDLL("libstdc++.so.6")._ZSt9terminatev()

now, ending = threading.Event(), threading.Event()
for when in (now, ending, ending):
    threading.Thread(target=fail, args=(when,), daemon=True).start()
atexit.register(time.sleep, float(sys.argv[1]))
atexit.register(ending.set)
_jax.stop_threads_that_fail()
now.set()
time.sleep(0.2)
print("goes on")
"""


@pytest.mark.parametrize("ends_for_s", [0.2, pytest.param(8.0, marks=pytest.mark.slow)])
def test_threads_that_fail_do_not_end_the_process(ends_for_s):
    command = [sys.executable, "-c", SCRIPT, str(ends_for_s)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "goes on\n", "")
