"""Twenty faults at random updates of training in Ray Train; benchmarks/ray_faults.py has more."""

import subprocess
import sys
from pathlib import Path

import pytest
from fault_tables import read_records

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "ray_faults.py"


@pytest.mark.multiprocess
@pytest.mark.slow
def test_workers_and_nodes_that_are_lost_twenty_times_change_no_bit(tmp_path):
    pytest.importorskip("ray", reason="needs the extra ray")
    record = tmp_path / "trials.jsonl"
    options = ["--kinds", "ten", "--trials", "2", "--hang", "60", "--record", str(record)]
    done = subprocess.run(
        [sys.executable, str(SCRIPT), *options], capture_output=True, text=True, timeout=1200
    )
    assert done.returncode == 0, done.stdout + done.stderr
    trials = read_records(record)
    assert [trial["wrong"] for trial in trials] == ["", ""]
    assert [trial["difference"] for trial in trials] == [0, 0]
    faults = [fault for trial in trials for fault in trial["faults"]]
    assert len(faults) == 20
    assert set(faults) == {"worker", "exception", "node"}
