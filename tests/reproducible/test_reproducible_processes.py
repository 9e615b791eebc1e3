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


@pytest.mark.multiprocess
@pytest.mark.slow
def test_any_number_of_processes_gives_the_same_bits(tmp_path):
    alone = train(1, tmp_path / "alone")
    assert alone["threads"] == "8", (
        "The size of the pool must follow from 4 virtual ranks, not from the launcher's division "
        "of cores."
    )
    for num_processes in (2, 4):
        assert train(num_processes, tmp_path / str(num_processes)) == alone, (
            f"{num_processes} processes differ from one"
        )
