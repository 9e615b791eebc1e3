"""A directory of checkpoints: the names of its folders, and the lock of the job that writes to it.

A folder counts as tnt_jax's own if it has such a name, for example `tnt_jax_step_120`, is not a
link, and its metadata hold tnt_jax's marker or its checksums are there. Only these are read,
counted and removed.

The lock keeps two jobs from writing to one directory. It is a file in the directory on which the
process holds a record lock of its open file description (`F_OFD_SETLK`). The system frees it when
the process ends, however it ends. A POSIX record lock would also be freed when the process closes
any other descriptor of the file, for instance after copying the directory. Where there are no such
locks, `flock` takes their place.

The file says who holds it. NFS passes both kinds of locks on to the server, so that other hosts see
them (not with the mount option `nolock` or `local_lock=all`). Where hosts do not see each other's
locks, a time stamp that the holder renews every few seconds tells whether it still runs.
"""

import errno
import fcntl
import json
import os
import re
import shutil
import socket
import struct
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from tnt_jax.files import read_regular
from tnt_jax.log import logger

# Where the marker stands beside Orbax's own metadata.
METADATA, _MARK, _FORMAT = "_CHECKPOINT_METADATA", "tnt_jax", 1
_HANDLERS = "orbax.checkpoint._src.handlers"
_TMP = ".orbax-checkpoint-tmp"
_UNFINISHED = rf"{re.escape(_TMP)}.*"
# So much is written to see whether a disk is full.
_BLOCK_BYTES = 4096
FOLDER, FILES = "checksums", "files.json"
"""Name of the folder of checksums within a checkpoint, and of the list of files in it."""
# What a folder may contain while it is written.
_PARTS = (METADATA, "state", "extra", "about", FOLDER)


class OwnFolders:
    """The checkpoints of one kind in a directory: a prefix and a number name their folders."""

    def __init__(self, directory: Path, prefix: str) -> None:
        self.directory, self.prefix = directory, prefix

    def folder(self, number: int) -> Path:
        """Returns the path of the checkpoint with a number."""
        return self.directory / f"{self.prefix}_{number}"

    def unfinished(self, number: int) -> Path:
        """Returns the path of the checkpoint with a number while it is written."""
        return self.directory / f"{self.prefix}_{number}{_TMP}"

    def complete(self) -> list[tuple[int, Path]]:
        """Returns number and path of each complete checkpoint."""
        return [(number, path) for number, path in self._named() if is_ours(path)]

    def remains(self) -> list[tuple[int, Path]]:
        """Returns number and path of each folder that has lost its files, as in a purge."""
        return [(n, path) for n, path in self._named() if not is_ours(path) and _holds_parts(path)]

    def taken(self) -> int:
        """Returns the largest number in a name of this kind, of any program; -1 without one."""
        return max((number for number, _ in self._named(f"({_UNFINISHED})?")), default=-1)

    def remove_unfinished(self) -> None:
        """Removes the remains of checkpoints whose writing was interrupted."""
        for _, path in self._named(_UNFINISHED):
            if _holds_parts(path):
                remove(path)

    def remove_old(self, *, max_to_keep: int | None, ignored: set[int]) -> None:
        """Removes all checkpoints but the newest (`max_to_keep`) and the newest of the best."""
        if max_to_keep is None:
            return
        complete = dict(sorted(self.complete()))
        sound = [number for number in complete if number not in ignored]  # Others are damaged.
        best = [number for number in sound if read_mark(complete[number]).get("is_best")]
        kept = {*sound[-max_to_keep:], *best[-1:]}
        removed = [path for number, path in complete.items() if number not in kept]
        for path in [*removed, *(path for _, path in self.remains())]:
            _remove_at_once(path)

    def remove_all(self) -> None:
        """Removes all checkpoints of this kind, and the directory if nothing else is in it."""
        for _, path in [*self.complete(), *self.remains()]:
            _remove_at_once(path)
        self.remove_unfinished()
        if _is_folder(self.directory) and not any(self.directory.iterdir()):
            self.directory.rmdir()

    def _named(self, ending: str = "") -> list[tuple[int, Path]]:
        pattern = re.compile(rf"{re.escape(self.prefix)}_(0|[1-9][0-9]*){ending}")
        entries = sorted(self.directory.iterdir()) if self.directory.is_dir() else []
        return [
            (int(match[1]), path) for path in entries if (match := pattern.fullmatch(path.name))
        ]


