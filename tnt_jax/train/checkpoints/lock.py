"""The lock of a directory, so that two jobs do not write to it.

The lock is a file in the directory on which the process holds a record lock of its open file
description (`F_OFD_SETLK`). The system frees it when the process ends, however it ends. A POSIX
record lock would also be freed when the process closes any other descriptor of the file, for
instance after copying the directory. Where there are no such locks, `flock` takes their place.

The file says who holds it. NFS passes both kinds of locks on to the server, so that other hosts see
them (not with the mount option `nolock` or `local_lock=all`). Where hosts do not see each other's
locks, a time stamp that the holder renews every few seconds tells whether it still runs.
"""

import errno
import fcntl
import json
import os
import socket
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

_RENEWAL_S = 5.0
# A lock of another host that has not been renewed for so long was left by a process that died.
_STALE_S = 4 * _RENEWAL_S
_UNSUPPORTED = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)
# struct flock of Linux: type, whence, start, length (0 for the whole file), process (must be 0).
_WHOLE_FILE = struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
_JOB_VARIABLES = ("SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID", "TNT_JOB_ID")
# The open files of this process's locks.
_open_files: set[int] = set()


class LockedError(RuntimeError):
    """Another job writes to the directory."""


class DirectoryLock:
    """The lock of a directory, by a file in it, which this process holds until `release`.

    It raises a LockedError if another process holds it, an OSError if the file cannot be written.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._is_lost = False
        self._file = _open_locked(path)
        with _closing_on_error(self._file):
            self._take_over()
        self._is_over = threading.Event()
        self._thread = threading.Thread(
            target=self._renew, name="tnt_jax checkpoint lock", daemon=True
        )
        self._thread.start()

    def is_held(self) -> bool:
        """Returns whether the file is still there and this one, and nobody else has the lock."""
        return not self._is_lost and _is_at(self._file, self.path)

    def release(self) -> None:
        """Lets others take the lock, and removes the file."""
        self._is_over.set()
        self._thread.join()
        # The directory may have vanished, or be read-only by now.
        with suppress(OSError):
            if self.is_held():
                self.path.unlink()
        _close(self._file)

    def _take_over(self) -> None:
        holder = _read(self._file)
        if holder and holder.get("machine") != _machine() and _is_renewed(self._file):
            raise _locked(self.path, holder)
        os.ftruncate(self._file, 0)
        os.pwrite(self._file, json.dumps(_own_entry()).encode(), 0)

    def _renew(self) -> None:
        while not self._is_over.wait(_RENEWAL_S):
            # The directory may be gone for a while; `is_held` notices.
            with suppress(OSError):
                # A server of files that was restarted may have given it to another job.
                self._is_lost |= not _lock(self._file)
                os.utime(self._file)


def _open_locked(path: Path) -> int:
    while True:
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
        _open_files.add(file)
        with _closing_on_error(file):
            if not _lock(file):
                raise _locked(path, _read(file))
            # The one who held it may have removed the file since it was opened.
            if _is_at(file, path):
                return file
        _close(file)


@contextmanager
def _closing_on_error(file: int) -> Iterator[None]:
    try:
        yield
    except BaseException:
        _close(file)
        raise


def _close(file: int) -> None:
    if file in _open_files:
        _open_files.remove(file)
        os.close(file)


def _close_in_child() -> None:
    """Closes the files in a process that was forked, which would otherwise keep the locks."""
    while _open_files:
        os.close(_open_files.pop())


os.register_at_fork(after_in_child=_close_in_child)


def _lock(file: int) -> bool:
    """Returns whether this process now has the lock, or the file system has none."""
    try:
        if hasattr(fcntl, "F_OFD_SETLK"):
            fcntl.fcntl(file, fcntl.F_OFD_SETLK, _WHOLE_FILE)
        else:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EAGAIN):
            return False
        if error.errno not in _UNSUPPORTED:
            raise
    return True


def _is_renewed(file: int) -> bool:
    """Returns whether somebody renews the time stamp; clocks of hosts are not compared."""
    before, deadline = os.fstat(file).st_mtime_ns, time.monotonic() + _STALE_S
    while time.monotonic() < deadline:
        time.sleep(0.2)
        if os.fstat(file).st_mtime_ns != before:
            return True
    return False


def _is_at(file: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file), os.stat(path))
    except OSError:
        return False


def _read(file: int) -> dict[str, Any]:
    """Returns who holds a lock; nothing if the file does not say so."""
    try:
        entry = json.loads(os.pread(file, 4096, 0))
    except ValueError:
        return {}
    return entry if isinstance(entry, dict) else {}


def _own_entry() -> dict[str, Any]:
    job = next((os.environ[name] for name in _JOB_VARIABLES if name in os.environ), None)
    return {
        "host": socket.gethostname(),
        "machine": _machine(),
        "pid": os.getpid(),
        "job": job,
        "since": time.strftime("%Y-%m-%d %H:%M:%S %z"),
    }


def _machine() -> str:
    """Returns what tells a running system from all others, whatever its containers are called."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return socket.gethostname()


def _locked(path: Path, holder: dict[str, Any]) -> LockedError:
    job = f", job {holder['job']}" if holder.get("job") else ""
    return LockedError(
        f"{path.parent} is in use by process {holder.get('pid', 'unknown')} on host "
        f"{holder.get('host', 'unknown')}{job}, since {holder.get('since', 'an unknown time')}. "
        "Two jobs cannot write checkpoints to one directory: give each its own, or end one job."
    )
