"""Checkpoints of the whole training state and the position in the data.

They are atomic, written in the background by TensorStore, and in Orbax's layout, so that Orbax can
read the arrays; Orbax itself is not needed.

```python
checkpoints = Checkpoints("runs/a", max_to_keep=2)
# Returns when the arrays are copied; writing goes on.
checkpoints.save(trainer.state, position=Position(epoch=3, batch=0))
checkpoints.wait()

saved = Checkpoints("runs/a").read()
trainer.set_state(with_arrays(trainer.state, saved.arrays))
```

A checkpoint is a folder such as `tnt_jax_step_120`. It appears when it is complete, and an older
one is deleted after that: whenever a process dies, the last complete checkpoint can be read, on any
number of devices and processes. Whatever else lies in the directory is neither read nor removed.
"""

import hashlib
import json
import os
import threading
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, cast

import jax
import numpy as np

from tnt_jax import _jax
from tnt_jax.distributed.host import collectives
from tnt_jax.distributed.joining.runtime import init, is_master_rank
from tnt_jax.distributed.liveness.phases import in_phase
from tnt_jax.distributed.liveness.rendezvous import read_key
from tnt_jax.job import Slot
from tnt_jax.log import logger
from tnt_jax.train.checkpoints.directory import DirectoryLock, LockedError, OwnFolders, remove
from tnt_jax.train.checkpoints.files import (
    Content,
    DamagedCheckpointError,
    NotFiniteError,
    check_savable,
    complete,
    read_checkpoint,
    read_shapes,
    spread_regions,
    write_part,
)
from tnt_jax.train.state import TrainState, state_arrays, without_parts

OnSaveError = Literal["warn", "raise"]
STEP_PREFIX = "tnt_jax_step"
"""Start of the names of the folders of checkpoints, unless another prefix is chosen."""


@dataclass(frozen=True)
class Position:
    """Where training goes on in the data.

    Attributes:
        epoch: Number of the epoch, from 0.
        batch: Batches of that epoch that are done.
    """

    epoch: int
    batch: int


@dataclass(frozen=True)
class Saved:
    """Content of a checkpoint that was read.

    Attributes:
        number: Number of the checkpoint.
        arrays: Host arrays by path, such as `params/Dense_0/kernel`; see `state_arrays`. A
            `HostArray` where this process has read a part alone.
        extra: Further host arrays by path.
        position: Position in the data, or None.
        notes: JSON values that were saved along.
    """

    number: int
    arrays: dict[str, Any]
    extra: dict[str, np.ndarray]
    position: Position | None
    notes: dict[str, Any]


_WHAT = "a checkpoint"
# "written", "refused" because of its numbers, or "failed".
Result = Literal["written", "refused", "failed"]


@dataclass(frozen=True)
class Outcome:
    """How writing a checkpoint ended, and what was wrong, the same on all processes."""

    result: Result
    problem: str = ""


