"""The same bits in any number of processes, started by the real launcher with its own division of
threads.
"""

import json

import pytest
from processes import SCRIPTS, launch

SCRIPT = SCRIPTS / "train_reproducible.py"


def train(num_processes, results):
    done = launch(num_processes, SCRIPT, results)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(results.read_text())


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    return train(1, tmp_path_factory.mktemp("alone") / "results")


@pytest.mark.multiprocess
@pytest.mark.slow
@pytest.mark.parametrize("num_processes", [2, pytest.param(4, marks=pytest.mark.long)])
def test_any_number_of_processes_gives_the_same_bits(num_processes, alone, tmp_path):
    assert alone["threads"] == "8", (
        "The size of the pool must follow from 4 virtual ranks, not from the launcher's division "
        "of cores."
    )
    assert train(num_processes, tmp_path / "results") == alone
