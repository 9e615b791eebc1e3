"""Ends the trials of an Optuna study that do not look promising."""

from collections.abc import Mapping
from typing import Any

from tnt_jax.keras_compat.callbacks.base import Callback
from tnt_jax.keras_compat.callbacks.monitor import Monitor
from tnt_jax.search.require import import_optuna
from tnt_jax.search.shared_trial import SharedTrial


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
        """Reports the log.

        Raises:
            optuna.TrialPruned: On every process, if Optuna prunes the trial.
        """
        if (epoch + 1) % self.interval:
            return
        value = self._watch.value(logs, who="OptunaPruning")
        if value is None:
            return
        self._trial.report(float(value), step=epoch)
        if self._trial.should_prune():
            raise self._pruned(f"Trial was pruned at epoch {epoch}.")
