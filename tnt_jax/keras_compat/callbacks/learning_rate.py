"""Callbacks that set the learning rate, or swap averaged weights, without recompilation."""

from collections.abc import Callable, Mapping, MutableMapping
from typing import Any, cast

import numpy as np

from tnt_jax.keras_compat.callbacks.base import Callback, say
from tnt_jax.keras_compat.callbacks.monitor import Mode, Monitor


class SwapEMAWeights(Callback):
    """Swaps an optimizer's averaged weights (`use_ema=True`) in for evaluations, as in Keras.

    Args:
        swap_on_epoch: Whether the averages are also in the model at the end of each epoch, for
            later callbacks such as `ModelCheckpoint`.
    """

    _state_names = ("_average_is_in_model",)

    def __init__(self, swap_on_epoch: bool = False) -> None:
        super().__init__()
        self.swap_on_epoch = swap_on_epoch
        self._average_is_in_model = False

    def on_epoch_begin(self, epoch: int, logs: Mapping[str, float] | None = None) -> None:
        """Swaps the averages out."""
        if self.swap_on_epoch:
            self.swap_out()

    def on_epoch_end(self, epoch: int, logs: Mapping[str, float] | None = None) -> None:
        """Swaps the averages in."""
        if self.swap_on_epoch and not self._average_is_in_model:
            self._put_average(True)
            if epoch == self.params["epochs"] - 1:
                # The end of training swaps the averages in again.
                self.model.optimizer.copy_weights_to_average()

    def on_test_begin(self, logs: Mapping[str, float] | None = None) -> None:
        """Swaps the averages in."""
        self._put_average(True)

    def on_test_end(self, logs: Mapping[str, float] | None = None) -> None:
        """Swaps the averages out."""
        self.swap_out()

    on_predict_begin, on_predict_end = on_test_begin, on_test_end

    def swap_out(self) -> None:
        """Swaps the averages out, if they are in the model."""
        self._put_average(False)

    def _put_average(self, wanted: bool) -> None:
        if self._average_is_in_model != wanted:
            self.model.optimizer.swap_average()
            self._average_is_in_model = wanted


class LearningRateScheduler(Callback):
    """Sets the learning rate at the beginning of each epoch.

    Args:
        schedule: Maps the epoch (from 0) and the previous rate to the rate of the epoch; it may
            also take only the epoch.
        verbose: 1 to print the rate.
    """

    _state_names = ("_epoch", "_before")

    def __init__(self, schedule: Callable[..., float], verbose: int = 0) -> None:
        super().__init__()
        self.schedule = schedule
        self.verbose = verbose
        self._epoch = -1
        self._before = 0.0

    def on_epoch_begin(self, epoch: int, logs: Mapping[str, float] | None = None) -> None:
        """Sets the rate of the epoch; a TypeError if the schedule returns no number."""
        # A run that resumes within an epoch begins this epoch again.
        before = self._before if epoch == self._epoch else float(self.model.optimizer.learning_rate)
        self._epoch, self._before = epoch, before
        try:
            rate = self.schedule(epoch, before)
        except TypeError:
            # Early Keras schedules took only the epoch.
            rate = self.schedule(epoch)
        if np.ndim(rate) != 0 or np.asarray(rate).dtype.kind not in "fiu":
            raise TypeError(
                f"The schedule must return a number, but returned {rate!r} for epoch {epoch}."
            )
        self.model.optimizer.learning_rate = float(rate)
        say(self, f"\nEpoch {epoch + 1}: LearningRateScheduler setting learning rate to {rate}.")

    def on_train_begin(self, logs: Mapping[str, float] | None = None) -> None:
        """Clears the state of an earlier run."""
        self._epoch = -1

    def on_epoch_end(self, epoch: int, logs: Mapping[str, float] | None = None) -> None:
        """Adds the rate to the logs."""
        _add_rate(self.model, logs)


