"""Writes the checkpoints of one directory, one at a time and in the background.

The processes of a job agree twice on each checkpoint: when it begins, on its number, and when all
have written, on whether it is complete. What fails on one of them reaches all the others through
the job's coordination service, so that none waits for a process that has failed.
"""

import hashlib
import json
import threading
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, cast

import jax

from tnt_jax import _jax
from tnt_jax.distributed.host import collectives
from tnt_jax.distributed.joining.runtime import init
from tnt_jax.distributed.liveness.rendezvous import read_key
from tnt_jax.job import Slot
from tnt_jax.log import logger
from tnt_jax.train.checkpoints.files import Content, NotFiniteError, complete, write_part
from tnt_jax.train.checkpoints.folders import OwnFolders, remove
from tnt_jax.train.checkpoints.lock import DirectoryLock, LockedError

_WHAT = "a checkpoint"
# "written", "refused" because of its numbers, or "failed".
Result = Literal["written", "refused", "failed"]


@dataclass(frozen=True)
class Outcome:
    """How writing a checkpoint ended, and what was wrong, the same on all processes."""

    result: Result
    problem: str = ""


class Writer:
    """Writes the checkpoints of one directory; `alone` without the other processes."""

    def __init__(self, directory: Path, folders: OwnFolders, *, alone: bool) -> None:
        init()
        self.directory = directory
        self.damaged: set[int] = set()  # Numbers of checkpoints that could not be read.
        self._folders = folders
        self._alone = alone
        self._process = jax.process_index()
        self._is_clean = False
        self._lock: DirectoryLock | None = None
        self._thread: threading.Thread | None = None
        self._attempts = 0
        self._pending: Outcome | None = None
        self._is_writing = False
        identity = hashlib.sha256(f"{directory} {folders.prefix}".encode())
        self._key = f"tnt_jax/checkpoint/{identity.hexdigest()[:16]}"

    @property
    def leads(self) -> bool:
        """Whether this process decides, and writes what all processes hold."""
        return self._alone or self._process == 0

    def lock(self) -> None:
        """Refuses other jobs the directory; raises a LockedError or an OSError on all processes."""
        self._agree("Checkpoints.lock", self._hold_lock)

    def begin(self, wanted: int) -> int:
        """Creates the folder of a checkpoint; returns its number, the wanted or a higher one."""
        return self._agree("Checkpoints.save", lambda: self._prepare(wanted))

    def start(self, number: int, content: Content, *, max_to_keep: int | None) -> None:
        """Writes a checkpoint in the background, with the number that `begin` returned."""
        self._attempts += 1
        self._is_writing = True
        if not (self.leads or content.is_spread):
            return
        self._thread = threading.Thread(
            target=self._write, args=(number, content, max_to_keep), name="tnt_jax checkpoint"
        )
        self._thread.start()

    @property
    def _attempt(self) -> str:
        """The key of the checkpoint that is being written."""
        return f"{self._key}/{self._attempts}"

    def is_done(self) -> bool:
        """Returns whether no checkpoint is being written; all processes ask together."""
        is_done = self._thread is None or not self._thread.is_alive()
        if self._alone or not self._is_writing:
            return is_done
        return collectives.agree("Checkpoints.check", {}, note=is_done)[0]

    def finish(self) -> Outcome | None:
        """Waits for the checkpoint that is being written; returns how it ended, or None."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if not self._is_writing:
            return None
        self._is_writing = False
        if not self.leads:
            text = read_key(f"{self._attempt}/outcome", _WHAT)
            return Outcome(*json.loads(text)) if text else None
        outcome, self._pending = self._pending, None
        return outcome

    def close(self) -> None:
        """Waits until everything is written, without asking the others, and frees the lock."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._pending is not None and self._pending.problem:
            logger.warning("A checkpoint in %s: %s", self.directory, self._pending.problem)
        self._is_writing = False
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def _agree(self, call: str, prepare: Callable[[], int | None]) -> int:
        """Returns what the leading process prepares; if that fails, all raise."""
        number, error = -1, cast(Exception | None, None)
        if self.leads:
            try:
                number = prepare() or 0
            except Exception as raised:  # Raised below, on every process.
                error = raised
        if not self._alone:
            kind = LockedError if isinstance(error, LockedError) else OSError
            note = [number, kind.__name__ if error else "", str(error or "")]
            number, kind, text = collectives.agree(call, {}, note=note)[0]
            if kind and error is None:
                error = LockedError(text) if kind == LockedError.__name__ else OSError(text)
        if error is not None:
            raise error
        return number

    def _hold_lock(self) -> None:
        if self._lock is not None and not self._lock.is_held():
            self._lock.release()
            self._lock = None
            if not self.directory.is_dir():
                raise FileNotFoundError(
                    f"{self.directory} vanished; the next checkpoint creates it again"
                )
            logger.warning("The lock of %s was lost, and is taken again.", self.directory)
        if self._lock is None:
            self.directory.mkdir(parents=True, exist_ok=True)
            self._lock = DirectoryLock(self.directory / f".{self._folders.prefix}.lock")

    def _prepare(self, wanted: int) -> int:
        """Locks the directory and creates the folder of a checkpoint; returns its number."""
        self._hold_lock()
        if not self._is_clean:
            self._folders.remove_unfinished(self.directory)
            self._is_clean = True
        number = max(wanted, self._folders.taken(self.directory) + 1)
        self._temporary(number).mkdir()
        return number

    def _temporary(self, number: int) -> Path:
        return self.directory / self._folders.build_temporary_name(number)

    def _write(self, number: int, content: Content, max_to_keep: int | None) -> None:
        """Writes this process's part; the leading process then lets the checkpoint appear."""
        outcome = self._write_part(number, content)
        if not self.leads:
            told = json.dumps([outcome.result, outcome.problem])
            _jax.coordination_client().key_value_set(f"{self._attempt}/{self._process}", told)
            return
        try:
            if content.is_spread:
                outcomes = [outcome, *self._others()]
                outcome = next((each for each in outcomes if each.result != "written"), outcome)
            if outcome.result == "written":
                target = self.directory / self._folders.build_name(number)
                complete(self._temporary(number), content, target)
                self._folders.remove_old(
                    self.directory, max_to_keep=max_to_keep, ignored=self.damaged
                )
        except Exception as error:  # Each process must hear of it, whatever it is.
            outcome = Outcome("failed", f"{type(error).__name__}: {error}")
        finally:
            self._tell(outcome, number)

    def _write_part(self, number: int, content: Content) -> Outcome:
        try:
            write_part(self._temporary(number), content, process=self._process)
        except NotFiniteError as error:
            return Outcome("refused", str(error))
        except Exception as error:  # Each process must hear of it, whatever it is.
            return Outcome("failed", f"Process {self._process}: {type(error).__name__}: {error}")
        return Outcome("written")

    def _others(self) -> list[Outcome]:
        """Returns how the other processes fared, once all have written."""
        outcomes = []
        for process in range(1, jax.process_count()):
            told = read_key(key := f"{self._attempt}/{process}", _WHAT)
            ends = Outcome("failed", "The script ended while a checkpoint was written")
            outcomes.append(Outcome(*json.loads(told)) if told else ends)
            _jax.coordination_client().key_value_delete(key)
        return outcomes

    def _tell(self, outcome: Outcome, number: int) -> None:
        """Ends a checkpoint for all processes."""
        if outcome.result != "written" and (left := self._temporary(number)).is_dir():
            remove(left)
        self._pending = outcome
        if not self._alone and jax.process_count() > 1:
            client = _jax.coordination_client()
            told = json.dumps([outcome.result, outcome.problem])
            client.key_value_set(f"{self._attempt}/outcome", told)
            # All have read it before they began this one.
            client.key_value_delete(f"{self._key}/{self._attempts - 1}/outcome")


def _close_all(writers: dict[tuple[Path, str, bool], Writer]) -> None:
    with ExitStack() as closing:
        for writer in writers.values():
            closing.callback(writer.close)


# By directory, prefix and `alone`: a run that ended by an exception may still write where the next
# one begins.
_writers = Slot[dict[tuple[Path, str, bool], Writer]](dict, close=_close_all)


def writer_of(directory: Path, folders: OwnFolders, *, alone: bool) -> Writer:
    """Returns the job's writer of the checkpoints of a kind in a directory."""
    writers = _writers.get()
    key = directory, folders.prefix, alone
    if key not in writers:
        writers[key] = Writer(directory, folders, alone=alone)
    return writers[key]


def close_writer(directory: Path, folders: OwnFolders, *, alone: bool) -> None:
    """Closes the job's writer of a directory, if there is one."""
    writer = _writers.get().pop((directory, folders.prefix, alone), None)
    if writer is not None:
        writer.close()
