"""Sends a run to an experiment tracker, whichever it is.

tracker = tnt.callbacks.MLflow(experiment="digits")
model.fit(dataset, epochs=90, resume="auto", callbacks=[tnt.callbacks.Track(tracker)])
"""

from collections.abc import Callable, Mapping
from typing import Any, Literal, Protocol

import numpy as np

from tnt_jax.distributed.leaving import gist
from tnt_jax.keras_compat.callbacks.base import Callback, StepCount
from tnt_jax.keras_compat.callbacks.tensorboard import as_images, as_numbers, finite_values
from tnt_jax.log import logger


class Tracker(Protocol):
    """A run in an experiment tracker; the master alone calls it, in this order.

    To add a tracker, write a class with these four methods: it need not inherit from this one.
    """

    def start(self, configuration: Mapping[str, Mapping[str, str]], run: str | None) -> str:
        """Begins a run, or goes on with the one that returned `run`, and returns its name.

        `configuration` holds settings by group (`model`, `optimizer`, `data`, ...) and name.
        """
        ...

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Records numbers after so many steps; a resumed run may repeat steps and their numbers."""
        ...

    def log_arrays(
        self, kind: Literal["histogram", "image"], arrays: Mapping[str, np.ndarray], step: int
    ) -> None:
        """Records the distribution of arrays, or images of bytes.

        Images are `[height, width]` (grey) or `[height, width, channels]` (colours).
        """
        ...

    def finish(self) -> None:
        """Ends the run, and waits until everything is written."""
        ...


class Track(Callback):
    """Sends the configuration, the logs and the weights of a run to an experiment tracker.

    The logs of an epoch, with `epoch` and `learning_rate`, are recorded under their names, those of
    steps as `batch_loss` and the like, each with the number of steps so far. What defines the run
    (the settings of model, optimizer, loss and data with their checksums, seed and versions) is its
    configuration. A run that resumes from a backup goes on in the same run of the tracker. One that
    cannot start is an error; if it fails later, training goes on with a warning.

    Args:
        tracker: Such as a `WeightsAndBiases`, an `MLflow` or a `Comet`; see `Tracker` for others.
        update_freq: `"epoch"`, or the number of steps between two records of step logs, which wait
            for the devices.
        histogram_freq: Number of epochs between two histograms of the weights; 0 for none.
        write_images: Whether to record weights as images, too, together with histograms.

    Raises:
        ValueError: If a number is out of range.
    """

    def __init__(
        self,
        tracker: Tracker,
        *,
        update_freq: int | Literal["epoch"] = "epoch",
        histogram_freq: int = 0,
        write_images: bool = False,
    ) -> None:
        super().__init__()
        if update_freq != "epoch" and (not isinstance(update_freq, int) or update_freq < 1):
            raise ValueError(
                f"update_freq must be 'epoch' or a number of steps from 1, but is {update_freq!r}."
            )
        if histogram_freq < 0:
            raise ValueError(f"histogram_freq must be at least 0, but is {histogram_freq}.")
        self.tracker = tracker
        self.update_freq = update_freq
        self.histogram_freq = histogram_freq
        self.write_images = write_images
        self._run: str | None = None
        self._has_started = False
        # Methods of the tracker that have failed in this run.
        self._failed: set[str] = set()
        self._steps = StepCount()

    def state(self) -> dict[str, Any]:
        """Returns the name of the run in the tracker."""
        return {} if self._run is None else {"run": self._run}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Goes on with the run of an interrupted training."""
        self._run = state["run"]

    def on_train_begin(self, logs: Mapping[str, float] | None = None) -> None:
        """Forgets an earlier run."""
        self._run, self._has_started, self._steps = None, False, StepCount()
        self._failed.clear()

    def on_epoch_begin(self, epoch: int, logs: Mapping[str, float] | None = None) -> None:
        """Begins the run: whether training resumes is known only when all callbacks have begun."""
        self._steps.begin_epoch()
        self._start()

    def on_train_batch_begin(self, batch: int, logs: Mapping[str, float] | None = None) -> None:
        """Notes where the epoch begins, which may be in its middle."""
        self._steps.begin(batch, self.model)

    def on_train_batch_end(self, batch: int, logs: Mapping[str, float] | None = None) -> None:
        """Counts the steps, and records their logs when due."""
        before = self._steps.done
        self._steps.end(batch, self.model, self.params["steps"])
        if not isinstance(self.update_freq, int) or not self.writes:
            return
        if self._steps.done // self.update_freq > before // self.update_freq:
            self._start()
            values = {f"batch_{name}": value for name, value in as_numbers(logs).items()}
            self._send(self.tracker.log, values, self._steps.done)

    def on_epoch_end(self, epoch: int, logs: Mapping[str, float] | None = None) -> None:
        """Records the logs of an epoch, and weights when due."""
        if not self.writes:
            return
        self._start()
        values = as_numbers(logs) | {"epoch": epoch}
        if hasattr(self.model.optimizer, "learning_rate"):
            values["learning_rate"] = float(self.model.optimizer.learning_rate)
        self._send(self.tracker.log, values, self._steps.done)
        if self.histogram_freq and epoch % self.histogram_freq == 0:
            self._log_weights(self._steps.done)

    def on_train_end(self, logs: Mapping[str, float] | None = None) -> None:
        """Ends the run."""
        if self._has_started:
            self._send(self.tracker.finish)
            self._has_started = False

    def _start(self) -> None:
        """Begins the run, within an epoch on a process that has become the master."""
        if self.writes and not self._has_started:
            self._run = self.tracker.start(self.model.resumption.run or {}, self._run)
            self._has_started = True

    def _log_weights(self, step: int) -> None:
        weights = self.model.weights_by_path()
        finite = {path: finite_values(path, weight) for path, weight in weights.items()}
        histograms = {p: x for p, x in finite.items() if x.size}
        self._send(self.tracker.log_arrays, "histogram", histograms, step)
        if self.write_images:
            images = {path: as_images(weight) for path, weight in weights.items()}
            first = {path: found[0] for path, found in images.items() if found is not None}
            shown = {p: x[..., 0] if x.shape[-1] == 1 else x for p, x in first.items()}
            self._send(self.tracker.log_arrays, "image", shown, step)

    def _send(self, method: Callable[..., None], *args: Any) -> None:
        """Calls a method of the tracker; a failure ends no training."""
        try:
            method(*args)
        except Exception as error:
            if method.__name__ not in self._failed:
                self._failed.add(method.__name__)
                logger.warning(
                    "The tracker %s failed in %s. Training goes on without what it was to record; "
                    "further failures of this kind are not reported: %s",
                    type(self.tracker).__name__,
                    method.__name__,
                    gist(error),
                )
