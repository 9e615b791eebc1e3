"""The shipped examples and cluster files go on after a failure."""

import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from example_modules import EXAMPLES
from processes import environment

from tnt_jax.train.checkpoints.checkpoint import Checkpoints


def start(directory, *command):
    words = ["-m", "tnt_jax.launch", "-n", "1", "--no-gpu", "--checkpoint-dir", str(directory)]
    every = ["--checkpoint-every", "3"]
    return subprocess.Popen(
        [sys.executable, *words, *every, "--", *map(str, command)],
        env=environment(),
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def ended(directory):
    """Returns the last checkpoint of the only fit."""
    return Checkpoints(directory / "fit-1", prefix="tnt_jax_backup", alone=True).read()


@pytest.mark.long  # test_resume.py kills a smaller script in the same way.
@pytest.mark.multiprocess
def test_an_example_that_is_killed_within_an_epoch_ends_with_the_same_bits(tmp_path):
    command = [EXAMPLES / "digits.py", "--epochs", "3"]
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    job = start(resumed, *command)
    deadline = time.monotonic() + 200
    # 23 steps an epoch: the third backup is made in the middle of the first.
    while not list(resumed.glob("fit-1/tnt_jax_backup_9/about")):
        assert job.poll() is None, "It ended before it was killed."
        assert time.monotonic() < deadline
        time.sleep(0.01)
    os.killpg(job.pid, signal.SIGKILL)
    job.wait()
    screens = []
    for directory in (resumed, whole):
        job = start(directory, *command)
        screens.append(job.communicate(timeout=200)[0])
        assert job.returncode == 0
    assert "Training resumes from" in screens[0]
    assert "Training resumes from" not in screens[1]
    last = [screen.splitlines()[-1] for screen in screens]
    assert last[0] == last[1]
    assert last[0].startswith("test accuracy")
    mine, theirs = ended(resumed), ended(whole)
    assert mine.notes["callbacks"] == theirs.notes["callbacks"], "The history is among them."
    for path, array in theirs.arrays.items():
        np.testing.assert_array_equal(mine.arrays[path], array, err_msg=path)


@pytest.mark.parametrize(("code", "requeues"), [(75, True), (0, False), (1, False)])
def test_the_slurm_script_passes_the_warning_on_and_is_started_again(tmp_path, code, requeues):
    (tmp_path / "venv" / "bin").mkdir(parents=True)
    (tmp_path / "venv" / "bin" / "activate").write_text(f"PATH={tmp_path}:$PATH\n")
    stub = 'echo "$@" > words\ntrap "sleep 0.2; exit $CODE" TERM\ntouch ready\nwhile :; do sleep 0.05; done'
    for name, text in (("tnt-jax", stub), ("scontrol", 'echo "$@" > requeued')):
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / name).chmod(0o755)
    script = subprocess.Popen(
        ["bash", EXAMPLES / "cluster" / "train.slurm"],
        cwd=tmp_path,
        env=os.environ | {"HOME": str(tmp_path), "SLURM_JOB_ID": "7", "CODE": str(code)},
    )
    deadline = time.monotonic() + 20
    while not (tmp_path / "ready").exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    script.send_signal(signal.SIGTERM)
    assert script.wait(timeout=20) == code
    assert (
        f"--checkpoint-dir {tmp_path}/checkpoints/7 -- examples/"
        in (tmp_path / "words").read_text()
    )
    assert (tmp_path / "requeued").exists() == requeues
    if requeues:
        assert (tmp_path / "requeued").read_text() == "requeue 7\n"
