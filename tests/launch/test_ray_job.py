"""`tnt-jax --ray` as a job of Ray: submitted with its folder, and stopped amid training."""

import os
import re
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from ray_clusters import await_nothing_left, ray_cluster_of

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow, pytest.mark.long]
REPOSITORY = Path(__file__).parents[2]

# The other module of the folder has the data. A second argument is a file for notes, and slows down.
TRAIN = """
import os, pathlib, sys, time
import flax.linen as nn, tnt_jax as tnt
from pairs import x, y
class Notes(tnt.callbacks.Callback):
    made = 0
    def on_train_batch_end(self, batch, logs=None):
        Notes.made += 1
        if tnt.is_master_rank() and len(sys.argv) > 2:
            note = f"{os.environ['TNT_JOB_ID']} {self.model.optimizer.iterations}"
            pathlib.Path(sys.argv[2]).write_text(note)
            time.sleep(0.05)
model = tnt.Model(nn.Dense(1))
model.compile(tnt.optimizers.SGD(0.1), loss="mse", steps_per_execution=1)
model.fit(x, y, batch_size=10, epochs=int(sys.argv[1]), verbose=0, callbacks=[Notes()])
if tnt.is_master_rank():
    print(tnt.get_size(), "ranks, update", model.optimizer.iterations, "after", Notes.made, flush=True)
"""
PAIRS = """
import numpy as np
x = np.random.default_rng(0).normal(size=(45, 4)).astype("f4")
y = x.sum(1, keepdims=True)
"""


@pytest.fixture(scope="module")
def dashboard():
    """Starts a cluster that takes jobs; yields the address of its dashboard and its own."""
    pytest.importorskip("ray", reason="needs the extra ray")
    with socket.socket() as one, socket.socket() as other:
        for each in (one, other):
            each.bind(("", 0))
        port, agent = one.getsockname()[1], other.getsockname()[1]
    with pytest.MonkeyPatch.context() as patch:
        # Jobs have the environment in which Ray was started.
        patch.setenv("PYTHONPATH", str(REPOSITORY))
        patch.setenv("PATH", os.pathsep.join([os.path.dirname(sys.executable), os.environ["PATH"]]))
        with ray_cluster_of(
            num_cpus=3, include_dashboard=True, dashboard_port=port,
            dashboard_agent_listen_port=agent, no_monitor=True,
        ) as cluster:  # fmt: skip
            yield f"http://127.0.0.1:{port}", cluster.address


@pytest.fixture
def ray_job(dashboard, tmp_path):
    """Runs `ray job COMMAND` on the cluster; returns (exit code, output)."""

    def run(command, *words):
        program = [sys.executable, "-m", "ray.scripts.scripts", "job", command]
        environ = {**os.environ, "NO_COLOR": "1", "RAY_ADDRESS": dashboard[0]}
        result = subprocess.run(
            [*program, *map(str, words)], env=environ, cwd=tmp_path, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True, timeout=240,
        )  # fmt: skip
        return result.returncode, result.stdout

    return run


@pytest.fixture
def submit(ray_job, tmp_path):
    """Submits a job with a folder of two modules; waits until Ray takes jobs."""
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "train.py").write_text(TRAIN)
    (folder / "pairs.py").write_text(PAIRS)

    def submit(*words):
        deadline = time.monotonic() + 120
        while True:
            code, out = ray_job("submit", "--working-dir", folder, *words)
            # The agent that starts jobs comes up later than the rest.
            if "No available agent" not in out or time.monotonic() > deadline:
                return code, out
            time.sleep(1)

    return submit


def test_a_job_trains_in_the_folder_that_came_with_it(submit):
    launch = ["tnt-jax", "--ray", "-n", 2, "--no-gpu", "--"]
    code, out = submit("--", *launch, "train.py", 2)
    assert code == 0, out
    assert "2 ranks, update 10 after 10\n" in out
    code, out = submit("--", *launch, "train.py", "none")
    assert code != 0, "Ray tells of the failure."
    assert "invalid literal for int() with base 10: 'none'" in out


def test_a_job_that_is_stopped_saves_its_state_and_leaves_nothing(
    submit, ray_job, dashboard, tmp_path
):
    note = tmp_path / "note"
    words = [
        "tnt-jax", "--ray", "-n", 2, "--no-gpu", "--checkpoint-dir", tmp_path / "saved",
        "--checkpoint-every", "1h", "--", "train.py",
    ]  # fmt: skip
    # Ray gives a job three seconds by default.
    patience = ["--runtime-env-json", '{"env_vars": {"RAY_JOB_STOP_WAIT_TIME_S": "60"}}']
    begin = ["--no-wait", "--submission-id", "stopped", *patience]
    code, out = submit(*begin, "--", *words, 10000, note)
    assert code == 0, out
    deadline = time.monotonic() + 120
    while not (note.exists() and note.read_text()):
        assert time.monotonic() < deadline, ray_job("logs", "stopped")
        time.sleep(0.1)
    code, out = ray_job("stop", "stopped")
    assert code == 0, out
    assert "was stopped" in ray_job("status", "stopped")[1]
    job_id, last = note.read_text().split()
    await_nothing_left(dashboard[1], job_id)
    log = ray_job("logs", "stopped")[1]
    assert "Passing on SIGTERM" in log
    assert "Traceback" not in log
    assert "Lost" not in log
    # The same command goes on, here for what is left of the epoch.
    code, out = submit("--", *words, 1 + int(last) // 5)
    assert code == 0, out
    ((update, made),) = re.findall(r"2 ranks, update (\d+) after (\d+)\n", out)
    assert int(update) == 5 * (1 + int(last) // 5)
    assert int(made) == int(update) - int(last)
