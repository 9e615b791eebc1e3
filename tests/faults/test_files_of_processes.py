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


def run(directory, *cases):
    """Returns what the two processes of a job say in each case."""
    result = launch(
        2,
        SCRIPTS / "save_checkpoints.py",
        directory,
        *cases,
        flags=["--output-on-all-devices"],
        timeout_s=120,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    lines = re.findall(r"^\[rank (\d)\] \1 (.*?): (.*)$", result.stdout, re.MULTILINE)
    return {
        case: {
            number: [text for rank, name, text in lines if (rank, name) == (str(number), case)]
            for number in (0, 1)
        }
        for case in cases
    }


def save(folder, *numbers):
    checkpoints = Checkpoints(folder)
    for number in numbers:
        state = create_state({"w": np.full(4, number, np.float32)}, {}, optax.sgd(0.1), seed=0)
        checkpoints.save(state)
    checkpoints.close()


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    """Returns the folder of a job of several cases, and what its processes said."""
    folder = tmp_path_factory.mktemp("job")
    # Each process reads directories of its own.
    for process in ("0", "1"):
        save(folder / "views" / "some" / process, 1, 2)
        save(folder / "views" / "none" / process, 3)
    for damaged in ("some/1/tnt_jax_step_1", "none/1/tnt_jax_step_0"):
        (folder / "views" / damaged / "about" / "metadata").write_text("{")
    return folder, run(folder, "full", "spread", "views")


def assert_tried_again(folder, told):
    assert told == {number: ["newest 1", "then 4", "warned 1"] for number in (0, 1)}
    assert not list(folder.glob("*tmp*"))


def test_a_full_disk_of_one_process_is_one_warning_on_all_and_is_tried_again(job):
    folder, told = job
    assert_tried_again(folder / "full", told["full"])


@pytest.mark.long  # The test above shows it for the other process.
def test_a_full_disk_of_the_first_process_is_tried_again(tmp_path):
    assert_tried_again(tmp_path / "full leader", run(tmp_path, "full leader")["full leader"])


@pytest.mark.long  # The test above shows that the failure reaches all.
@pytest.mark.parametrize("case", ["full raise", "full leader raise"])
def test_a_full_disk_raises_on_all_processes_alike(tmp_path, case):
    told = run(tmp_path, case)[case]
    assert told[0] == told[1]
    assert re.fullmatch(r"raises A checkpoint could not be written. Process [01]: .*", told[0][0])
    assert told[0][1:] == ["newest 1", "warned 0"]


def test_what_is_spread_over_processes_is_read_by_each_and_by_another_number(job):
    folder, told = job
    assert told["spread"] == {0: ["read 7"], 1: ["read 7"]}
    arrays = Checkpoints(folder / "spread").read().arrays
    np.testing.assert_array_equal(
        arrays["accumulated/w"], np.arange(128.0, dtype=np.float32).reshape(2, 8, 8)
    )


def test_a_checkpoint_that_one_process_finds_damaged_is_used_by_none(job):
    told = job[1]["views"]
    for number in (0, 1):
        assert told[number][0] == "read 0"
        assert "about/metadata has 1 bytes instead of" in told[number][1]
        assert "Checkpoint 0 is used instead" in told[number][1]
        assert re.match(r"raises No checkpoint in .* can be read: .*_step_0", told[number][2])


@pytest.mark.long  # test_checkpoint_lock.py shows it for one process.
def test_a_directory_in_use_is_refused_on_all_processes_by_name(tmp_path):
    folder = tmp_path / "locked"
    folder.mkdir()
    lock = DirectoryLock(folder / ".tnt_jax_step.lock")
    told = run(tmp_path, "locked")["locked"]
    lock.release()
    assert told[0] == told[1]
    assert re.match(rf"raises LockedError {folder} is in use by process \d+ on host", told[0][0])


@pytest.mark.long  # Orbax alone wrote nothing here on any process but the first.
def test_each_process_alone_writes_its_own(tmp_path):
    assert run(tmp_path, "alone")["alone"] == {0: ["read 1.0"], 1: ["read 2.0"]}


def test_a_backup_that_fails_ends_training_on_all_processes_within_seconds(tmp_path):
    result = launch(
        2, SCRIPTS / "raise_save_error.py", tmp_path, flags=["--output-on-all-devices"],
    )  # fmt: skip
    pattern = r"^\[rank (\d)\] raised after batch (\d+), (.*) s: A checkpoint could not be written"
    found = re.findall(pattern, result.stdout, re.MULTILINE)
    assert sorted(process for process, _, _ in found) == ["0", "1"], result.stderr
    assert len({batch for _, batch, _ in found}) == 1
    assert int(found[0][1]) < 80  # The epoch, and with it the next backup, ends after 100.
    assert all(float(seconds) < 8 for _, _, seconds in found)
