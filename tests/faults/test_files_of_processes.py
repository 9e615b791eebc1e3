"""What one process cannot write or read, all hear of; none waits for it."""

import re

import numpy as np
import optax
import pytest
from processes import SCRIPTS, launch

from tnt_jax.train.checkpoints.checkpoint import Checkpoints
from tnt_jax.train.checkpoints.directory import DirectoryLock
from tnt_jax.train.state import create_state

pytestmark = pytest.mark.multiprocess


def run(case, directory):
    """Returns what the two processes of a job say."""
    result = launch(
        2,
        SCRIPTS / "save_checkpoints.py",
        case,
        directory,
        flags=["--output-on-all-devices"],
        timeout_s=120,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return {
        number: re.findall(rf"^\[rank {number}\] {number} (.*)$", result.stdout, re.MULTILINE)
        for number in (0, 1)
    }


def save(folder, *numbers):
    checkpoints = Checkpoints(folder)
    for number in numbers:
        state = create_state({"w": np.full(4, number, np.float32)}, {}, optax.sgd(0.1), seed=0)
        checkpoints.save(state)
    checkpoints.close()


@pytest.mark.parametrize("case", ["full", pytest.param("full leader", marks=pytest.mark.long)])
def test_a_full_disk_of_one_process_is_one_warning_on_all_and_is_tried_again(tmp_path, case):
    told = run(case, tmp_path)
    assert told == {number: ["newest 1", "then 4", "warned 1"] for number in (0, 1)}
    assert not list(tmp_path.glob("*tmp*"))


@pytest.mark.long  # The test above shows that the failure reaches all.
@pytest.mark.parametrize("case", ["full raise", "full leader raise"])
def test_a_full_disk_raises_on_all_processes_alike(tmp_path, case):
    told = run(case, tmp_path)
    assert told[0] == told[1]
    assert re.fullmatch(r"raises A checkpoint could not be written. Process [01]: .*", told[0][0])
    assert told[0][1:] == ["newest 1", "warned 0"]


def test_what_is_spread_over_processes_is_read_by_each_and_by_another_number(tmp_path):
    assert run("spread", tmp_path) == {0: ["read 7"], 1: ["read 7"]}
    arrays = Checkpoints(tmp_path).read().arrays
    np.testing.assert_array_equal(
        arrays["accumulated/w"], np.arange(128.0, dtype=np.float32).reshape(2, 8, 8)
    )


def test_a_checkpoint_that_one_process_finds_damaged_is_used_by_none(tmp_path):
    """Each process reads a directory of its own."""
    for process in ("0", "1"):
        save(tmp_path / "some" / process, 1, 2)
        save(tmp_path / "none" / process, 3)
    for damaged in ("some/1/tnt_jax_step_1", "none/1/tnt_jax_step_0"):
        (tmp_path / damaged / "about" / "metadata").write_text("{")
    told = run("views", tmp_path)
    for number in (0, 1):
        assert told[number][0] == "read 0"
        assert "about/metadata has 1 bytes instead of" in told[number][1]
        assert "Checkpoint 0 is used instead" in told[number][1]
        assert re.match(r"raises No checkpoint in .* can be read: .*_step_0", told[number][2])


@pytest.mark.long  # test_checkpoint_lock.py shows it for one process.
def test_a_directory_in_use_is_refused_on_all_processes_by_name(tmp_path):
    lock = DirectoryLock(tmp_path / ".tnt_jax_step.lock")
    told = run("locked", tmp_path)
    lock.release()
    assert told[0] == told[1]
    assert re.match(rf"raises LockedError {tmp_path} is in use by process \d+ on host", told[0][0])


@pytest.mark.long  # Orbax alone wrote nothing here on any process but the first.
def test_each_process_alone_writes_its_own(tmp_path):
    assert run("alone", tmp_path) == {0: ["read 1.0"], 1: ["read 2.0"]}


def test_a_backup_that_fails_ends_training_on_all_processes_within_seconds(tmp_path):
    result = launch(
        2, SCRIPTS / "raise_save_error.py", tmp_path, flags=["--output-on-all-devices"],
    )  # fmt: skip
    pattern = r"^\[rank (\d)\] raised after batch (\d+), (.*) s: A checkpoint could not be written"
    found = re.findall(pattern, result.stdout, re.MULTILINE)
    assert sorted(process for process, _, _ in found) == ["0", "1"], result.stderr
    assert len({batch for _, batch, _ in found}) == 1
    assert int(found[0][1]) < 400  # The epoch, and with it the next backup, ends after 500.
    assert all(float(seconds) < 8 for _, _, seconds in found)
