"""The launcher as a user starts it: a program of its own."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest


@pytest.fixture
def tnt_jax():
    """Starts the launcher and returns its process; what is left of it is killed after the test."""
    started = []

    def start(*arguments, environ=None, **popen):
        path = os.pathsep.join(
            filter(None, [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH")])
        )
        streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        command = [sys.executable, "-m", "tnt_jax.launch", *map(str, arguments)]
        process = subprocess.Popen(
            command,
            env={**os.environ, "PYTHONPATH": path, **(environ or {})},
            **{**streams, **popen},
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.wait()


@pytest.fixture
def run(tnt_jax):
    """Runs the launcher to its end and returns (exit code, standard output, standard error)."""

    def run(*arguments, timeout=60, **popen):
        process = tnt_jax(*arguments, **popen)
        out, err = process.communicate(timeout=timeout)
        return process.returncode, out, err

    return run


@pytest.fixture
def script(tmp_path):
    """Writes a script and returns its path."""

    def write(text):
        path = tmp_path / "script.py"
        path.write_text(text)
        return path

    return write


@pytest.fixture
def wait_until():
    """Waits for a condition, and fails when it does not come true in time."""

    def wait(condition, *, timeout_s=15.0):
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < deadline, "it did not happen in time"
            time.sleep(0.05)

    return wait