class ReduceLROnPlateau(Callback):
    """Reduces the learning rate when a log has stopped improving, as Keras's callback does.

    Args:
        monitor: Log to monitor.
        factor: Factor by which the rate is multiplied, below 1.
        patience: Number of epochs without improvement before a reduction.
        verbose: 1 to print reductions.
        mode: `"min"`, `"max"` or `"auto"`.
        min_delta: Smallest change that counts as an improvement.
        cooldown: Number of epochs after a reduction that are not monitored.
        min_lr: Smallest rate.

    Attributes:
        best: Best value so far, or None.
        wait: Epochs since the last improvement or reduction.
        cooldown_counter: Remaining epochs of cooldown.

    Raises:
        ValueError: If `factor` is 1 or more.
    """

    _state_names = ("wait", "best", "cooldown_counter")

    def __init__(
        self,
        monitor: str = "val_loss",
        factor: float = 0.1,
        patience: int = 10,
        verbose: int = 0,
        mode: Mode = "auto",
        min_delta: float = 1e-4,
        cooldown: int = 0,
        min_lr: float = 0.0,
    ) -> None:
        super().__init__()
        if factor >= 1:
            raise ValueError(f"ReduceLROnPlateau needs a factor below 1, but got {factor}.")
        self.monitor = monitor
        self.factor = factor
        self.patience = patience
        self.verbose = verbose
        self.cooldown = cooldown
        self.min_lr = min_lr
        self._watch = Monitor(monitor, mode=mode, min_delta=min_delta)
        self.on_train_begin()

    def set_model(self, model: Any) -> None:
        """Receives the model, whose metrics determine the direction of improvement."""
        super().set_model(model)
        self._watch.resolve(model)

    def on_train_begin(self, logs: Mapping[str, float] | None = None) -> None:
        """Clears the state of an earlier run."""
        self.wait = self.cooldown_counter = 0
        self.best: float | None = None

    def on_epoch_end(self, epoch: int, logs: Mapping[str, float] | None = None) -> None:
        """Adds the rate to the logs, and reduces it if the log has not improved for too long."""
        _add_rate(self.model, logs)
        value = self._watch.value(logs, who="ReduceLROnPlateau")
        if value is None:
            return
        if self.cooldown_counter > 0:
            self.cooldown_counter -= 1
            self.wait = 0
        if self._watch.is_better(value, self.best):
            self.best = value
            self.wait = 0
        elif self.cooldown_counter == 0:
            self.wait += 1
            if self.wait >= self.patience:
                self._reduce(epoch)

    def _reduce(self, epoch: int) -> None:
        before = float(self.model.optimizer.learning_rate)
        if before <= np.float32(self.min_lr):
            return
        rate = max(before * self.factor, self.min_lr)
        self.model.optimizer.learning_rate = rate
        self.wait = 0
        self.cooldown_counter = self.cooldown
        say(self, f"\nEpoch {epoch + 1}: ReduceLROnPlateau reducing learning rate to {rate}.")


class LearningRateWarmup(Callback):
    """Raises the learning rate step by step over the first epochs.

    Goyal et al. 2017, arXiv:1706.02677, section 2.2. Before step i (from 0) of the warm-up's n
    steps the rate is initial + (target - initial) * (i + 1) / n, so the last step runs at the
    target; afterwards the rate is not changed. The paper's linear scaling rule starts from the rate
    of a small batch; the target is this rate times the ratio of the batch sizes.

    Args:
        target_learning_rate: Rate at the end of the warm-up.
        initial_learning_rate: Rate from which the first step starts.
        epochs: Length of the warm-up; 5 in the paper. It may be a fraction.
        verbose: 1 to print when the warm-up is done.

    Raises:
        ValueError: If `epochs` is not positive.
    """

    _state_names = ("_is_warming_up",)

    def __init__(
        self,
        target_learning_rate: float,
        *,
        initial_learning_rate: float = 0.0,
        epochs: float = 5,
        verbose: int = 0,
    ) -> None:
        super().__init__()
        if epochs <= 0:
            raise ValueError(f"The warm-up must last longer than 0 epochs, but epochs is {epochs}.")
        self.target = target_learning_rate
        self.initial = initial_learning_rate
        self.epochs = epochs
        self.verbose = verbose
        self._epoch = self._num_steps = 0
        self._is_warming_up = False

    def on_train_begin(self, logs: Mapping[str, float] | None = None) -> None:
        """Counts the steps of the warm-up; a ValueError if those of an epoch are unknown."""
        if not self.params["steps"]:
            raise ValueError(
                "LearningRateWarmup needs to know the steps of an epoch: pass steps_per_epoch to "
                "fit."
            )
        self._num_steps = max(round(self.epochs * self.params["steps"]), 1)

    def on_epoch_begin(self, epoch: int, logs: Mapping[str, float] | None = None) -> None:
        """Records the epoch."""
        self._epoch = epoch

    def on_train_batch_begin(self, batch: int, logs: Mapping[str, float] | None = None) -> None:
        """Sets the rate of the step."""
        done = self._epoch * self.params["steps"] + batch + 1
        # Steps that run in one program have the rate of the first: the last may not be seen.
        if done > self._num_steps and not self._is_warming_up:
            return
        rise = (self.target - self.initial) * min(done, self._num_steps) / self._num_steps
        self.model.optimizer.learning_rate = self.initial + rise
        self._is_warming_up = done < self._num_steps
        if not self._is_warming_up:
            epoch = self._epoch + 1
            say(self, f"\nEpoch {epoch}: the learning rate is warmed up to {self.target}.")

    def on_epoch_end(self, epoch: int, logs: Mapping[str, float] | None = None) -> None:
        """Adds the rate to the logs."""
        _add_rate(self.model, logs)


def _add_rate(model: Any, logs: Mapping[str, float] | None) -> None:
    if logs is not None:
        shared = cast(MutableMapping[str, float], logs)
        shared["learning_rate"] = float(model.optimizer.learning_rate)
