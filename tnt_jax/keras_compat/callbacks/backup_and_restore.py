"""Backs up training with the state of its callbacks, so that an interrupted run can continue."""

import copy
import math
import os
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np

from tnt_jax.distributed.joining.runtime import is_master_rank, is_to_join
from tnt_jax.keras_compat.callbacks.base import Callback
from tnt_jax.keras_compat.callbacks.monitor import Monitor, SaveFreq, SavingSeconds, saving_times
from tnt_jax.launch.planning.fingerprint import fingerprint_line
from tnt_jax.log import logger
from tnt_jax.train.checkpoints.checkpoint import Checkpoints, OnSaveError, Position, Saved
from tnt_jax.train.checkpoints.directory import OwnFolders
from tnt_jax.train.state import digest, state_arrays, with_arrays


class Fingerprint(Callback):
    """Writes a digest of each array of the training state to a file.

    These are weights, model state, optimizer state, step count and random key, but no arrays that
    are sharded over the ranks, as with `shard_optimizer_state`. `tnt-jax fingerprint A B` names the
    first step and the arrays in which two files differ. A resumed run appends to its file.

    Args:
        path: File to write, on the master.
        every: Number of steps after which to write, too; by default only after each epoch.
    """

    def __init__(self, path: str | Path, *, every: int | None = None) -> None:
        super().__init__()
        if every is not None and every < 1:
            raise ValueError(f"every must be at least 1 step, but is {every}.")
        self._path = Path(path)
        self._every = every
        self._epoch = 0
        self._has_begun = False
        # Batches of the epoch that are done; None until that is known.
        self._batches: int | None = None

    def on_train_begin(self, logs: Mapping[str, float] | None = None) -> None:
        """Waits for the first epoch, before which a run may be resumed."""
        self._has_begun = False

    def on_epoch_begin(self, epoch: int, logs: Mapping[str, float] | None = None) -> None:
        """Begins a new file, unless the model has been trained before."""
        self._epoch, self._batches = epoch, None
        if not self._has_begun and is_master_rank() and int(self.model.state.step) == 0:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._path.write_text("")
        self._has_begun = True

    def on_train_batch_begin(self, batch: int, logs: Mapping[str, float] | None = None) -> None:
        """Notes where the epoch begins."""
        if self._batches is None:
            self._batches = batch

    def on_train_batch_end(self, batch: int, logs: Mapping[str, float] | None = None) -> None:
        """Writes a line after every `every` steps, or the group of steps that reaches as many."""
        before, self._batches = self._batches or 0, batch + 1
        if self._every is not None and self._batches // self._every > before // self._every:
            self._write()

    def on_epoch_end(self, epoch: int, logs: Mapping[str, float] | None = None) -> None:
        """Writes a line."""
        self._write()

    def _write(self) -> None:
        if is_master_rank():
            state = replace(self.model.state, accumulated=None, residual=None)
            arrays = {path: digest(x) for path, x in state_arrays(state).items() if _is_whole(x)}
            with self._path.open("a") as file:
                file.write(fingerprint_line(self._epoch, int(state.step), arrays))


def _is_whole(x: Any) -> bool:
    return not isinstance(x, jax.Array) or x.is_fully_replicated


# Keras 3.15, keras/src/callbacks: what on_train_begin sets and later hooks change.
_KERAS_ATTRIBUTES = {
    "EarlyStopping": ("wait", "stopped_epoch", "best", "best_weights", "best_epoch"),
    "ReduceLROnPlateau": ("best", "wait", "cooldown_counter"),
    "ModelCheckpoint": ("best",),
}
States = list[tuple[str, dict[str, Any]]]


def collect(callbacks: Iterable[Any]) -> tuple[States, dict[str, np.ndarray]]:
    """Returns the states of callbacks as JSON values, and their arrays by path."""
    states: States = []
    arrays: dict[str, np.ndarray] = {}
    for index, callback in enumerate(callbacks):
        # A copy: training and callbacks change their state while the backup is written.
        state = copy.deepcopy(_state_of(callback))
        for name, value in state.items():
            if isinstance(value, list) and value and all(isinstance(x, np.ndarray) for x in value):
                path = f"callbacks/{index}/{name}"
                arrays |= {f"{path}/{number}": array for number, array in enumerate(value)}
                state[name] = {"num_arrays": len(value)}
        states.append((type(callback).__name__, state))
    return states, arrays


