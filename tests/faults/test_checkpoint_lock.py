"""Two jobs do not write to one directory, and a lock does not outlive its job."""

import errno
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import textwrap
import time

import numpy as np
import pytest

from tnt_jax.train.checkpoints import directory as checkpoint_lock
from tnt_jax.train.checkpoints.checkpoint import Checkpoints
from tnt_jax.train.checkpoints.directory import DirectoryLock, LockedError

HOLDER = textwrap.dedent("""
    import os, sys, time
    from pathlib import Path
    from tnt_jax.train.checkpoints.directory import DirectoryLock, fcntl
    if "WITHOUT_OFD" in os.environ:
        del fcntl.F_OFD_SETLK
    lock = DirectoryLock(Path(sys.argv[1]))
    # A child says so itself: until it runs, it has the files of its parent.
    if "fork" not in sys.argv or not os.fork():
        print("held", os.getpid(), flush=True)
    time.sleep(100)
""")


def hold(path, *words, **extra):
    """Starts a process that holds a lock; returns it and what it says."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(path), *words],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | extra,
    )
    return process, process.stdout.readline().split()


def test_a_second_job_is_refused_by_name_until_the_first_is_killed(tmp_path):
    path = tmp_path / "lock"
    holder, told = hold(path, "fork", SLURM_JOB_ID="4711")
    with pytest.raises(
        LockedError,
        match=rf"{re.escape(str(tmp_path))} is in use by process {holder.pid} on host \S+, "
        r"job 4711, since \d{4}-",
    ):
        DirectoryLock(path)
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    # What the holder has forked still runs, and does not keep the lock.
    os.kill(int(told[1]), 0)
    start = time.monotonic()
    lock = DirectoryLock(path)
    # Of the same machine nobody waits for a time stamp.
    assert time.monotonic() - start < checkpoint_lock._STALE_S / 2
    os.kill(int(told[1]), signal.SIGKILL)
    assert json.loads(path.read_text())["pid"] == os.getpid()
    lock.release()
    assert not path.exists()


def test_a_lock_of_another_host_holds_while_it_is_renewed(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint_lock, "_STALE_S", 1.0)
    path = tmp_path / "lock"
    path.write_text(json.dumps({"host": "far", "machine": "another", "pid": 5, "since": "then"}))
    renewing = subprocess.Popen(
        ["sh", "-c", f"while :; do sleep 0.3; touch {path}; done"], stdout=subprocess.DEVNULL
    )
    with pytest.raises(LockedError, match="process 5 on host far, since then"):
        DirectoryLock(path)
    renewing.kill()
    renewing.wait()
    start = time.monotonic()
    lock = DirectoryLock(path)
    assert 1.0 <= time.monotonic() - start < 10
    lock.release()


def test_a_file_that_was_removed_as_it_was_locked_is_no_lock(tmp_path, monkeypatch):
    path, lock = tmp_path / "lock", checkpoint_lock._lock

    def lock_late(file):
        monkeypatch.setattr(checkpoint_lock, "_lock", lock)
        path.unlink()  # By the process that held it.
        return lock(file)

    monkeypatch.setattr(checkpoint_lock, "_lock", lock_late)
    held = DirectoryLock(path)
    assert held.is_held()
    held.release()


def test_the_lock_of_another_job_is_not_removed(tmp_path):
    lock = DirectoryLock(tmp_path / "lock")
    lock.path.unlink()
    lock.path.write_text("of another job")
    lock.release()
    assert lock.path.read_text() == "of another job"


def test_a_lock_that_vanished_is_noticed(tmp_path):
    lock = DirectoryLock(tmp_path / "lock")
    assert lock.is_held()
    lock.path.unlink()
    assert not lock.is_held()
    lock.release()


@pytest.mark.parametrize("content", ["", "{", "[]", "null", "x" * 4000])
def test_a_lock_file_that_says_nothing_is_taken_over(tmp_path, content):
    (tmp_path / "lock").write_text(content)
    lock = DirectoryLock(tmp_path / "lock")
    assert json.loads(lock.path.read_text())["pid"] == os.getpid()
    lock.release()


def wait_until(holds):
    deadline = time.monotonic() + 20
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def is_refused(path):
    """Returns whether another process does not get the lock."""
    other, told = hold(path)
    other.kill()
    other.wait()
    return not told


def test_the_holder_renews_the_time_stamp(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint_lock, "_RENEWAL_S", 0.05)
    lock = DirectoryLock(tmp_path / "lock")
    before = lock.path.stat().st_mtime_ns
    wait_until(lambda: lock.path.stat().st_mtime_ns > before)
    lock.release()


@pytest.mark.parametrize("has_ofd", [True, False])
def test_the_lock_stays_when_its_own_job_copies_the_directory(tmp_path, monkeypatch, has_ofd):
    if not has_ofd:
        monkeypatch.delattr(checkpoint_lock.fcntl, "F_OFD_SETLK")
        monkeypatch.setenv("WITHOUT_OFD", "1")
    (tmp_path / "run").mkdir()
    lock = DirectoryLock(tmp_path / "run" / "lock")
    shutil.copytree(tmp_path / "run", tmp_path / "copy")
    assert is_refused(lock.path)
    lock.release()
    assert not is_refused(lock.path)


def test_a_lock_that_another_job_has_got_is_noticed(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint_lock, "_RENEWAL_S", 0.05)
    lock = DirectoryLock(tmp_path / "lock")
    monkeypatch.setattr(checkpoint_lock, "_lock", lambda file: False)
    wait_until(lambda: not lock.is_held())
    lock.release()
    assert (tmp_path / "lock").exists()


def test_a_job_whose_lock_was_replaced_writes_no_more(tmp_path, use_ranks):
    use_ranks(1)
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save({"w": np.ones(2)}, step=1)
    checkpoints.wait()
    path = tmp_path / ".tnt_jax_step.lock"
    path.unlink()
    other, _ = hold(path)
    with pytest.raises(LockedError, match=f"is in use by process {other.pid}"):
        checkpoints.save({"w": np.ones(2)}, step=2)
    other.kill()
    other.wait()
    # A lock file that was only deleted is created again.
    path.unlink()
    assert checkpoints.save({"w": np.ones(2)}, step=3) == 3
    path.unlink()
    assert checkpoints.save({"w": np.ones(2)}, step=4) == 4
    checkpoints.close()


def test_a_file_system_without_locks_leaves_the_time_stamp(tmp_path, monkeypatch):
    def refuse(file, how, what):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(checkpoint_lock.fcntl, "fcntl", refuse)
    number = errno.ENOLCK
    DirectoryLock(tmp_path / "lock").release()
    number = errno.EIO
    with pytest.raises(OSError, match="Input/output error"):
        DirectoryLock(tmp_path / "lock")


def test_a_link_in_the_place_of_the_lock_is_not_followed(tmp_path):
    (tmp_path / "own").write_text("important")
    (tmp_path / "lock").symlink_to(tmp_path / "own")
    with pytest.raises(OSError, match="symbolic links"):
        DirectoryLock(tmp_path / "lock")
    assert (tmp_path / "own").read_text() == "important"
