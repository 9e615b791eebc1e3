"""Callbacks for tuners: pruning of Optuna's trials, and reports to Ray Train and Ray Tune."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from tnt_jax.distributed.liveness.phases import busy
from tnt_jax.job import Slot
from tnt_jax.keras_compat.callbacks.backup_and_restore import BackupAndRestore, newest_backup
from tnt_jax.keras_compat.callbacks.base import Callback
from tnt_jax.keras_compat.callbacks.monitor import Monitor, SaveFreq, saving_times
from tnt_jax.on_ray.storage import RayStorage, open_storage
from tnt_jax.on_ray.worker import role
from tnt_jax.search.studies import SharedTrial, import_optuna

# Ray itself warns every minute of a copy that takes long.
_LONGEST_COPY_S = 3600.0
_storage = Slot[RayStorage | None](lambda: None, lasts=True)


class RayReport(Callback):
    """Reports training to the Ray Train run, or the Ray Tune trial, that the process belongs to.

    The logs of each epoch, with its number `epoch`, are metrics. Backups are checkpoints of Ray: a
    run that Ray starts again, after a failure or with another number of workers, goes on from the
    last of them as with `fit(resume=...)`, in the middle of an epoch. A checkpoint holds the
    backups of all calls of `fit` so far, in folders `fit-1`, `fit-2` and so on. That of a backup
    within an epoch has the metrics `epoch` and `batch` alone.

    `fit` adds one in a process that Ray has started, so pass it only to choose another `save_freq`.
    Where `fit` has another directory for checkpoints, by `resume`, `TNT_CHECKPOINT_DIR` or a
    `BackupAndRestore`, metrics alone are reported.

    Args:
        save_freq: How often to save: `"epoch"`, a number of batches, or a time such as `"30s"`; by
            default as `TNT_CHECKPOINT_EVERY` says, or every minute. None for metrics alone. In a
            trial of Ray Tune, whose schedulers count reports, backups are made after epochs.

    Raises:
        ValueError: If `save_freq` has no valid value.
    """

    runs_last = True

    def __init__(self, save_freq: SaveFreq | str | None = "default") -> None:
        super().__init__()
        if save_freq not in (None, "default"):
            saving_times(save_freq, alone=True)
        self.save_freq = save_freq
        self._reported: int | None = None
        self._epoch = 0
        self._backup: BackupAndRestore | None = None

    def on_train_begin(self, logs: Mapping[str, float] | None = None) -> None:
        """Looks for the callback whose backups it reports."""
        self._reported = None
        backups = (item for item in self.siblings if isinstance(item, BackupAndRestore))
        self._backup = next((backup for backup in backups if backup.gathers), None)

    def on_train_batch_end(self, batch: int, logs: Mapping[str, float] | None = None) -> None:
        """Reports a backup that was made after this batch."""
        if checkpoints := self._new_checkpoints():
            position = self.model.resumption.reached().position
            self._report({"epoch": position.epoch, "batch": position.batch}, checkpoints)

    def on_epoch_end(self, epoch: int, logs: Mapping[str, float] | None = None) -> None:
        """Reports the logs of an epoch, with a backup if one was made."""
        self._epoch = epoch
        self._report({**_numbers(logs), "epoch": epoch}, self._new_checkpoints())

    def on_train_end(self, logs: Mapping[str, float] | None = None) -> None:
        """Reports the last backup, with the logs of the last epoch."""
        if role() == "worker" and (checkpoints := self._new_checkpoints()):
            self._report({**_numbers(logs), "epoch": self._epoch}, checkpoints)

    def _report(self, metrics: Mapping[str, Any], checkpoints: list[str]) -> None:
        if (storage := ray_storage()) is None:
            return
        if checkpoints:
            # Ray's storage may be slow; the backups that it has not copied stay on the disk.
            with busy("the copy of a checkpoint to Ray's storage", limit_s=_LONGEST_COPY_S):
                storage.wait()
        storage.report(metrics, checkpoints=checkpoints)

    def _new_checkpoints(self) -> list[str]:
        """Returns the folders of all fits' backups if one is new; all processes call it."""
        backup = self._backup
        if backup is None or backup.newest in (None, self._reported):
            return []
        self._reported = backup.newest
        if backup.written() is None or (storage := ray_storage()) is None:
            return []
        fits = sorted(item for item in storage.folder.glob("fit-*") if item.is_dir())
        newest = {fit.name: newest_backup(fit) for fit in fits}
        # A process of another node than the first has none; it reports along.
        return [f"{fit}/{name}" for fit, name in newest.items() if name is not None] or ["none"]


def backup_on_ray(directory: Path, save_freq: SaveFreq | str, storage: RayStorage) -> Callback:
    """Returns the callback whose backups `RayReport` reports."""
    # Schedulers of Ray Tune count reports.
    freq = "epoch" if role() == "trial" else save_freq
    backup = BackupAndRestore(directory, freq, delete_checkpoint=False)
    backup.gathers, backup.where = True, f"{storage.name} ({directory.name})"
    return backup


def ray_storage() -> RayStorage | None:
    """Returns the storage of this process's Ray run, or None; first, all call it together."""
    if role() is None:
        return None
    if (storage := _storage.get()) is None or storage.is_over:
        storage = open_storage()
        _storage.set(storage)
    return storage


def _numbers(logs: Mapping[str, Any] | None) -> dict[str, Any]:
    # A metric of several thresholds or classes has a vector of results.
    return {name: np.asarray(value).tolist() for name, value in (logs or {}).items()}


class OptunaPruning(Callback):
    """Reports a log to Optuna after each epoch, and ends a trial that Optuna prunes.

    Optuna's `KerasPruningCallback` for a trial that several processes train together: the master
    reports and asks, and all processes make the same decision.

    Args:
        trial: The trial of the objective, a `tnt_jax.search.SharedTrial`; or, on the master, an
            `optuna.trial.Trial`, and None on the other processes.
        monitor: Log to report, such as `val_loss`. The direction of the study says whether less or
            more of it is better.
        interval: Epochs from one report to the next.

    Raises:
        ModuleNotFoundError: If Optuna is not installed.
        ValueError: If `interval` is below 1.
        TypeError: On every process, if the master has no trial.
    """

    def __init__(self, trial: Any, monitor: str = "val_loss", interval: int = 1) -> None:
        super().__init__()
        if interval < 1:
            raise ValueError(f"interval must be at least 1 epoch, but is {interval}.")
        self._pruned = import_optuna("tnt_jax.callbacks.OptunaPruning").TrialPruned
        self._trial = trial if isinstance(trial, SharedTrial) else SharedTrial(trial)
        self.monitor = monitor
        self.interval = interval
        self._watch = Monitor(monitor)

    def on_epoch_end(self, epoch: int, logs: Mapping[str, float] | None = None) -> None:
        """Reports the log; raises `optuna.TrialPruned` on all processes if Optuna prunes."""
        if (epoch + 1) % self.interval:
            return
        value = self._watch.value(logs, who="OptunaPruning")
        if value is None:
            return
        self._trial.report(float(value), step=epoch)
        if self._trial.should_prune():
            raise self._pruned(f"Trial was pruned at epoch {epoch}.")
