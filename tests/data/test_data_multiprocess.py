"""Real processes fed by every kind of pipeline train as one process does, and end together."""

import json

import numpy as np
import pytest
from processes import SCRIPTS, launch

pytest.importorskip("tensorflow", reason="needs TensorFlow")

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow]
SCRIPT = SCRIPTS / "train_pipelines.py"


def train(num_processes, folder, *kinds):
    """Trains on several kinds of data by one start; returns what the launcher returned."""
    folder.mkdir()
    return launch(
        num_processes, SCRIPT, folder, *kinds, CUDA_VISIBLE_DEVICES="", TF_CPP_MIN_LOG_LEVEL="3"
    )


def histories(num_processes, folder, *kinds):
    result = train(num_processes, folder, *kinds)
    assert result.returncode == 0, result.stdout + result.stderr
    return {kind: json.loads((folder / f"{kind}.json").read_text()) for kind in kinds}


@pytest.mark.long
def test_two_processes_train_as_one_and_shards_of_any_length_to_their_end(tmp_path):
    one = histories(0, tmp_path / "one", "tf_data", "random_access")
    two = histories(2, tmp_path / "two", "tf_data", "random_access", "own_shard")
    for kind, history in one.items():
        assert len(history["loss"]) == 3
        for name in ("loss", "accuracy"):
            np.testing.assert_allclose(two[kind][name], history[name], rtol=1e-5, err_msg=kind)
    assert len(two["own_shard"]["loss"]) == 2
    assert np.isfinite(two["own_shard"]["loss"]).all()


def test_error_in_the_data_of_one_process_ends_the_job(tmp_path):
    result = train(2, tmp_path / "out", "failing")
    assert result.returncode != 0
    assert "row 33 cannot be used" in result.stdout + result.stderr
    assert not list((tmp_path / "out").iterdir())