def problem_of_folder(folder: Path) -> OSError | None:
    """Returns why nothing can be written to a folder that may not exist yet; None if it can."""
    place = folder.absolute()
    while not (place.exists() or place.is_symlink()):
        place = place.parent
    try:
        with tempfile.TemporaryFile(dir=place) as file:
            file.write(bytes(_BLOCK_BYTES))
    except OSError as error:
        return OSError(
            f"Nothing can be saved in {folder}: {place}: {error.strerror}. Choose another path, or "
            "give this one space and permissions."
        )
    return None


def is_ours(path: Path) -> bool:
    """Returns whether a folder is a complete checkpoint that tnt_jax wrote, damaged or not."""
    return _is_folder(path) and (bool(read_mark(path)) or (path / FOLDER / FILES).is_file())


def write_mark(path: Path, items: Sequence[str], *, is_best: bool) -> None:
    """Writes Orbax's metadata of a checkpoint with trees of arrays, and tnt_jax's marker in it."""
    trees = f"{_HANDLERS}.pytree_checkpoint_handler.PyTreeCheckpointHandler"
    texts = f"{_HANDLERS}.json_checkpoint_handler.JsonCheckpointHandler"
    metadata = {
        "item_handlers": {"about": texts} | dict.fromkeys(items, trees),
        "metrics": {},
        "performance_metrics": {},
        "init_timestamp_nsecs": time.time_ns(),
        "commit_timestamp_nsecs": time.time_ns(),
        "custom_metadata": {_MARK: {"format": _FORMAT, "is_best": is_best}},
    }
    (path / METADATA).write_text(json.dumps(metadata))


def read_mark(path: Path) -> dict[str, Any]:
    """Returns tnt_jax's marker of a checkpoint; nothing if it has none that can be read."""
    try:
        mark = json.loads(read_regular(path / METADATA))["custom_metadata"][_MARK]
    except (OSError, ValueError, RecursionError, LookupError, TypeError):
        return {}
    return mark if isinstance(mark, dict) else {}


def _is_folder(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()


def _holds_parts(path: Path) -> bool:
    """Returns whether a folder holds nothing but parts of a checkpoint, or nothing at all."""
    return _is_folder(path) and all(entry.name.startswith(_PARTS) for entry in path.iterdir())


def _remove_at_once(path: Path) -> None:
    """Removes a checkpoint so that no half of it stays if the process ends meanwhile."""
    try:
        remove(path.rename(path.with_name(f"{path.name}{_TMP}-removed")))
    except OSError as error:
        logger.warning("%s could not be removed: %s", path, error)


def remove(path: Path) -> None:
    """Removes a folder, with a warning if that fails."""
    try:
        shutil.rmtree(path)
    except OSError as error:
        # The run does not depend on it, and the other processes continue.
        logger.warning("%s could not be removed: %s", path, error)


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

    def _renew(self) -> None:
        while not self._is_over.wait(_RENEWAL_S):
            # The directory may be gone for a while; `is_held` notices.
            with suppress(OSError):
                # A server of files that was restarted may have given it to another job.
                self._is_lost |= not _lock(self._file)
                os.utime(self._file)


def _open_locked(path: Path) -> int:
    """Returns an open file that this process has locked, and which names it as the holder."""
    while True:
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
        _open_files.add(file)
        try:
            if not _lock(file):
                raise _locked(path, _read(file))
            # The one who held it may have removed the file since it was opened.
            if _is_at(file, path):
                holder = _read(file)
                if holder and holder.get("machine") != _machine() and _is_renewed(file):
                    raise _locked(path, holder)
                os.ftruncate(file, 0)
                os.pwrite(file, json.dumps(_own_entry()).encode(), 0)
                return file
        except BaseException:
            _close(file)
            raise
        _close(file)


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