def restore(callbacks: Iterable[Any], states: Sequence[Any], arrays: Mapping[str, Any]) -> None:
    """Gives callbacks the state that callbacks of the same class had, in their order."""
    found = _by_name(
        (name, _restored(state, f"callbacks/{index}", arrays))
        for index, (name, state) in enumerate(states)
    )
    own = _by_name((type(callback).__name__, callback) for callback in callbacks)
    for place, callback in own.items():
        if state := found.get(place):
            _set_state(callback, state)
    missing = [place[0] for place, state in found.items() if state and place not in own]
    if missing:
        logger.warning(
            "The interrupted run had callbacks that this one has not: %s. Their state is lost.",
            ", ".join(missing),
        )


def numbered(arrays: Mapping[str, np.ndarray], prefix: str) -> list[np.ndarray]:
    """Returns the arrays at `prefix/0`, `prefix/1` and so on."""
    paths = [path for path in arrays if path.startswith(f"{prefix}/")]
    return [arrays[path] for path in sorted(paths, key=lambda path: int(path[len(prefix) + 1 :]))]


def _by_name(pairs: Iterable[tuple[str, Any]]) -> dict[tuple[str, int], Any]:
    """Returns values by name and by how many of the same name come before."""
    counts = Counter[str]()
    found = {}
    for name, value in pairs:
        found[name, counts[name]] = value
        counts[name] += 1
    return found


def _state_of(callback: Any) -> dict[str, Any]:
    if isinstance(callback, Callback):
        return callback.state()
    return {
        name: float(value) if isinstance(value, np.floating) else value
        for name in _keras_attributes(callback)
        if (value := getattr(callback, name, None)) is not None
    }


def _set_state(callback: Any, state: dict[str, Any]) -> None:
    if isinstance(callback, Callback):
        callback.set_state(state)
        return
    for name in _keras_attributes(callback):
        if name in state:
            setattr(callback, name, state[name])


def _keras_attributes(callback: Any) -> tuple[str, ...]:
    for cls in type(callback).__mro__:
        if cls.__name__ in _KERAS_ATTRIBUTES and cls.__module__.startswith("keras."):
            return _KERAS_ATTRIBUTES[cls.__name__]
    return ()


def _restored(
    state: Mapping[str, Any], path: str, arrays: Mapping[str, np.ndarray]
) -> dict[str, Any]:
    told = [name for name, x in state.items() if isinstance(x, dict) and set(x) == {"num_arrays"}]
    return {**state, **{name: numbered(arrays, f"{path}/{name}") for name in told}}


BACKUP_PREFIX = "tnt_jax_backup"
"""Start of the names of the folders of backups."""
# Settings that `optax.inject_hyperparams` keeps in the state of an optimizer, by path.
_SETTING = re.compile(r"(?:^|/)hyperparams/(\w+)$")
# Seconds between two looks whether a backup could be written.
_CHECK_S = 1.0


def newest_backup(directory: Path) -> str | None:
    """Returns the name of the newest complete backup in a directory that this process sees."""
    _, path = max(OwnFolders(directory, BACKUP_PREFIX).complete(), default=(0, None))
    return None if path is None else path.name


