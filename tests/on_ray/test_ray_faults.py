"""Faults at random updates of training in Ray Train; benchmarks/ray_faults.py has more."""

import subprocess
import sys
from pathlib import Path

import pytest
from fault_tables import read_records

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "ray_faults.py"


@pytest.mark.multiprocess
@pytest.mark.long
@pytest.mark.parametrize(
    ("kinds", "num_trials", "num_faults"),
    [
        pytest.param(["worker", "node", "exception"], 1, 1, id="once"),
        pytest.param(["ten"], 2, 10, id="ten times"),
    ],
)
def test_workers_and_nodes_that_are_lost_change_no_bit(tmp_path, kinds, num_trials, num_faults):
    pytest.importorskip("ray", reason="needs the extra ray")
    record = tmp_path / "trials.jsonl"
    options = ["--trials", str(num_trials), "--hang", "240", "--record", str(record)]
    done = subprocess.run(
        [sys.executable, str(SCRIPT), *options, "--kinds", *kinds],
        capture_output=True, text=True, timeout=1200,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    trials = read_records(record)
    assert len(trials) == num_trials * len(kinds)
    for trial in trials:
        assert trial["wrong"] == ""
        assert trial["difference"] == 0
        assert len(trial.get("faults", [trial["kind"]])) == num_faults
