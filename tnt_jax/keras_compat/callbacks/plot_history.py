"""Plots the logs after each epoch."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tnt_jax.keras_compat.callbacks.base import Callback
from tnt_jax.keras_compat.curves import draw_curves


class PlotHistory(Callback):
    """Draws the curves of all logs after every epoch, on the master.

    Args:
        filepath: File to write; its extension determines the format, for instance `.png`.
    """

    def __init__(self, filepath: str | os.PathLike[str]) -> None:
        super().__init__()
        self.filepath = Path(filepath)
        self._epochs: list[int] = []
        self._history: dict[str, list[float]] = {}

    def state(self) -> dict[str, Any]:
        """Returns the curves so far."""
        return {"epochs": self._epochs, "history": self._history}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Restores the curves of an interrupted run."""
        self._epochs = list(state["epochs"])
        self._history = {name: list(values) for name, values in state["history"].items()}

    def on_train_begin(self, logs: Mapping[str, float] | None = None) -> None:
        """Clears the curves of an earlier run."""
        self._epochs = []
        self._history = {}

    def on_epoch_end(self, epoch: int, logs: Mapping[str, float] | None = None) -> None:
        """Draws the curves."""
        self._epochs.append(epoch)
        for name, value in (logs or {}).items():
            self._history.setdefault(name, []).append(value)
        if self.writes and self._history:
            self.filepath.parent.mkdir(parents=True, exist_ok=True)
            draw_curves(self.filepath, self._history, self._epochs)
