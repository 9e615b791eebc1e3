"""MLflow as a tracker; the only file that imports `mlflow`."""

import re
import time
from collections.abc import Mapping
from typing import Any, Literal

import numpy as np

from tnt_jax.keras_compat.callbacks.base import import_for

# Parameters that a table of runs is compared by; all others are in the file of the configuration.
_PARAMETERS = ("optimizer", "learning_rate", "loss", "batch_size", "seed")
_MOST_CHARACTERS = 500
_MOST_PARAMETERS = 100
_NO_NAME = re.compile(r"[^\w\-. :/]")


class MLflow:
    """A run in MLflow, for `Track`.

    The settings of optimizer, learning rate, loss, batch and seed are parameters; the whole
    configuration is the file `configuration.json`, and histograms are the files
    `histograms/STEP.json`.

    Args:
        experiment: Name of the experiment, which is made if it is not there.
        name: Name of the run.
        uri: Where runs are stored, such as `"sqlite:///runs.db"` or the address of a server; by
            default as `MLFLOW_TRACKING_URI` says.

    Raises:
        ModuleNotFoundError: If mlflow is not installed.
    """

    def __init__(
        self, experiment: str = "Default", *, name: str | None = None, uri: str | None = None
    ) -> None:
        self._mlflow = import_for("MLflow", "mlflow", "mlflow")
        self._experiment = experiment
        self._name = name
        self._uri = uri
        self._client: Any = None
        self._run = ""

    def start(self, configuration: Mapping[str, Mapping[str, str]], run: str | None) -> str:
        """Begins a run, or goes on with one; see `Tracker`."""
        self._client = self._mlflow.MlflowClient(self._uri)
        if run is not None:
            self._run = run
            self._client.update_run(run, status="RUNNING")
            return run
        found = self._client.get_experiment_by_name(self._experiment)
        where = found.experiment_id if found else self._client.create_experiment(self._experiment)
        self._run = self._client.create_run(where, run_name=self._name).info.run_id
        parameters = [
            self._mlflow.entities.Param(_NO_NAME.sub("_", name), text[:_MOST_CHARACTERS])
            for group in _PARAMETERS
            for name, text in configuration.get(group, {}).items()
        ]
        self._client.log_batch(self._run, params=parameters[:_MOST_PARAMETERS])
        self._client.log_dict(self._run, dict(configuration), "configuration.json")
        return self._run

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Records numbers."""
        now = time.time_ns() // 10**6
        metrics = [
            self._mlflow.entities.Metric(_NO_NAME.sub("_", name), value, now, step)
            for name, value in values.items()
        ]
        self._client.log_batch(self._run, metrics=metrics)

    def log_arrays(
        self, kind: Literal["histogram", "image"], arrays: Mapping[str, np.ndarray], step: int
    ) -> None:
        """Records histograms as one file, and images."""
        if kind == "histogram":
            table = {}
            for path, array in arrays.items():
                counts, edges = np.histogram(array, bins=64)
                table[path] = {"counts": counts.tolist(), "edges": edges.tolist()}
            self._client.log_dict(self._run, table, f"histograms/{step}.json")
            return
        for path, image in arrays.items():
            self._client.log_image(self._run, image, f"images/{path}/{step}.png")

    def finish(self) -> None:
        """Ends the run."""
        self._client.set_terminated(self._run, "FINISHED")