class Writer:
    """Writes the checkpoints of one directory in the background; `alone` without other processes.

    The processes of a job agree twice on each checkpoint: when it begins, on its number, and when
    all have written, on whether it is complete. What fails on one of them reaches all the others
    through the job's coordination service, so that none waits for a process that has failed.
    """

    def __init__(self, folders: OwnFolders, *, alone: bool) -> None:
        init()
        self.damaged: set[int] = set()  # Numbers of checkpoints that could not be read.
        self._folders = folders
        self._alone = alone
        self._process = jax.process_index()
        # Whether this process decides, and writes what all processes hold.
        self.leads = alone or self._process == 0
        self._is_clean = False
        self._lock: DirectoryLock | None = None
        self._thread: threading.Thread | None = None
        self._attempts = 0
        self._pending: Outcome | None = None
        self._is_writing = False
        identity = hashlib.sha256(f"{folders.directory} {folders.prefix}".encode())
        self._key = f"tnt_jax/checkpoint/{identity.hexdigest()[:16]}"

    def lock(self) -> None:
        """Refuses other jobs the directory; raises a LockedError or an OSError on all processes."""
        self._agree("Checkpoints.lock", self._hold_lock)

    def begin(self, wanted: int) -> int:
        """Creates the folder of a checkpoint; returns its number, the wanted or a higher one."""
        return self._agree("Checkpoints.save", partial(self._prepare, wanted))

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
            where, problem = self._folders.directory, self._pending.problem
            logger.warning("A checkpoint in %s: %s", where, problem)
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
        directory = self._folders.directory
        if self._lock is not None and not self._lock.is_held():
            self._lock.release()
            self._lock = None
            if not directory.is_dir():
                raise FileNotFoundError(
                    f"{directory} vanished; the next checkpoint creates it again"
                )
            logger.warning("The lock of %s was lost, and is taken again.", directory)
        if self._lock is None:
            directory.mkdir(parents=True, exist_ok=True)
            self._lock = DirectoryLock(directory / f".{self._folders.prefix}.lock")

    def _prepare(self, wanted: int) -> int:
        """Locks the directory and creates the folder of a checkpoint; returns its number."""
        self._hold_lock()
        if not self._is_clean:
            self._folders.remove_unfinished()
            self._is_clean = True
        number = max(wanted, self._folders.taken() + 1)
        self._folders.unfinished(number).mkdir()
        return number

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
                folders = self._folders
                complete(folders.unfinished(number), content, folders.folder(number))
                folders.remove_old(max_to_keep=max_to_keep, ignored=self.damaged)
        except Exception as error:  # Each process must hear of it, whatever it is.
            outcome = Outcome("failed", f"{type(error).__name__}: {error}")
        finally:
            self._tell(outcome, number)

    def _write_part(self, number: int, content: Content) -> Outcome:
        try:
            write_part(self._folders.unfinished(number), content, process=self._process)
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
        if outcome.result != "written" and (left := self._folders.unfinished(number)).is_dir():
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


