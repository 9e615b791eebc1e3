"""Where the time of a run goes: the parts are what was spent, and add up, also over restarts."""

import json
import signal
import subprocess
import sys
import time

import flax.linen as nn
import numpy as np
import pytest
from processes import SCRIPTS, environment

import tnt_jax as tnt
from tnt_jax.distributed.goodput import Account, AccountFile, open_account, phase, training

PARTS = [
    f"{name}_s"
    for name in (
        "computing", "data", "saving", "compiling", "validating", "callbacks", "starting",
        "restarting", "lost", "other",
    )
]  # fmt: skip


class Sleep(tnt.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        time.sleep(0.2)


def slow_batches(x, wait_s):
    while True:
        time.sleep(wait_s)
        yield x, x[:, :1]


def test_the_parts_of_a_fit_are_what_it_spent_and_add_up(use_ranks, tmp_path):
    use_ranks(2)
    before = tnt.goodput()
    start = time.perf_counter()
    x = np.ones((8, 3), np.float32)
    model = tnt.Model(nn.Dense(1))
    model.compile("sgd", loss="mse")
    backup = tnt.callbacks.BackupAndRestore(tmp_path / "backup")
    model.fit(
        slow_batches(x, 0.05), steps_per_epoch=10, epochs=2, verbose=0,
        callbacks=[Sleep(), backup], validation_data=(x, x[:, :1]),
    )  # fmt: skip
    elapsed_s = time.perf_counter() - start
    found = tnt.goodput()
    assert found["total_s"] - before["total_s"] == pytest.approx(elapsed_s, rel=0.02)
    assert sum(found[name] for name in PARTS) == pytest.approx(found["total_s"], rel=0.02)
    assert found["steps"] == 20
    assert found["callbacks_s"] == pytest.approx(0.4, abs=0.2)
    # The first batch is waited for before training.
    assert found["data_s"] > 19 * 0.05 * 0.8
    assert (
        min(found[f"{name}_s"] for name in ("computing", "saving", "compiling", "validating")) > 0
    )
    assert found["goodput"] == pytest.approx(found["computing_s"] / found["total_s"], abs=1e-3)


class Clock:
    """Stands in for the module `time`."""

    def __init__(self):
        self.now_s = 1000.0

    def time(self):
        return self.now_s

    def perf_counter_ns(self):
        return round(self.now_s * 1e9)


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setitem(Account.switch.__globals__, "time", clock)
    return clock


def test_a_compilation_within_another_counts_once(clock):
    account = Account()
    account.switch("computing")
    clock.now_s += 5
    account.add_compilation(2)
    account.add_compilation(4)  # Contains the first.
    clock.now_s += 1
    account.add_compilation(1)
    report = account.report()
    assert (report["compiling_s"], report["computing_s"]) == (5, 1)


def test_time_of_other_threads_is_not_counted(use_ranks):
    import threading

    use_ranks(1)

    def elsewhere():
        with phase("saving"):
            time.sleep(0.05)

    tnt.goodput()
    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert tnt.goodput()["saving_s"] == 0


def test_steps_that_are_redone_are_lost(clock):
    first = Account(started_s=998)
    first.begin_training(100)
    first.switch("computing")
    clock.now_s += 20
    first.add_steps(10)
    notes = first.notes(is_finished=False)
    clock.now_s += 7
    second = Account(earlier=notes)
    second.begin_training(104)  # Of 110 steps.
    second.switch("saving")
    clock.now_s += 1
    report = second.report()
    assert (report["lost_steps"], report["restarts"], report["steps"]) == (6, 1, 10)
    assert (report["starting_s"], report["restarting_s"], report["saving_s"]) == (2, 7, 1)
    assert (report["lost_s"], report["computing_s"], report["total_s"]) == (12, 8, 30)
    assert report["goodput"] == round(8 / 30, 4)


def trained(earlier, *, first, steps):
    """Returns the notes of a start that goes on at a step and is ended after some more."""
    account = Account(earlier=earlier)
    if first is not None:
        account.begin_training(first)
        account.add_steps(steps)
    return account.notes(is_finished=False)


def test_what_each_start_redoes_adds_up(clock):
    notes = trained(None, first=0, steps=10)
    for first, steps, lost in ((4, 8, 6), (7, 2, 5), (None, 0, 0), (8, 5, 1)):
        before = notes["lost_steps"]
        notes = trained(notes, first=first, steps=steps)
        assert notes["lost_steps"] - before == lost
    assert (notes["restarts"], notes["steps"], notes["step"]) == (4, 25, 13)


@pytest.mark.parametrize(
    ("step", "lost_steps", "lost_s"),
    [
        (110, 0, 0.0),  # Training goes on where it ended.
        (120, 0, 0.0),
        (50, 60, 20.0),  # From a checkpoint of an earlier start; 10 steps were counted.
    ],
)
def test_no_more_time_is_lost_than_was_spent(clock, step, lost_steps, lost_s):
    first = Account()
    first.begin_training(100)
    first.switch("computing")
    clock.now_s += 20
    first.add_steps(10)
    second = Account(earlier=first.notes(is_finished=False))
    second.begin_training(step)
    second.begin_training(0)  # Another `fit` of this start loses nothing.
    report = second.report()
    assert (report["lost_steps"], report["lost_s"]) == (lost_steps, lost_s)
    assert report["computing_s"] == 20 - lost_s


def test_a_finished_run_keeps_its_line(tmp_path):
    path = tmp_path / "new" / "goodput.jsonl"
    for is_finished in (True, False):
        file = AccountFile(path)
        assert file.earlier is None
        file.write(Account().notes(is_finished=is_finished))
    assert len(path.read_text().splitlines()) == 2
    assert AccountFile(path).earlier["finished"] is False


@pytest.mark.parametrize("line", ["{", "[]", '{"finished": false}', "\x00\x01"])
def test_a_file_that_is_no_account_is_kept_and_ends_nothing(tmp_path, line):
    path = tmp_path / "goodput.jsonl"
    path.write_text(line + "\n")
    file = AccountFile(path)
    assert file.earlier is None
    file.write(Account().notes(is_finished=True))
    assert path.read_text().startswith(line)
    assert len(path.read_text().splitlines()) == 2


def test_a_folder_that_cannot_be_written_costs_a_warning(tmp_path, caplog):
    (tmp_path / "file").write_text("")
    AccountFile(tmp_path / "file" / "goodput.jsonl").write(Account().notes(is_finished=True))
    assert "could not be read" in caplog.text
    assert "could not be written" in caplog.text


def test_a_run_that_was_killed_and_started_again_has_one_account(tmp_path):
    file = tmp_path / "goodput.jsonl"
    words = [sys.executable, SCRIPTS / "count_goodput.py", tmp_path / "backup"]
    launched_s = time.time()
    env = environment(TNT_GOODPUT=str(file), TNT_LAUNCHED_AT=str(launched_s))
    first = subprocess.Popen([*map(str, words), "kill"], env=env)
    assert first.wait(100) == -signal.SIGKILL
    interrupted = json.loads(file.read_text())
    assert not interrupted["finished"]
    second = subprocess.run(
        [*map(str, words), "end"], env=env, timeout=100, stdout=subprocess.PIPE, text=True
    )
    assert second.returncode == 0
    resumed, steps = second.stdout.splitlines()
    assert resumed.startswith(f"Training resumes from {tmp_path / 'backup'}, after batch ")
    redone = 10 - int(steps)  # The backup of step 8 may not have been complete.
    elapsed_s = time.time() - launched_s
    (line,) = file.read_text().splitlines()
    report = json.loads(line)
    assert report["finished"]
    assert (report["restarts"], report["lost_steps"]) == (1, redone)
    assert report["steps"] == 20 + redone
    assert 0 < report["restarting_s"] < elapsed_s
    assert sum(report[name] for name in PARTS) == pytest.approx(report["total_s"], rel=0.02)
    assert report["total_s"] == pytest.approx(report["until"] - launched_s, rel=0.02)


def test_who_becomes_the_master_keeps_the_account_of_earlier_starts(tmp_path):
    path = tmp_path / "goodput.jsonl"
    earlier = Account()
    earlier.add_steps(7)
    AccountFile(path).write(earlier.notes(is_finished=False))
    before = path.read_text()
    tnt.shutdown()
    open_account(path=str(path), launched_at=None, is_master=False)
    with training():
        pass
    assert path.read_text() == before
    open_account(path=str(path), launched_at=None, is_master=True)
    with training():
        pass
    tnt.shutdown()
    kept = json.loads(path.read_text())
    assert (kept["steps"], kept["restarts"], kept["finished"]) == (7, 1, True)
