"""Lets an interrupted run go on where it was."""

import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from tnt_jax.checkpoint import Checkpoints, Position, with_arrays
from tnt_jax.keras_compat.callbacks.base import Callback
from tnt_jax.keras_compat.callbacks.saving_times import SaveFreq, SavingTimes
from tnt_jax.log import logger
from tnt_jax.runtime import barrier


class BackupAndRestore(Callback):
    """Saves everything that an interrupted run needs, and goes on from it when the same script is started again.

    The run that goes on gives the same numbers as one that was never interrupted: weights, optimizer, random numbers, position in
    the data (within an epoch with a number of batches as `save_freq`), the averages of the epoch so far, and what other callbacks
    of this library remember, the history among them. It may run on another number of devices. Backups are written while training
    continues and are complete or absent, whenever the job dies.

    It acts after all other callbacks, wherever it stands.

    Args:
        backup_dir: Directory for this run only; all processes must see it.
        save_freq: `"epoch"`, or batches between two backups.
        delete_checkpoint: Whether the backup is deleted when training has ended.

    Raises:
        ValueError: If `save_freq` is unknown.
    """

    runs_last = True

    def __init__(
        self, backup_dir: str | os.PathLike[str], save_freq: SaveFreq = "epoch", *, delete_checkpoint: bool = True
    ) -> None:
        super().__init__()
        self.backup_dir, self.save_freq, self.delete_checkpoint = Path(backup_dir), save_freq, delete_checkpoint
        self._times = SavingTimes(save_freq)
        self._epoch = 0
        self._checkpoints: Checkpoints | None = None

    def on_train_begin(self, logs: Mapping[str, float] | None = None) -> None:
        """Restores a backup, if there is one."""
        self._checkpoints = Checkpoints(self.backup_dir, alone=self.company != "together")
        if self._checkpoints.newest() is None:
            return
        saved = self._checkpoints.read()
        position = saved.position or Position(0, 0)
        self.model.set_state(with_arrays(self.model.state, saved.arrays))
        self.model.resume_at(position, _numbered(saved.extra, "sums"))
        self._times.start_at(position.batch)
        self._restore_siblings(saved.notes["callbacks"], saved.extra)
        logger.info(
            "Training goes on after %d batches of epoch %d, from %s.", position.batch, position.epoch + 1, self.backup_dir
        )

    def on_epoch_begin(self, epoch: int, logs: Mapping[str, float] | None = None) -> None:
        """Notes the epoch."""
        self._epoch = epoch

    def on_train_batch_end(self, batch: int, logs: Mapping[str, float] | None = None) -> None:
        """Backs up when enough batches have passed."""
        if self._times.is_due_after_batch(batch):
            sums = jax.tree.leaves(self.model.epoch_sums)
            self._save(Position(self._epoch, batch + 1), {f"sums/{index}": leaf for index, leaf in enumerate(sums)})

    def on_epoch_end(self, epoch: int, logs: Mapping[str, float] | None = None) -> None:
        """Backs up after the epoch, unless batches decide."""
        if self.save_freq == "epoch":
            self._save(Position(epoch + 1, 0), {})

    def on_train_end(self, logs: Mapping[str, float] | None = None) -> None:
        """Deletes the backup, or waits until it is written."""
        assert self._checkpoints is not None
        self._checkpoints.close()
        if self.delete_checkpoint:
            if self.company == "together":
                barrier()
            if self.writes:
                shutil.rmtree(self.backup_dir, ignore_errors=True)

    def _save(self, position: Position, extra: dict[str, Any]) -> None:
        assert self._checkpoints is not None
        states = []
        for index, callback in enumerate(self.siblings):
            state = callback.state() if isinstance(callback, Callback) else {}
            for name, arrays in [(name, value) for name, value in state.items() if _is_arrays(value)]:
                extra |= {f"callbacks/{index}/{name}/{number}": array for number, array in enumerate(arrays)}
                state[name] = {"num_arrays": len(arrays)}
            states.append([type(callback).__name__, state])
        self._checkpoints.save(self.model.state, position=position, extra=extra, notes={"callbacks": states})

    def _restore_siblings(self, states: list[Any], extra: Mapping[str, np.ndarray]) -> None:
        names = [type(callback).__name__ for callback in self.siblings]
        if names != [name for name, _ in states]:
            logger.warning(
                "The backup was made with the callbacks %s; their memory is lost.", ", ".join(name for name, _ in states)
            )
            return
        for index, (callback, (_, state)) in enumerate(zip(self.siblings, states, strict=True)):
            for name, value in state.items():
                if isinstance(value, dict) and set(value) == {"num_arrays"}:
                    state[name] = _numbered(extra, f"callbacks/{index}/{name}")
            if state:
                callback.set_state(state)


def _is_arrays(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(item, np.ndarray) for item in value)


def _numbered(arrays: Mapping[str, np.ndarray], prefix: str) -> list[np.ndarray]:
    """Returns the arrays at `prefix/0`, `prefix/1` and so on."""
    found = {int(path.removeprefix(f"{prefix}/")): leaf for path, leaf in arrays.items() if path.startswith(f"{prefix}/")}
    return [found[number] for number in sorted(found)]
