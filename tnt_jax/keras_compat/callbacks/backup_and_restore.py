"""Backs up training, so that an interrupted run can continue."""

import copy
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from tnt_jax.distributed.collectives import all_gather
from tnt_jax.keras_compat.callbacks.base import Callback
from tnt_jax.keras_compat.callbacks.saving_times import SaveFreq, SavingTimes
from tnt_jax.log import logger
from tnt_jax.train.checkpoint import Checkpoints, Position, Saved
from tnt_jax.train.state_arrays import with_arrays


class BackupAndRestore(Callback):
    """Saves everything that a run needs, and resumes it when the same script is started again.

    A resumed run gives the same numbers as one that was never interrupted. The backup holds the
    weights, the optimizer, the random numbers, the position in the data (within an epoch if
    `save_freq` is a number of batches), the averages of the epoch so far, and the state of other
    tnt_jax callbacks, including the history. The run may resume on another number of devices.
    Backups are written while training continues and are either complete or absent, whenever the job
    dies.

    It acts after all other callbacks, whatever its position in the list.

    Args:
        backup_dir: Directory for this run only, which all processes must see. Folders in it that
            are not backups are kept.
        save_freq: `"epoch"`, or the number of batches between two backups.
        double_checkpoint: Whether the previous backup is kept, too, and is used if the last one
            cannot be read.
        delete_checkpoint: Whether the backup is deleted when training has ended.

    Raises:
        ValueError: If `save_freq` is unknown, or the directory has no name.
    """

    runs_last = True

    def __init__(
        self,
        backup_dir: str | os.PathLike[str],
        save_freq: SaveFreq = "epoch",
        double_checkpoint: bool = False,
        delete_checkpoint: bool = True,
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
        self._times = SavingTimes(save_freq)
        self._epoch = 0
        self._checkpoints: Checkpoints | None = None

    def on_train_begin(self, logs: Mapping[str, float] | None = None) -> None:
        """Restores a backup, if there is one."""
        max_to_keep = 2 if self.double_checkpoint else 1
        self._checkpoints = Checkpoints(
            self.backup_dir,
            max_to_keep=max_to_keep,
            alone=self.scope != "all_processes",
            prefix="tnt_jax_backup",
        )
        if self._checkpoints.newest() is None:
            return
        saved = self._read()
        position = saved.position or Position(0, 0)
        self.model.set_state(with_arrays(self.model.state, saved.arrays))
        self.model.resumption.resume_at(position, _numbered(saved.extra, "sums"))
        self._times.start_at(position.batch)
        self._restore_siblings(saved.notes["callbacks"], saved.extra)
        text = (
            f"Training resumes from {self.backup_dir}, after batch {position.batch} of epoch "
            f"{position.epoch + 1}."
        )
        logger.info(text)
        if self.params.get("verbose"):
            print(text, flush=True)

    def _read(self) -> Saved:
        """Returns the newest backup.

        With `double_checkpoint` it is the previous one if a process cannot read the newest.
        """
        assert self._checkpoints is not None
        newest = self._checkpoints.newest()
        older = self._checkpoints.newest(before=newest) if self.double_checkpoint else None
        if older is None:
            return self._checkpoints.read(newest)
        saved, problem = None, ""
        try:
            saved = self._checkpoints.read(newest)
        except Exception as error:  # The error of Orbax depends on the damage; it is shown below.
            problem = f"{type(error).__name__}: {error}"
        is_readable = saved is not None
        if self.scope == "all_processes":
            is_readable = bool(np.all(all_gather(np.int8(is_readable))))
        if is_readable and saved is not None:
            return saved
        logger.warning(
            "Backup %d in %s cannot be read; backup %d is used. %s",
            newest,
            self.backup_dir,
            older,
            problem,
        )
        return self._checkpoints.read(older)

    def on_epoch_begin(self, epoch: int, logs: Mapping[str, float] | None = None) -> None:
        """Records the epoch."""
        self._epoch = epoch

    def on_train_batch_end(self, batch: int, logs: Mapping[str, float] | None = None) -> None:
        """Backs up when enough batches have passed."""
        if self._times.is_due_after_batch(batch):
            self.model.training_state.settle()
            sums = jax.tree.leaves(self.model.epoch_sums)
            self._save(
                Position(self._epoch, batch + 1),
                {f"sums/{index}": leaf for index, leaf in enumerate(sums)},
            )

    def on_epoch_end(self, epoch: int, logs: Mapping[str, float] | None = None) -> None:
        """Backs up after the epoch, unless `save_freq` counts batches."""
        if self.save_freq == "epoch":
            self._save(Position(epoch + 1, 0), {})

    def on_train_end(self, logs: Mapping[str, float] | None = None) -> None:
        """Deletes the backup, or waits until it is written."""
        assert self._checkpoints is not None
        self._checkpoints.close()
        if self.delete_checkpoint and (self.writes or self.scope == "all_processes"):
            self._checkpoints.remove_all()

    def _save(self, position: Position, extra: dict[str, Any]) -> None:
        assert self._checkpoints is not None
        states = []
        for index, callback in enumerate(self.siblings):
            state = callback.state() if isinstance(callback, Callback) else {}
            for name, arrays in [
                (name, value) for name, value in state.items() if _is_arrays(value)
            ]:
                extra |= {
                    f"callbacks/{index}/{name}/{number}": array
                    for number, array in enumerate(arrays)
                }
                state[name] = {"num_arrays": len(arrays)}
            # A copy: training and callbacks change their state while the backup is written.
            states.append([type(callback).__name__, copy.deepcopy(state)])
        self._checkpoints.save(
            self.model.state, position=position, extra=extra, notes={"callbacks": states}
        )

    def _restore_siblings(self, states: list[Any], extra: Mapping[str, np.ndarray]) -> None:
        names = [type(callback).__name__ for callback in self.siblings]
        if names != [name for name, _ in states]:
            logger.warning(
                "The backup was made with the callbacks %s; their state is lost.",
                ", ".join(name for name, _ in states),
            )
            return
        for index, (callback, (_, state)) in enumerate(zip(self.siblings, states, strict=True)):
            for name, value in state.items():
                if isinstance(value, dict) and set(value) == {"num_arrays"}:
                    state[name] = _numbered(extra, f"callbacks/{index}/{name}")
            if state:
                callback.set_state(state)


def _is_arrays(value: Any) -> bool:
    return (
        isinstance(value, list)
        and bool(value)
        and all(isinstance(item, np.ndarray) for item in value)
    )


def _numbered(arrays: Mapping[str, np.ndarray], prefix: str) -> list[np.ndarray]:
    """Returns the arrays at `prefix/0`, `prefix/1` and so on."""
    found = {
        int(path.removeprefix(f"{prefix}/")): leaf
        for path, leaf in arrays.items()
        if path.startswith(f"{prefix}/")
    }
    return [found[number] for number in sorted(found)]
