"""Training in real workers of Ray Train; one of them disturbed."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow]


@pytest.fixture
def ray_runs(ray_cluster):
    """Connects to the cluster; the module's functions travel to its workers as they are."""
    import ray
    import ray_runs

    ray.init(ray_cluster.address, log_to_driver=False, logging_level="ERROR")
    ray.cloudpickle.register_pickle_by_value(ray_runs)
    yield ray_runs
    ray.cloudpickle.unregister_pickle_by_value(ray_runs)
    ray.shutdown()


@pytest.fixture
def undisturbed(tmp_path):
    """Returns what two ranks outside of Ray make of the same training."""
    code = "import json, sys, ray_runs; print(json.dumps(ray_runs.train({'folder': sys.argv[1]})))"
    import json

    environ = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
    result = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)],
        capture_output=True, text=True, timeout=120, check=True,
        env={**environ, "PYTHONPATH": str(Path(__file__).parents[1] / "helpers")},
    )  # fmt: skip
    return json.loads(result.stdout.splitlines()[-1])


@pytest.mark.long  # The reports and the resuming of a worker are tested without Ray's start.
def test_workers_train_together_and_a_killed_one_changes_no_bit(ray_runs, undisturbed, tmp_path):
    folder = tmp_path / "killed"
    folder.mkdir()
    # In the second epoch, two steps after a checkpoint.
    fault = {"rank": 1, "step": 14, "folder": str(folder)}
    result = ray_runs.run(fault, storage=str(tmp_path / "storage"))
    found = result.return_value
    assert (folder / "fault").exists()
    assert found["size"] == undisturbed["size"] == 2
    assert found["updates"] == undisturbed["updates"] == 24
    assert found["history"] == undisturbed["history"]
    assert ray_runs.difference(found, undisturbed) == 0
    assert result.metrics["loss"] == undisturbed["history"]["loss"][-1]
    assert result.metrics["epoch"] == 2
    with result.checkpoint.as_directory() as stored:
        assert [path.name for path in Path(stored, "fit-1").iterdir()] == ["tnt_jax_backup_25"]


@pytest.mark.long
def test_the_code_of_the_page_runs_and_its_weights_can_be_loaded(ray_runs, tmp_path):
    import flax.linen as nn
    import numpy as np
    from pages import ROOT, fences

    import tnt_jax as tnt

    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(1)(x)

    x = np.random.default_rng(0).normal(size=(600, 4)).astype("f4")
    model = tnt.Model(Net())
    model.compile("adam", loss="mse")
    model.build(x)
    given = {"Net": Net, "x": x, "y": x.sum(1, keepdims=True), "model": model, "__name__": "page"}
    first, *others = (text for kind, text in fences(ROOT / "docs/ray.md") if kind == "python")
    given["__name__"] = "__main__"
    exec(first.replace("/shared/runs", str(tmp_path)), given)
    result = given["result"]
    assert result.metrics["epoch"] == 0, "That of the second fit."
    for block in others:
        exec(block, given)
    loss = model.evaluate(x, given["y"], batch_size=256, verbose=0)
    assert loss < 10
    with result.checkpoint.as_directory() as stored:
        assert sorted(path.name for path in Path(stored).glob("fit-*")) == ["fit-1", "fit-2"]
