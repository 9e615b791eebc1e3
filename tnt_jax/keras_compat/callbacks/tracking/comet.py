"""Comet as a tracker; the only file that imports `comet_ml`."""

import os
from collections.abc import Mapping
from typing import Any, Literal

import numpy as np

from tnt_jax.keras_compat.callbacks.base import import_for


class Comet:
    """An experiment in Comet, for `Track`.

    A resumed run has the same key. Offline, it is a second archive with that key, which
    `comet upload` adds to the first.

    Args:
        project: Name of the project; by default as `comet_ml` chooses.
        name: Name of the experiment.
        workspace: User or team.
        folder: Folder for the archives of experiments that are not online.
        online: Whether to send the experiment while it runs, or to write an archive.

    Raises:
        ModuleNotFoundError: If comet_ml is not installed.
    """

    def __init__(
        self,
        project: str | None = None,
        *,
        name: str | None = None,
        workspace: str | None = None,
        folder: str | os.PathLike[str] | None = None,
        online: bool = True,
    ) -> None:
        self._comet = import_for("Comet", "comet_ml", "comet-ml")
        self._options = {"project_name": project, "workspace": workspace, "online": online}
        self._name = name
        self._folder = folder and os.fspath(folder)
        self._experiment: Any = None

    def start(self, configuration: Mapping[str, Mapping[str, str]], run: str | None) -> str:
        """Begins an experiment, or goes on with one; see `Tracker`."""
        self._experiment = self._comet.start(
            **self._options,
            experiment_key=run,
            mode="create" if run is None else "get",
            experiment_config=self._comet.ExperimentConfig(
                name=self._name,
                offline_directory=self._folder,
                auto_metric_logging=False,
                auto_param_logging=False,
            ),
        )
        if run is None:
            settings = configuration.items()
            flat = {f"{group}/{name}": text for group, g in settings for name, text in g.items()}
            self._experiment.log_parameters(flat)
        return self._experiment.get_key()

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Records numbers."""
        self._experiment.log_metrics(dict(values), step=step)

    def log_arrays(
        self, kind: Literal["histogram", "image"], arrays: Mapping[str, np.ndarray], step: int
    ) -> None:
        """Records histograms or images."""
        for path, array in arrays.items():
            if kind == "histogram":
                self._experiment.log_histogram_3d(array, name=path, step=step)
            else:
                from PIL import Image

                # Comet would scale an array by its range, which may be empty.
                self._experiment.log_image(Image.fromarray(array), name=path, step=step)

    def finish(self) -> None:
        """Ends the experiment, and waits until everything is sent or written."""
        self._experiment.end()
