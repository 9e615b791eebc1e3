"""Weights & Biases as a tracker; the only file that imports `wandb`."""

import os
from collections.abc import Mapping
from typing import Any, Literal

import numpy as np

from tnt_jax.keras_compat.callbacks.base import import_for


class WeightsAndBiases:
    """A run in Weights & Biases, for `Track`.

    A resumed run has the same id. Offline, it is a second folder with that id: `wandb sync` makes
    one run of both.

    Args:
        project: Name of the project; by default as `wandb` chooses.
        name: Name of the run.
        entity: User or team.
        folder: Folder in which files are written; by default the working directory.
        mode: `"online"`, `"offline"` or `"disabled"`; by default as `WANDB_MODE` says.

    Raises:
        ModuleNotFoundError: If wandb is not installed.
    """

    def __init__(
        self,
        project: str | None = None,
        *,
        name: str | None = None,
        entity: str | None = None,
        folder: str | os.PathLike[str] | None = None,
        mode: Literal["online", "offline", "disabled"] | None = None,
    ) -> None:
        self._wandb = import_for("WeightsAndBiases", "wandb", "wandb")
        self._options = {
            "project": project,
            "name": name,
            "entity": entity,
            "dir": folder and os.fspath(folder),
            "mode": mode,
        }
        self._run: Any = None

    def start(self, configuration: Mapping[str, Mapping[str, str]], run: str | None) -> str:
        """Begins a run, or goes on with one; see `Tracker`."""
        self._run = self._wandb.init(
            **self._options,
            id=run,
            resume=None if run is None else "allow",
            config={group: dict(settings) for group, settings in configuration.items()},
        )
        return self._run.id

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Records numbers; Weights & Biases leaves out steps that it has."""
        self._run.log(dict(values), step=step)

    def log_arrays(
        self, kind: Literal["histogram", "image"], arrays: Mapping[str, np.ndarray], step: int
    ) -> None:
        """Records histograms or images."""

        def made(array: np.ndarray) -> Any:
            if kind == "histogram":
                return self._wandb.Histogram(array)
            from PIL import Image

            # An array of one row would be taken for something else.
            return self._wandb.Image(Image.fromarray(array))

        self._run.log({f"{path}/{kind}": made(array) for path, array in arrays.items()}, step=step)

    def finish(self) -> None:
        """Ends the run."""
        self._run.finish()