class Checkpoints:
    """A directory of numbered checkpoints.

    In a job of several processes all of them create the object and call its methods together, and
    write one copy together: the directory must be on a file system that all of them see.

    Args:
        directory: Where the checkpoints are; created by the first `save`.
        max_to_keep: Complete checkpoints that stay, older ones are deleted; all if None. The latest
            that was saved with `is_best` stays besides.
        on_save_error: What happens if a checkpoint cannot be written, for instance because the disk
            is full. `"warn"`: one warning; training goes on, and the next `save` tries again.
            `"raise"`: the next call raises, on all processes; `check` finds out early.
        alone: Whether this process acts by itself, without the others.
        prefix: What the names of the folders begin with. Checkpoints with different prefixes do not
            see each other.

    Raises:
        ValueError: If `max_to_keep` is below 1, or `on_save_error` is unknown.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        max_to_keep: int | None = 2,
        on_save_error: OnSaveError = "warn",
        alone: bool = False,
        prefix: str = STEP_PREFIX,
    ) -> None:
        if max_to_keep is not None and max_to_keep < 1:
            raise ValueError(f"max_to_keep must be at least 1, but is {max_to_keep}.")
        if on_save_error not in ("warn", "raise"):
            raise ValueError(f"on_save_error must be 'warn' or 'raise', but is {on_save_error!r}.")
        self.directory = Path(directory).absolute()
        self._on_save_error = on_save_error
        self._max_to_keep = max_to_keep
        self._alone = alone
        self._folders = OwnFolders(self.directory, prefix)
        self._key = self.directory, prefix, alone
        # How the last checkpoint ended: only changes are reported.
        self._last = Outcome("written")

    def lock(self) -> None:
        """Refuses other jobs the directory until `close`; `save` does so, too.

        Raises:
            LockedError: On all processes, if another job writes to the directory.
            OSError: On all processes, if the directory cannot be written to, whatever
                `on_save_error` is.
        """
        try:
            self._writer.lock()
        except OSError as error:
            raise OSError(
                f"Checkpoints cannot be written to {self.directory}: {error}. Choose another "
                "directory, or give this one space and permissions."
            ) from error

    @in_phase("save", spent="saving")
    def save(
        self,
        state: Any,
        *,
        step: int | None = None,
        position: Position | None = None,
        extra: Mapping[str, Any] | None = None,
        notes: Mapping[str, Any] | None = None,
        is_best: bool = False,
        must_be_finite: bool = True,
    ) -> int | None:
        """Starts a checkpoint and returns its number, as soon as the arrays are copied to the host.

        An earlier `save` that is still being written is waited for first. The number is that of the
        step, or the next free one; None if the checkpoint could not be started and `on_save_error`
        is `"warn"`.

        Args:
            state: State to save: a `TrainState`, or another pytree of arrays.
            step: Number of the step; by default `state.step`.
            position: Position in the data.
            extra: Further arrays by path.
            notes: JSON values to save along.
            is_best: Whether this checkpoint stays besides the newest ones, until another is saved
                as the best.
            must_be_finite: Whether the checkpoint is refused, with a warning, if a parameter holds
                NaN or infinity.

        Raises:
            LockedError: On all processes, if another job writes to the directory.
            OSError: On all processes, if this or the previous checkpoint could not be written and
                `on_save_error` is `"raise"`.
            TypeError: On all processes, if an array has a dtype that cannot be stored.
            ValueError: On all processes, if two arrays have the same name.
        """
        trees = {"state": state_arrays(state), "extra": dict(extra or {})}
        for arrays in trees.values():
            check_savable(arrays)
        self.wait()
        # The steps that still run need every process.
        with in_phase("step"):
            jax.block_until_ready(state)
        try:
            number = self._writer.begin(int(state.step) if step is None else step)
        except OSError as error:
            self._report(Outcome("failed", str(error)))
            return None
        position_note = None if position is None else [position.epoch, position.batch]
        if self._alone:
            trees["state"] = without_parts(trees["state"])
        content = Content.of(
            trees,
            {"position": position_note, "notes": dict(notes or {})},
            is_best=is_best,
            must_be_finite=must_be_finite,
            leads=self._writer.leads,
        )
        self._writer.start(number, content, max_to_keep=self._max_to_keep)
        return number

    def newest(self, *, before: int | None = None) -> int | None:
        """Returns the number of the newest complete checkpoint `before` a number, or None.

        A checkpoint that is being written is waited for.
        """
        self.wait()
        complete = self._on_all(self._folders.complete())[0]
        return max((n for n in complete if before is None or n < before), default=None)

    def shapes(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Returns shape and dtype of the newest checkpoint's arrays by path.

        Raises:
            FileNotFoundError: If there is no checkpoint.
        """
        number = self.newest()
        if number is None:
            raise self._missing()
        return read_shapes(self._folders.folder(number) / "state")

    @in_phase("save", spent="restarting")
    def read(self, number: int | None = None, *, like: TrainState | None = None) -> Saved:
        """Returns a checkpoint, if it is what was saved; by default that of `read_newest_valid`.

        Raises:
            FileNotFoundError: If there is no checkpoint.
            OSError: On all processes, if one of them does not see the checkpoint, or finds it
                damaged; the text names files and arrays.
        """
        if number is None:
            saved, problem = self.read_newest_valid(like=like), ""
        else:
            saved, problem = self._read_on_all(number, like)
        if problem:
            raise DamagedCheckpointError(problem)
        if saved is None:
            raise self._missing()
        return saved

    @in_phase("save", spent="restarting")
    def read_newest_valid(
        self, *, before: int | None = None, like: TrainState | None = None
    ) -> Saved | None:
        """Returns the newest checkpoint `before` a number that every process can read, or None.

        All processes return the same one, which each reads in full; of arrays that the state
        `like`, which they are for, spreads over processes, its parts alone. A newer one that is
        damaged, or of which only the folder is left, is named in a warning.

        Raises:
            OSError: On all processes, if there are checkpoints and none of them can be read.
        """
        self.wait()
        problems: list[str] = []
        found = self._on_all([*self._folders.complete(), *self._folders.remains()])
        numbers = {n for seen in found for n in seen if before is None or n < before}
        for number in sorted(numbers, reverse=True):
            saved, problem = self._read_on_all(number, like)
            if saved is not None:
                if problems:
                    logger.warning(
                        "%s. Checkpoint %d is used instead.", ". ".join(problems), number
                    )
                return saved
            problems.append(problem)
            self._writer.damaged.add(number)
        if problems:
            raise DamagedCheckpointError(
                f"No checkpoint in {self.directory} can be read: {'. '.join(problems)}. "
                "Restore the files, or remove the directory to start over."
            )
        return None

    @in_phase("save", spent="saving")
    def wait(self) -> None:
        """Waits until everything is written.

        Raises:
            OSError: On all processes, if a checkpoint could not be written and `on_save_error` is
                `"raise"`.
        """
        outcome = self._writer.finish()
        if outcome is not None:
            self._report(outcome)

    def folder_name(self, number: int) -> str:
        """Returns the name of a checkpoint's folder in the directory."""
        return self._folders.folder(number).name

    @in_phase("save", spent="saving")
    def check(self) -> bool:
        """Returns whether everything is written, without waiting for it.

        Without a call of it, a checkpoint that could not be written is noticed by the next one. It
        raises as `wait`.
        """
        if not self._writer.is_done():
            return False
        self.wait()
        return True

    @property
    def last_is_written(self) -> bool:
        """Whether the last checkpoint was written, the same on all processes; ask after `wait`."""
        return self._last.result == "written"

    @in_phase("save", spent="saving")
    def close(self) -> None:
        """Waits until everything is written, and lets other jobs write to the directory.

        It raises as `wait`.
        """
        try:
            self.wait()
        finally:
            self.release()

    def release(self) -> None:
        """Does what `close` does without asking the others; a problem is a warning."""
        if (writer := _writers.get().pop(self._key, None)) is not None:
            writer.close()

    def remove_all(self) -> None:
        """Removes all checkpoints with this prefix, and the directory if it is empty then.

        In a job of several processes all of them call it, unless they act alone.
        """
        self.close()
        if not self._alone:
            collectives.barrier()
        if self._alone or is_master_rank():
            self._folders.remove_all()

    @property
    def _writer(self) -> Writer:
        writers = _writers.get()
        if self._key not in writers:
            writers[self._key] = Writer(self._folders, alone=self._alone)
        return writers[self._key]

    def _report(self, outcome: Outcome) -> None:
        """Raises or warns if a checkpoint was not written, unless the one before was not either."""
        before, self._last = self._last, outcome
        if outcome.result == "failed" and self._on_save_error == "raise":
            raise OSError(f"A checkpoint could not be written. {outcome.problem}")
        if outcome.result == before.result:
            return
        if outcome.result == "written":
            logger.warning("Checkpoints are written to %s again.", self.directory)
        elif outcome.result == "failed":
            logger.warning(
                "A checkpoint could not be written; training goes on, and the next one is tried. "
                "%s",
                outcome.problem,
            )
        else:
            logger.warning(
                "A checkpoint in %s was refused, and earlier ones stay: %s.",
                self.directory,
                outcome.problem,
            )

    def _on_all(self, folders: list[tuple[int, Path]]) -> list[list[int]]:
        """Returns the numbers of the folders that each process sees."""
        seen = [number for number, _ in folders]
        return [seen] if self._alone else collectives.agree("Checkpoints.read", {}, note=seen)

    def _missing(self) -> FileNotFoundError:
        return FileNotFoundError(f"There is no complete checkpoint in {self.directory}.")

    def _read_on_all(self, number: int, like: TrainState | None) -> tuple[Saved | None, str]:
        """Returns a checkpoint, or what the first process says that cannot read it."""
        problem = ""
        saved = None
        try:
            wanted = None if like is None else spread_regions(state_arrays(like))
            items, about = read_checkpoint(self._folders.folder(number), wanted)
            position = None if about["position"] is None else Position(*about["position"])
            extra = items.get("extra", {})
            saved = Saved(number, items["state"], extra, position, about["notes"])
        except Exception as error:  # All processes must hear of it.
            problem = str(error) or type(error).__name__
        if not self._alone:
            told = collectives.agree("Checkpoints.read", {"checkpoint": number}, note=problem)
            problem = next(filter(None, told), "")
        return (None if problem else saved), problem
