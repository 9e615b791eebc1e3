"""The launcher as a user starts it: a program of its own."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hosts import HOSTS, SSH_ARGS


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

    def write(text, name="script.py"):
        path = tmp_path / name
        path.write_text(text)
        return path

    return write


@pytest.fixture
def hostfile(tmp_path):
    """Writes a hostfile and returns its path."""

    def write(*lines):
        path = tmp_path / "hosts"
        path.write_text("\n".join(lines))
        return path

    return write


@pytest.fixture
def multihost(tnt_jax, hostfile, tmp_path):
    """Starts the launcher on hosts, all by default."""

    def start(*arguments, hosts=HOSTS, ssh_args=SSH_ARGS, **popen):
        options = ["--hostfile", hostfile(*hosts), "--ssh-args", ssh_args, "--no-gpu"]
        return tnt_jax(*options, *arguments, cwd=tmp_path, **popen)

    return start


@pytest.fixture
def processes_on_hosts(run, hostfile):
    """Returns, by host, the running processes of a job."""

    def look(job_id, hosts=HOSTS):
        code, out, err = run("--hostfile", hostfile(*hosts), "--ssh-args", SSH_ARGS, "--cleanup")
        assert code == 0, err
        return [line for line in out.splitlines() if job_id in line]

    return look


@pytest.fixture
def wait_until():
    """Waits for a condition, and fails when it does not come true in time."""

    def wait(condition, *, timeout_s=15.0):
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < deadline, "it did not happen in time"
            time.sleep(0.05)

    return wait
