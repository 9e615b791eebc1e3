"""Ends training when a log no longer improves, or the loss is no number."""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from tnt_jax.keras_compat.callbacks.base import Callback, say
from tnt_jax.keras_compat.callbacks.monitor import Mode, Monitor


class TerminateOnNaN(Callback):
    """Ends training on all ranks after the first step whose loss is NaN or infinite.

    It reads the loss of every step, so the host waits for each one, and sees it when the weights
    have changed already. `compile(on_nan="raise")` ends training before, without waiting.

    Args:
        raise_error: Whether to raise an error instead, so that `on_train_end` does not run.
    """

    def __init__(self, raise_error: bool = False) -> None:
        super().__init__()
        self.raise_error = raise_error

    def on_train_batch_end(self, batch: int, logs: Mapping[str, float] | None = None) -> None:
        """Checks the loss; a RuntimeError if it is not finite and `raise_error` is set."""
        loss = (logs or {}).get("loss")
        if loss is None or math.isfinite(loss):
            return
        if self.raise_error:
            raise RuntimeError(
                f"The loss is {loss} after batch {batch}. Check the inputs, or lower the learning "
                "rate."
            )
        print(f"Batch {batch}: Invalid loss, terminating training", flush=True)
        self.model.stop_training = True


class EarlyStopping(Callback):
    """Ends training when a log has not improved for some epochs, as Keras's callback does.

    Args:
        monitor: Log to monitor.
        min_delta: Smallest change that counts as an improvement.
        patience: Number of epochs without improvement after which training ends.
        verbose: 1 to print what happens.
        mode: `"min"`, `"max"` or `"auto"`.
        baseline: Value that must be reached within `patience` epochs.
        restore_best_weights: Whether to restore the weights of the best epoch at the end.
        start_from_epoch: Number of epochs at the beginning that are not monitored.

    Attributes:
        best: Best value so far, or None.
        best_epoch: Epoch of the best value.
        stopped_epoch: Epoch after which training was ended, or 0.
        wait: Epochs since the last improvement.
    """

    def __init__(
        self,
        monitor: str = "val_loss",
        min_delta: float = 0.0,
        patience: int = 0,
        verbose: int = 0,
        mode: Mode = "auto",
        baseline: float | None = None,
        restore_best_weights: bool = False,
        start_from_epoch: int = 0,
    ) -> None:
        super().__init__()
        self.monitor = monitor
        self.patience = patience
        self.baseline = baseline
        self.start_from_epoch = start_from_epoch
        self.restore_best_weights = restore_best_weights
        self.verbose = verbose
        self._watch = Monitor(monitor, mode=mode, min_delta=min_delta)
        self._reset()

    def set_model(self, model: Any) -> None:
        """Receives the model, whose metrics determine the direction of improvement."""
        super().set_model(model)
        self._watch.resolve(model)

    def state(self) -> dict[str, Any]:
        """Returns the state of the monitor, including the best weights."""
        weights = {} if self.best_weights is None else {"best_weights": self.best_weights}
        return {"wait": self.wait, "best": self.best, "best_epoch": self.best_epoch, **weights}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Restores the state of an interrupted run."""
        self.wait, self.best, self.best_epoch = state["wait"], state["best"], state["best_epoch"]
        self.best_weights = state.get("best_weights")

    def on_train_begin(self, logs: Mapping[str, float] | None = None) -> None:
        """Clears the state of an earlier run."""
        self._reset()

    def on_epoch_end(self, epoch: int, logs: Mapping[str, float] | None = None) -> None:
        """Ends training if the log has not improved for too long."""
        value = self._watch.value(logs, who="EarlyStopping")
        if value is None or epoch < self.start_from_epoch:
            return
        if self.restore_best_weights and self.best_weights is None:
            # Should no epoch beat a NaN, the first one is the best.
            self.best_weights = self.model.get_weights()
            self.best_epoch = epoch
        self.wait += 1
        if self._watch.is_better(value, self.best):
            self._keep(epoch, value)
        elif self.wait >= self.patience and epoch > 0:
            self.stopped_epoch = epoch
            self.model.stop_training = True

    def on_train_end(self, logs: Mapping[str, float] | None = None) -> None:
        """Restores the best weights, if requested."""
        if self.stopped_epoch > 0:
            say(self, f"Epoch {self.stopped_epoch + 1}: early stopping")
        if self.restore_best_weights and self.best_weights is not None:
            epoch = self.best_epoch + 1
            say(self, f"Restoring model weights from the end of the best epoch: {epoch}.")
            self.model.set_weights(self.best_weights)

    def _keep(self, epoch: int, value: float) -> None:
        self.best, self.best_epoch = value, epoch
        if self.restore_best_weights:
            self.best_weights = self.model.get_weights()
        if self.baseline is None or self._watch.is_better(value, self.baseline):
            self.wait = 0

    def _reset(self) -> None:
        self.wait = self.stopped_epoch = self.best_epoch = 0
        self.best: float | None = None
        self.best_weights: list[np.ndarray] | None = None
