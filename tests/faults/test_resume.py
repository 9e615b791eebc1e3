"""A run that was killed goes on where it was: every row once in an epoch, and the same bits."""

import json
import random
import signal

import numpy as np
import pytest
from processes import SCRIPTS, launch

SCRIPT = SCRIPTS / "train_resumed.py"
# 96 rows in batches of 8 are 12 steps of an epoch.
NUM_EPOCHS, STEPS = 3, 36


def run(folder, num_processes, *, every="2", flags=(), **options):
    """Runs the script; returns what it wrote, or None if it was killed."""
    out = folder / "out.json"
    out.unlink(missing_ok=True)
    done = launch(
        num_processes,
        SCRIPT,
        json.dumps({"out": str(out)} | options),
        flags=flags,
        TNT_CHECKPOINT_EVERY=every,
    )
    was_killed = "kill_after" in options
    assert (done.returncode != 0) == was_killed, done.stdout + done.stderr
    return None if was_killed else json.loads(out.read_text())


def killed(folder, num_processes, *, rank, step, **options):
    """Runs the script until the process of a rank is killed after a number of steps."""
    run(folder, num_processes, kill_after={str(rank): step}, **options)


def assert_every_row_once_an_epoch(found):
    assert found["seen"] == [NUM_EPOCHS] * 96
    assert found["epochs"] == list(range(NUM_EPOCHS))
    assert found["processes_agree"]


def assert_same_bits(found, whole):
    for name in ("history", "bits", "early_stopping", "seen"):
        assert found[name] == whole[name], name


