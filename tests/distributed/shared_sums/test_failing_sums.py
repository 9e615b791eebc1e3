"""What is left, and what the others are told, where a process or a program fails."""

import re
import subprocess
import sys

import pytest
from processes import SCRIPTS, environment, free_address, launch

SCRIPT = SCRIPTS / "sum_in_memory.py"
pytestmark = pytest.mark.multiprocess


def run_alone(num_processes, *words, **extra):
    """Runs processes that no launcher ends; returns their exit codes and outputs."""
    address = free_address()
    jobs = [
        subprocess.Popen(
            [sys.executable, SCRIPT, *words],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            env=environment(TNT_COORDINATOR_ADDRESS=address, TNT_NUM_PROCESSES=str(num_processes),
                            TNT_PROCESS_ID=str(process), **extra),
        )
        for process in range(num_processes)
    ]  # fmt: skip
    try:
        outputs = [job.communicate(timeout=120)[0] for job in jobs]
    finally:
        for job in jobs:
            job.kill()
    return [job.returncode for job in jobs], outputs


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "code", "most_s"),
    [
        ("killed", -9, 5),
        pytest.param("exits", 3, 5, marks=pytest.mark.long),
        # It waits until the others have taken note of its end before it leaves.
        pytest.param("leaves", 0, 20, marks=pytest.mark.long),
    ],
)
def test_the_others_are_told_which_process_has_ended(tmp_path, how, code, most_s):
    (tmp_path / "how").write_text(how)
    codes, outputs = run_alone(3, "waits", str(tmp_path / "how"))
    assert codes[1] == code
    for process in (0, 2):
        (told,) = re.findall(r"after (.*) s: UNAVAILABLE: process 1 has ended", outputs[process])
        assert float(told) < most_s


@pytest.mark.parametrize("kind", ["size", "type"])
def test_sums_that_do_not_belong_together_are_refused_for_good(kind):
    done = launch(2, SCRIPT, "differs", kind, flags=["--output-on-all-devices"])
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("values of another size or type: every process must run the") == 4