class BackupAndRestore(Callback):
    """Saves everything that a run needs, and resumes it when the same script is started again.

    A resumed run gives the same numbers as one that was never interrupted. The backup holds the
    weights, the optimizer, accumulated gradients, the random numbers, the position in the data (the
    rows of the epoch that are done), the averages of the epoch so far, and the state of the other
    callbacks, including the history. The run may resume on another number of devices, and with
    another global batch where the order of the rows does not depend on it. Backups are written
    while training continues and are either complete or absent, whenever the job dies. It acts after
    all other callbacks, whatever its position in the list. `fit(resume=...)` adds one.

    Args:
        backup_dir: Directory for this run only, which all processes must see. Folders in it that
            are not backups are kept.
        save_freq: `"epoch"`, the number of batches between two backups, or a time such as `"30s"`,
            `"5m"` or `"1h"`, which process 0 measures.
        double_checkpoint: Whether the previous backup is kept, too, even with `max_to_keep=1`.
        delete_checkpoint: Whether the backup is deleted when training has ended. Otherwise the same
            script, started again, returns from `fit` at once.
        max_to_keep: Backups that stay; an earlier one is used if the last cannot be read.
        keep_best: Name of a log, such as `"val_loss"`. A backup is made after each epoch in which
            it improves, and the last of these stays besides the others.
        on_save_error: `"warn"` to go on without a backup that cannot be written and to try again at
            the next one, `"raise"` to end training on all processes after the same batch, a few
            seconds later at most.

    Attributes:
        newest: Number of the last backup that this `fit` has begun to write, or None.
        gathers: Whether process 0 writes all of it, so that the others need not see the directory.
        where: Where backups are kept, for messages.

    Raises:
        ValueError: If an argument has no valid value, or the directory has no name.
    """

    runs_last = True

    def __init__(
        self,
        backup_dir: str | os.PathLike[str],
        save_freq: SaveFreq | str = "epoch",
        double_checkpoint: bool = False,
        delete_checkpoint: bool = True,
        *,
        max_to_keep: int = 2,
        keep_best: str | None = None,
        on_save_error: OnSaveError = "warn",
    ) -> None:
        super().__init__()
        if not backup_dir:
            raise ValueError(
                f"backup_dir must name a directory for this run only, but is {backup_dir!r}."
            )
        self.backup_dir = Path(backup_dir)
        self.save_freq = save_freq
        self.double_checkpoint = double_checkpoint
        self.delete_checkpoint = delete_checkpoint
        self.max_to_keep = max(max_to_keep, 2) if double_checkpoint else max_to_keep
        self.on_save_error: OnSaveError = on_save_error
        self.newest: int | None = None
        self.gathers = False
        self.where = str(self.backup_dir)
        self._times = saving_times(save_freq, alone=True)
        self._watch = None if keep_best is None else Monitor(keep_best)
        self._best: float | None = None
        self._has_saved_now = False
        # Says when to look whether the last backup could be written; None if that is known.
        self._checks: SavingSeconds | None = None
        self._ended_state: Any = None
        self._checkpoints = self._open()

    def set_model(self, model: Any) -> None:
        """Receives the model, whose metrics determine which backup is the best."""
        super().set_model(model)
        if self._watch is not None:
            self._watch.resolve(model)

    def state(self) -> dict[str, Any]:
        """Returns the best value so far."""
        return {} if self._best is None else {"best": self._best}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Restores the best value of an interrupted run."""
        self._best = state["best"]

    def on_train_begin(self, logs: Mapping[str, float] | None = None) -> None:
        """Restores a backup, if there is one."""
        self._has_saved_now, self._ended_state, self._best = False, None, None
        self.newest = None
        self._checks = None
        resumption = self.model.resumption
        resumption.warn_unless_repeatable()
        if is_to_join():
            return  # The others tell it where they are.
        self._begin()
        saved = self._checkpoints.read_newest_valid(like=self.model.state)
        if saved is not None:
            self._resume(saved)
        resumption.save_now = self.save_now

    def on_generation(self) -> None:
        """Opens the directory again, among other processes."""
        self._checks = None
        self._begin()
        self.model.resumption.save_now = self.save_now

    def _begin(self) -> None:
        self._checkpoints = self._open()
        self._times = saving_times(self.save_freq, alone=self._is_alone)
        self._checkpoints.lock()

    def on_train_batch_end(self, batch: int, logs: Mapping[str, float] | None = None) -> None:
        """Backs up when enough batches or seconds have passed."""
        self._has_saved_now = False
        if self._times.is_due_after_batch(batch):
            self._save()
        elif self._checks is not None and self._checks.is_due_after_batch(batch):
            # Raises on all processes if the backup that was started last could not be written.
            self._checks = None if self._checkpoints.check() else self._checks

    def on_epoch_end(self, epoch: int, logs: Mapping[str, float] | None = None) -> None:
        """Backs up after the epoch, if `save_freq` is `"epoch"` or the watched log has improved."""
        if self._has_saved_now:
            return
        is_best = self._improves(logs)
        if self.save_freq == "epoch" or is_best:
            self.model.resumption.enter_epoch(epoch + 1)
            self._save(is_best=is_best)

    def on_train_end(self, logs: Mapping[str, float] | None = None) -> None:
        """Deletes the backup, or makes the last one and waits until it is written."""
        self.model.resumption.save_now = None
        if not self._has_saved_now and not self.delete_checkpoint:
            if self._ended_state is None:
                self._save(ended={"epochs": self.params["epochs"]})
            else:
                # Other callbacks may have changed it at the end, a second time.
                self.model.set_state(self._ended_state)
        self._checkpoints.close()
        removes = self.delete_checkpoint and not self._has_saved_now
        if removes and (self.writes or self.scope == "all_processes"):
            self._checkpoints.remove_all()

    def release(self) -> None:
        """Lets others write to the directory after an exception; other processes may not know."""
        self._checkpoints.release()

    def save_now(self) -> bool:
        """Backs up between two steps, and returns whether the backup is written.

        All processes call it. If no step follows, the end of training leaves the backup as it is.
        """
        self._save()
        self._checkpoints.wait()
        self._has_saved_now = True
        return self._checkpoints.last_is_written

    def written(self) -> str | None:
        """Returns the last backup's folder, None if it was not written; all processes call it."""
        self._checkpoints.wait()
        if self.newest is None or not self._checkpoints.last_is_written:
            return None
        return self._checkpoints.folder_name(self.newest)

    def _open(self) -> Checkpoints:
        return Checkpoints(
            self.backup_dir,
            max_to_keep=self.max_to_keep,
            on_save_error=self.on_save_error,
            alone=self.scope != "all_processes",
            prefix=BACKUP_PREFIX,
        )

    def _resume(self, saved: Saved) -> None:
        ended = saved.notes.get("ended")
        has_ended = ended is not None and self.params["epochs"] <= ended["epochs"]
        if ended is not None and not has_ended:
            # The end may have changed the weights, to averages for instance.
            like = self.model.state
            before = self._checkpoints.read_newest_valid(before=saved.number, like=like)
            saved = before or saved
        position = saved.position
        assert position is not None, "Each backup has one."
        stops = saved.notes.get("stops", False)
        if has_ended or (stops and position.batch == 0):
            position = Position(max(position.epoch, self.params["epochs"]), 0)
        self.model.stop_training = stops
        resumption = self.model.resumption
        try:
            changes = resumption.compare_run(
                saved.notes.get("run"),
                self.where,
                has_ended=has_ended,
                alone=self.scope != "all_processes",
            )
            arrays = saved.arrays | _new_settings(self.model.state, changes)
            self.model.set_state(with_arrays(self.model.state, arrays))
            self.model._trainer.of_group.restore(saved.extra)
            position = resumption.resume_at(
                position, saved.notes["data"], numbered(saved.extra, "sums")
            )
        except ValueError as error:
            raise ValueError(f"{error} Or delete {self.where} to start over.") from None
        self._times.start_at(position.batch)
        restore(self.siblings, saved.notes["callbacks"], saved.extra)
        self._ended_state = self.model.state if has_ended else None
        self._report(position, changes, has_ended=has_ended)

    def _report(self, position: Position, changes: Mapping[str, str], *, has_ended: bool) -> None:
        """Prints where training resumes, also with `verbose=0`."""
        place = f"after batch {position.batch} of epoch {position.epoch + 1}"
        text = f"Training resumes from {self.where}, {place}"
        if has_ended:
            text = f"Training had ended, as {self.where} says"
        if changes:
            text += f", with changes: {'; '.join(changes.values())}"
        print(f"{text}; delete {self.where} to start over.", flush=True)

    def _improves(self, logs: Mapping[str, float] | None) -> bool:
        """Returns whether the watched log is better than ever."""
        if self._watch is None:
            return False
        value = self._watch.value(logs, who="BackupAndRestore")
        if value is None or not math.isfinite(value):
            return False
        if is_better := bool(self._watch.is_better(value, self._best)):
            self._best = float(value)
        return is_better

    @property
    def _is_alone(self) -> bool:
        return self.scope != "all_processes" or jax.process_count() == 1

    def _save(self, *, is_best: bool = False, ended: dict[str, Any] | None = None) -> None:
        trainer = self.model._trainer
        trainer.settle()
        reached = self.model.resumption.reached()
        states, arrays = collect(self.siblings)
        leaves, of_groups = trainer.of_group.saved(reached.sums)
        sums = {f"sums/{index}": leaf for index, leaf in enumerate(leaves)}
        state = self.model.state
        state = jax.tree.map(trainer.gather, state) if self.gathers else state
        self.newest = self._checkpoints.save(
            state,
            position=reached.position,
            extra=arrays | sums | of_groups,
            notes={
                "callbacks": states,
                "data": reached.data,
                "run": self.model.resumption.run,
                # A callback may have asked for the end, which another run must not put off.
                "stops": ended is None and bool(self.model.stop_training),
                "ended": ended,
            },
            is_best=is_best,
        )
        if self.on_save_error == "raise":
            self._checks = SavingSeconds(_CHECK_S, alone=self._is_alone)


def _new_settings(state: Any, changes: Mapping[str, str]) -> dict[str, Any]:
    """Returns the settings of the optimizer that replace a checkpoint's: no others can change."""
    return {
        path: np.asarray(leaf)
        for path, leaf in state_arrays(state).items()
        if (match := _SETTING.search(path))
        and ("optimizer" if match[1] != "learning_rate" else match[1]) in changes
    }
