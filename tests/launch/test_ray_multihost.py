"""Ray over several hosts: a job of `tnt-jax --ray`, and of Ray Train, when a host is cut off."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest
import ray_runs
from hosts import HOSTS, cut, finish, mend, needs_cuts, needs_hosts
from processes import SCRIPTS, environment
from ray_clusters import await_nothing_left, leave_cluster, own_cluster
from ray_hosts import SOON_LOST, ray_over_hosts

pytestmark = [pytest.mark.multihost, needs_hosts]
needs_three = pytest.mark.skipif(len(HOSTS) < 3, reason="needs three hosts")

LINEAR = """
import os, socket
import flax.linen as nn, jax, numpy as np, tnt_jax as tnt
print(socket.gethostname(), os.environ["TNT_COORDINATOR_ADDRESS"], flush=True)
x = np.random.default_rng(0).normal(size=(45, 4)).astype("f4")
model = tnt.Model(nn.Dense(1, use_bias=False, kernel_init=nn.initializers.zeros))
model.compile(tnt.optimizers.SGD(0.1), loss="mse")
model.fit(x, x.sum(1, keepdims=True), batch_size=10, epochs=2, shuffle=False, verbose=0)
weights = np.ravel(jax.tree.leaves(model.get_weights())[0])
print(jax.process_count(), *weights, flush=True)
"""


def linear_weights():
    """Returns what NumPy makes of the training above."""
    x = np.random.default_rng(0).normal(size=(45, 4)).astype("f4").astype("f8")
    weights = np.zeros(4)
    for first in [0, 10, 20, 30, 40] * 2:
        rows = x[first : first + 10]
        weights -= 0.1 * 2 * rows.T @ (rows @ weights - rows.sum(1)) / len(rows)
    return weights


@pytest.fixture
def on_ray(tnt_jax, tmp_path):
    """Starts the launcher on a cluster."""

    def start(cluster, *arguments):
        options = ["--ray", "--ray-address", cluster.address, "--no-gpu"]
        return tnt_jax(*options, *arguments, cwd=tmp_path, environ={"XLA_FLAGS": ""})

    return start


@pytest.fixture(scope="module")
def cluster():
    """Starts a head without CPUs, and a node with one on each of the other hosts."""
    with ray_over_hosts(cpus=1, **SOON_LOST) as started:
        yield started


@pytest.fixture
def cut_off(cluster):
    """Returns a function that cuts a node off; afterwards its host has a new one."""
    lost = []

    def cut_off(host):
        lost.append(host)
        cut(host)

    yield cut_off
    for host in lost:
        mend(host)
        cluster.end(host)
        cluster.start(host)


def test_ranks_on_two_hosts_of_a_ray_cluster_train_as_numpy_does(on_ray, script):
    with ray_over_hosts(HOSTS[:2], head_cpus=1, cpus=1) as cluster:
        code, out, err = finish(
            on_ray(cluster, "-n", 2, "--output-on-all-devices", script(LINEAR)), timeout=120
        )
    assert code == 0, err
    lines = [line.split()[2:] for line in sorted(out.splitlines())]
    assert sorted(words[0] for words in lines if len(words) == 2) == HOSTS[:2]
    assert all(words[1].split(":")[0] in HOSTS[:2] for words in lines if len(words) == 2)
    (one, other) = (np.array(words, float) for words in lines if len(words) == 5)
    np.testing.assert_array_equal(one, other)
    assert one[0] == 2
    np.testing.assert_allclose(one[1:], linear_weights(), rtol=1e-6)


@pytest.fixture
def undisturbed(tmp_path):
    """Returns the weights of the training of `train_and_wait.py` in one process."""
    folder = tmp_path / "alone"
    folder.mkdir()
    (folder / "go").touch()
    words = [sys.executable, str(SCRIPTS / "train_and_wait.py"), str(folder), "12"]
    subprocess.run(words, check=True, timeout=180, env=environment())
    return weights_in(folder)


def weights_in(folder):
    with np.load(folder / "weights.npz") as arrays:
        return [arrays[name] for name in arrays]


@needs_cuts
@needs_three
@pytest.mark.long
@pytest.mark.parametrize("rank", [0, 1])
def test_training_goes_on_without_a_host_that_is_cut_off(
    on_ray, cluster, cut_off, undisturbed, tmp_path, wait_until, rank
):
    folder = tmp_path / "run"
    folder.mkdir()
    launcher = on_ray(
        cluster, "-n", 2, "--min-devices", 1, "--max-restarts", 2,
        "--checkpoint-dir", tmp_path / "checkpoints", "--checkpoint-every", 2,
        "--", SCRIPTS / "train_and_wait.py", folder, 12,
    )  # fmt: skip
    notes = [folder / f"reached-{number}" for number in range(2)]
    wait_until(lambda: all(note.exists() and note.read_text() for note in notes), timeout_s=180)
    lost, left = (notes[number].read_text() for number in (rank, 1 - rank))
    cut_off(lost)
    (folder / "go").touch()
    code, out, err = finish(launcher, timeout=240)
    assert code == 0, err
    assert f"Cause: Lost {lost} with rank {rank}: it has been silent" in err
    assert f"Restart 1 starts on {left}." in err
    assert out.splitlines()[-1] == "trained with 1 of 1 processes"
    # It goes on after a checkpoint, which are made every two updates, and does nothing twice.
    lines = (folder / "steps").read_text().splitlines()
    updates = [tuple(map(int, line.split())) for line in lines]
    again = [step for step, start in updates if start == 1]
    assert [step for step, start in updates if start == 0] == list(range(1, 13))
    assert again == list(range(again[0], 25))
    assert 9 <= again[0] <= 13
    for one, other in zip(weights_in(folder), undisturbed, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


@needs_three
@pytest.mark.long
def test_a_killed_launcher_leaves_nothing_on_the_hosts(on_ray, cluster, script, processes_on_hosts):
    sleeper = (
        "import os, socket, subprocess, time\n"
        "subprocess.Popen(['setsid', 'sleep', '600'])\n"
        "print(socket.gethostname(), os.environ['TNT_JOB_ID'], flush=True)\n"
        "time.sleep(600)\n"
    )
    launcher = on_ray(cluster, "-n", 2, "--output-on-all-devices", script(sleeper))
    lines = [launcher.stdout.readline().split() for _ in range(2)]
    assert sorted(line[2] for line in lines) == HOSTS[1:3]
    job_id = lines[0][3]
    assert processes_on_hosts(job_id) != []
    launcher.kill()
    await_nothing_left(cluster.address, job_id)
    assert processes_on_hosts(job_id) == []


@needs_three
@pytest.mark.long
def test_doctor_examines_the_hosts_of_a_ray_cluster(run, cluster, tmp_path):
    words = ["doctor", "--ray", "--ray-address", cluster.address, "--no-gpu", "--json"]
    code, out, err = run(*words, cwd=tmp_path, timeout=180)
    assert code == 0, out + err
    links = json.loads(out)["links"]
    assert len(links) == len(HOSTS) * (len(HOSTS) - 1) // 2
    assert {link[end] for link in links for end in ("from", "to")} == set(HOSTS)


@needs_cuts
@needs_three
@pytest.mark.long
def test_workers_of_ray_train_go_on_without_a_host_that_is_cut_off(
    cluster, cut_off, tmp_path, monkeypatch
):
    import ray

    for name, value in ray_runs.VARIABLES.items():
        monkeypatch.setenv(name, value)
    alone = subprocess.run(
        [sys.executable, "-c", "import json, sys, ray_runs; "
         "print(json.dumps(ray_runs.train({'folder': sys.argv[1]})))", str(tmp_path)],
        capture_output=True, text=True, timeout=180, check=True,
        env=environment(PYTHONPATH=os.path.dirname(ray_runs.__file__)),
    )  # fmt: skip
    expected = json.loads(alone.stdout.splitlines()[-1])
    config = {"folder": str(tmp_path / "run"), "faults": [{"kind": "pause", "rank": 1, "step": 8}]}
    (tmp_path / "run").mkdir()
    ray.init(cluster.address, runtime_env=own_cluster(cluster), log_to_driver=False)
    ray.cloudpickle.register_pickle_by_value(ray_runs)
    try:
        found = ray_runs.run_amid(
            config, [lambda: cut_off(HOSTS[2])], storage=str(tmp_path / "storage"), workers=(1, 2)
        ).return_value
    finally:
        ray.cloudpickle.unregister_pickle_by_value(ray_runs)
        leave_cluster()
    assert ray_runs.sizes(config) == [2, 1]
    assert found["updates"] == expected["updates"] == 24
    assert ray_runs.difference(found, expected) < 1e-5
