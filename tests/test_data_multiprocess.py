"""Real processes fed by every kind of pipeline train as one process does, and end together."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("tensorflow", reason="needs TensorFlow")

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow]
SCRIPT = Path(__file__).parent / "scripts" / "train_pipelines.py"


def train(num_processes, kind, file):
    kept = {k: v for k, v in os.environ.items() if k not in ("XLA_FLAGS", "PJRT_NPROC") and not k.startswith("TNT_")}
    env = kept | {"JAX_PLATFORMS": "cpu", "CUDA_VISIBLE_DEVICES": "", "TF_CPP_MIN_LOG_LEVEL": "3"}
    launcher = ["-m", "tnt_jax.launch", "-n", str(num_processes), "--no-gpu", "--"] if num_processes > 1 else []
    command = [sys.executable, *launcher, str(SCRIPT), kind, str(file)]
    return subprocess.run(command, capture_output=True, text=True, timeout=240, env=env)


def history_of(num_processes, kind, folder):
    file = folder / f"{num_processes}.json"
    result = train(num_processes, kind, file)
    assert result.returncode == 0, result.stdout + result.stderr
    return json.loads(file.read_text())


@pytest.mark.parametrize("kind", ["tf_data", "random_access"])
def test_two_processes_train_as_one(kind, tmp_path):
    one, two = (history_of(num_processes, kind, tmp_path) for num_processes in (1, 2))
    assert len(one["loss"]) == 3
    for name in ("loss", "accuracy"):
        np.testing.assert_allclose(two[name], one[name], rtol=1e-5)


def test_shards_of_unknown_and_unequal_length_train_to_the_end(tmp_path):
    history = history_of(2, "own_shard", tmp_path)
    assert len(history["loss"]) == 2
    assert np.isfinite(history["loss"]).all()


def test_error_in_the_data_of_one_process_ends_the_job(tmp_path):
    result = train(2, "failing", tmp_path / "none.json")
    assert result.returncode != 0
    assert "row 33 cannot be used" in result.stdout + result.stderr
    assert not (tmp_path / "none.json").exists()
