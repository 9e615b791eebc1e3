"""Trials of Ray Tune whose ranks are workers of Ray Train."""

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
import ray_runs
from ray_clusters import own_cluster, ray_cluster_of

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow, pytest.mark.long]
NUM_EPOCHS = 1_000_000


@pytest.fixture
def cluster(monkeypatch):
    """Starts a cluster with a dashboard, which tells Ray Train that a trial has ended."""
    for name, value in ray_runs.VARIABLES.items():
        monkeypatch.setenv(name, value)
    with ray_cluster_of(include_dashboard=True) as cluster:
        # Ray Train asks the latest cluster of the machine, unless it is told which one.
        monkeypatch.setenv("RAY_ADDRESS", cluster.address)
        yield cluster


@pytest.fixture
def connected(cluster):
    """Connects to the cluster."""
    import ray

    with ray.init(cluster.address, log_to_driver=False, runtime_env=own_cluster(cluster)):
        yield


def test_a_trial_that_ends_early_ends_all_of_its_ranks(connected, tmp_path):
    import ray
    from ray import train, tune
    from ray.train.v2.jax import JaxTrainer
    from ray.tune.integration.ray_train import TuneReportCallback
    from ray.tune.schedulers import ASHAScheduler

    folder, num_epochs = str(tmp_path), NUM_EPOCHS

    def train_model(config):
        import flax.linen as nn
        import numpy as np

        import tnt_jax as tnt

        x = np.random.default_rng(0).normal(size=(64, 3)).astype("f4")
        model = tnt.Model(nn.Dense(1))
        model.compile(tnt.optimizers.SGD(config["learning_rate"]), "mse")
        name = f"{config['learning_rate']} {tnt.get_rank()} of {tnt.get_size()}"
        Path(folder, name).write_text(str(os.getpid()))
        report = tnt.callbacks.RayReport(save_freq=None)
        model.fit(x, x[:, :1], batch_size=8, epochs=num_epochs, verbose=0, callbacks=[report])

    def run_trial(config):
        trainer = JaxTrainer(
            train_model,
            train_loop_config=config,
            scaling_config=train.ScalingConfig(num_workers=2),
            run_config=train.RunConfig(
                name=tune.get_context().get_trial_id(),
                storage_path=f"{folder}/train",
                callbacks=[TuneReportCallback()],
            ),
        )
        trainer.fit()

    tuner = tune.Tuner(
        tune.with_resources(run_trial, {"cpu": 0.1}),
        param_space={"learning_rate": tune.grid_search([0.1, 0.01])},
        tune_config=tune.TuneConfig(
            metric="loss",
            mode="min",
            max_concurrent_trials=1,
            scheduler=ASHAScheduler(max_t=2, grace_period=1, reduction_factor=2),
        ),
        run_config=tune.RunConfig(storage_path=f"{folder}/tune", verbose=0),
    )
    results = tuner.fit()
    assert not results.errors
    assert {result.metrics["training_iteration"] for result in results} <= {1, 2}
    assert results.get_best_result().config["learning_rate"] == 0.1
    ranks = {path.name: int(path.read_text()) for path in tmp_path.glob("* of *")}
    assert set(ranks) == {f"{rate} {rank} of 2" for rate in (0.1, 0.01) for rank in (0, 1)}
    assert_soon(lambda: not any(map(is_running, ranks.values())), "all ranks have ended")
    total = ray.cluster_resources()["CPU"]
    assert_soon(lambda: ray.available_resources().get("CPU") == total, "all CPUs are free")


def test_the_example_searches_on_a_cluster(cluster):
    example = Path(__file__).parents[2] / "examples" / "ray_tune.py"
    words = ["--address", cluster.address, "--workers", 2, "--trials", 2, "--epochs", 3]
    done = subprocess.run(
        [sys.executable, example, *map(str, words), "--at-once", "1"],
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"epochs of the trials: \[\d, 3\]", done.stdout)
    assert re.search(
        r"best validation accuracy: 0\.\d+ with learning rate \S+ and \d+ units", done.stdout
    )


def is_running(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def assert_soon(condition, what):
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline, f"not so within 30 s: {what}"
        time.sleep(0.2)