def assert_close(found, whole):
    """Sums over another number of ranks are rounded otherwise."""
    for name, values in whole["history"].items():
        np.testing.assert_allclose(found["history"][name], values, rtol=1e-5)
    for path, text in whole["bits"].items():
        mine, theirs = (
            np.frombuffer(bytes.fromhex(each), "<f4") for each in (found["bits"][path], text)
        )
        np.testing.assert_allclose(mine, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.long  # Two processes, below, do.
@pytest.mark.multiprocess
def test_a_killed_process_goes_on_with_the_same_bits(tmp_path):
    options = {"resume": str(tmp_path / "runs")}
    killed(tmp_path, 0, rank=0, step=17, **options)
    # The second fit of the script has checkpoints of its own, and is not interrupted.
    whole = run(tmp_path, 0, fits_before=1, **options)
    found = whole["before"][0]
    assert_every_row_once_an_epoch(found)
    assert_same_bits(found, whole)
    assert STEPS - 17 < whole["steps"] - STEPS < STEPS
    assert sorted(path.name for path in (tmp_path / "runs").iterdir()) == ["fit-1", "fit-2"]


@pytest.mark.multiprocess
def test_two_processes_go_on_as_one_within_an_epoch(tmp_path):
    # The script says nothing of checkpoints.
    directory = str(tmp_path / "runs")
    flags = ("--checkpoint-dir", directory, "--checkpoint-every", "2")
    killed(tmp_path, 2, rank=1, step=17, flags=flags)
    whole = run(tmp_path, 0, fits_before=1, resume=directory)
    found = whole["before"][0]
    assert_every_row_once_an_epoch(found)
    assert_close(found, whole)
    assert STEPS - 17 < whole["steps"] - STEPS < STEPS


@pytest.mark.long  # tests/faults/test_resume_argument.py shows nearly the same in one process.
@pytest.mark.multiprocess
def test_a_killed_run_is_refused_to_another_rate_on_every_process(tmp_path):
    options = {"resume": str(tmp_path / "runs"), "out": str(tmp_path / "out.json")}
    killed(tmp_path, 2, rank=1, step=17, **options)
    other = launch(
        2, SCRIPT, json.dumps(options | {"rate": 0.5}), flags=["--output-on-all-devices"]
    )
    assert other.returncode == 1
    text = "fit-1 holds another run: optimizer.learning_rate: 0.125 in the checkpoint, 0.5 now."
    assert (other.stdout + other.stderr).count(text) >= 2
    run(tmp_path, 1, **options)


@pytest.mark.long  # The tests above begin and end with other numbers of processes.
@pytest.mark.multiprocess
@pytest.mark.parametrize("data", ["arrays", "tf"])
def test_two_processes_go_on_as_one_and_one_as_two_and_return_at_once_after_the_end(tmp_path, data):
    options = {"data": data, "resume": str(tmp_path / "runs")}
    killed(tmp_path, 2, rank=1, step=17, **options)
    killed(tmp_path, 1, rank=0, step=9, **options)
    found = run(tmp_path, 2, **options)
    assert_every_row_once_an_epoch(found)
    assert 0 < found["steps"] < STEPS - 17
    assert_close(found, run(tmp_path, 0, data=data))
    for num_processes in (0, 1, 2):
        again = run(tmp_path, num_processes, **options)
        assert again["steps"] == 0
        assert_same_bits(again, found)


@pytest.mark.long  # The tests above show nearly the same, for one step and kind of data each.
@pytest.mark.multiprocess
@pytest.mark.parametrize("data", ["arrays", "random_access", "tf", "generator"])
@pytest.mark.parametrize("num_processes", [1, 2])
@pytest.mark.parametrize("seed", range(3))
def test_a_run_killed_at_random_has_the_bits_of_one_that_was_not(
    tmp_path, data, num_processes, seed
):
    draw = random.Random(f"{data} {num_processes} {seed}")
    options = {"data": data, "every": str(draw.choice([1, 2, 5, "epoch", "0.02s"]))}
    resumed = options | {"resume": str(tmp_path / "runs")}
    for _ in range(draw.randint(1, 3)):
        # Each time later than what the time before can have saved, or in the last steps.
        killed(
            tmp_path,
            num_processes,
            rank=draw.randrange(num_processes),
            step=draw.randint(1, 11),
            **resumed,
        )
    found = run(tmp_path, num_processes, **resumed)
    assert_every_row_once_an_epoch(found)
    assert_same_bits(found, run(tmp_path, num_processes, **options))


@pytest.mark.long
@pytest.mark.multiprocess
@pytest.mark.parametrize("step", [13, 14, 15])
def test_gradients_within_an_accumulation_are_not_lost(tmp_path, step):
    options = {"accumulation_steps": 4, "every": "1"}
    killed(tmp_path, 2, rank=0, step=step, resume=str(tmp_path / "runs"), **options)
    found = run(tmp_path, 2, resume=str(tmp_path / "runs"), **options)
    assert_every_row_once_an_epoch(found)
    assert_same_bits(found, run(tmp_path, 2, **options))


@pytest.mark.long
@pytest.mark.multiprocess
def test_another_number_of_processes_with_a_micro_batch_goes_on_at_the_same_row(tmp_path):
    # Two processes have batches of 16 rows, one of 8.
    options = {"data": "random_access", "micro": 8, "resume": str(tmp_path / "runs")}
    killed(tmp_path, 2, rank=1, step=9, **options)
    killed(tmp_path, 1, rank=0, step=5, **options)
    # A multiple of 8 rows is one of 16 or not: where it is not, both are named.
    found = launch(2, SCRIPT, json.dumps({"out": str(tmp_path / "out.json")} | options))
    if found.returncode:
        assert "in global batches of 8 rows, but the global batch has 16 rows" in found.stderr
        found = run(tmp_path, 1, **options)
    else:
        found = json.loads((tmp_path / "out.json").read_text())
    assert_every_row_once_an_epoch(found)


@pytest.mark.long
@pytest.mark.multiprocess
def test_a_process_killed_by_the_launcher_s_end_goes_on(tmp_path):
    import subprocess
    import sys
    import time

    from processes import environment

    words = ["-m", "tnt_jax.launch", "-n", "2", "--no-gpu", "--", str(SCRIPT)]
    options = {"out": str(tmp_path / "out.json"), "resume": str(tmp_path / "runs"), "epochs": 3}
    job = subprocess.Popen(
        [sys.executable, *words, json.dumps(options)], env=environment(TNT_CHECKPOINT_EVERY="1")
    )
    deadline = time.monotonic() + 200
    while not list((tmp_path / "runs").glob("fit-1/tnt_jax_backup_*/state")):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    job.send_signal(signal.SIGKILL)
    job.wait()
    time.sleep(3)  # The processes notice that the launcher has gone.
    assert_every_row_once_an_epoch(run(tmp_path, 2, resume=options["resume"]))
