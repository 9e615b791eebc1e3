"""The record of a training run."""

from collections.abc import Mapping
from typing import Any

from tnt_jax.keras_compat.callbacks.base import Callback


class History(Callback):
    """Records the logs of each epoch; `fit` returns one, the same on every process.

    Attributes:
        history: The values of each log by epoch.
        epoch: Numbers of the epochs, from 0.
    """

    def __init__(self) -> None:
        super().__init__()
        self.history: dict[str, list[float]] = {}
        self.epoch: list[int] = []

    def state(self) -> dict[str, Any]:
        """Returns the record so far."""
        return {"epoch": self.epoch, "history": self.history}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Restores the record of an interrupted run."""
        self.epoch = list(state["epoch"])
        self.history = {name: list(values) for name, values in state["history"].items()}

    def on_train_begin(self, logs: Mapping[str, float] | None = None) -> None:
        """Clears the epoch numbers of an earlier run, as Keras does."""
        self.epoch = []

    def on_epoch_end(self, epoch: int, logs: Mapping[str, float] | None = None) -> None:
        """Records the logs of an epoch."""
        self.epoch.append(epoch)
        for name, value in (logs or {}).items():
            self.history.setdefault(name, []).append(value)

    def set_model(self, model: Any) -> None:
        """Sets itself as the model's `history`."""
        super().set_model(model)
        model.history = self
