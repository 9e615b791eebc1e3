"""Saves the model during training."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tnt_jax.distributed.host.collectives import raise_on_all_processes
from tnt_jax.keras_compat.callbacks.base import Callback, say
from tnt_jax.keras_compat.callbacks.monitor import Mode, Monitor, SaveFreq, SavingTimes
from tnt_jax.keras_compat.keras_objects import is_keras
from tnt_jax.keras_compat.saving.weight_files import is_file_name
from tnt_jax.train.checkpoints.checkpoint import Checkpoints
from tnt_jax.train.checkpoints.directory import problem_of_folder

# Extensions of single files; anything else is a directory, written in the background.
_FILES = (".weights.h5", ".h5", ".keras", ".safetensors")


class ModelCheckpoint(Callback):
    """Saves the model after epochs or batches, or if a log has improved, as Keras's callback does.

    A path without one of the extensions `.weights.h5`, `.safetensors` and `.keras` is a
    directory. All processes write it together while training continues, and an earlier one stays
    readable until the new one is complete.

    Args:
        filepath: Where to save; `{epoch}` (from 1), `{batch}` (from 1, when batches decide) and
            names of logs are filled in, for instance `"runs/{epoch:02d}-{val_loss:.2f}"`.
        monitor: Log that decides if `save_best_only` is True.
        verbose: 1 to print what happens.
        save_best_only: Whether to save only when the log has improved.
        save_weights_only: Whether to leave out what is needed to recreate and compile the model.
        mode: `"min"`, `"max"` or `"auto"`.
        save_freq: `"epoch"`, or the number of batches between two saves.
        initial_value_threshold: Value that the first save must improve on.

    Attributes:
        best: Best value so far, or None.

    Raises:
        ValueError: If `save_freq` or `mode` is unknown, or a file name does not fit
            `save_weights_only`.
    """

    _state_names = ("best",)

    def __init__(
        self,
        filepath: str | os.PathLike[str],
        monitor: str = "val_loss",
        verbose: int = 0,
        save_best_only: bool = False,
        save_weights_only: bool = False,
        mode: Mode = "auto",
        save_freq: SaveFreq = "epoch",
        initial_value_threshold: float | None = None,
    ) -> None:
        super().__init__()
        self.filepath = os.fspath(filepath)
        is_weights = self.filepath.endswith((".weights.h5", ".safetensors"))
        if is_weights and not save_weights_only:
            raise ValueError(
                f"{self.filepath} can hold weights only: pass save_weights_only=True, or a name "
                "without this extension."
            )
        if self.filepath.endswith(_FILES) and save_weights_only and not is_weights:
            raise ValueError(
                "Weights go to a name ending in .weights.h5 or .safetensors, or to a directory, "
                f"not to {self.filepath}."
            )
        self.monitor = monitor
        self.verbose = verbose
        self.save_best_only = save_best_only
        self.save_weights_only = save_weights_only
        self.save_freq = save_freq
        self.best = initial_value_threshold
        self._watch = Monitor(monitor, mode=mode)
        self._times = SavingTimes(save_freq)
        self._epoch = 0
        self._checkpoints: Checkpoints | None = None

    @property
    def is_file(self) -> bool:
        """Whether the path is a file rather than a directory."""
        return self.filepath.endswith(_FILES)

    def set_model(self, model: Any) -> None:
        """Receives the model; a ValueError if it does not support the path's file extension."""
        super().set_model(model)
        is_file_name(Path(self.filepath), of_keras=is_keras(model.module))
        if self.save_best_only:
            self._watch.resolve(model)

    def on_train_begin(self, logs: Mapping[str, float] | None = None) -> None:
        """Raises an OSError on all processes if nothing can be written where the path leads to."""
        # All processes write a directory, and the master alone a file.
        saves = self.writes or (self.scope == "all_processes" and not self.is_file)
        error = problem_of_folder(self._folder()) if saves else None
        if self.scope == "all_processes":
            raise_on_all_processes(error)
        elif error is not None:
            raise error

    def _folder(self) -> Path:
        """Returns the directory that the path leads to, as far as it is known before training."""
        known, brace, _ = self.filepath.partition("{")
        if brace or self.is_file:
            return Path(f"{known}{brace}").parent
        return Path(known)

    def on_epoch_begin(self, epoch: int, logs: Mapping[str, float] | None = None) -> None:
        """Records the epoch."""
        self._epoch = epoch

    def on_train_batch_end(self, batch: int, logs: Mapping[str, float] | None = None) -> None:
        """Saves when enough batches have passed."""
        if self._times.is_due_after_batch(batch):
            self._save_if_wanted({"epoch": self._epoch + 1, "batch": batch + 1, **(logs or {})})

    def on_epoch_end(self, epoch: int, logs: Mapping[str, float] | None = None) -> None:
        """Saves after the epoch, unless `save_freq` counts batches."""
        if self.save_freq == "epoch":
            self._save_if_wanted({"epoch": epoch + 1, **(logs or {})})

    def on_train_end(self, logs: Mapping[str, float] | None = None) -> None:
        """Waits until everything is written."""
        self._finish()

    def _save_if_wanted(self, values: dict[str, Any]) -> None:
        try:
            path = self.filepath.format(**values)
        except KeyError as error:
            raise KeyError(
                f"The path {self.filepath!r} names {error}, but there are only {', '.join(values)}."
            ) from error
        if self._is_wanted(values, path):
            self._save(path)
            say(self, f"\nEpoch {values['epoch']}: saved model to {path}")

    def _is_wanted(self, values: dict[str, Any], path: str) -> bool:
        if not self.save_best_only:
            return True
        value = self._watch.value(values, who="ModelCheckpoint")
        if value is None:
            return True
        before = "None" if self.best is None else f"{self.best:.5f}"
        log = f"\nEpoch {values['epoch']}: {self.monitor}"
        if not self._watch.is_better(value, self.best):
            say(self, f"{log} did not improve from {before}")
            return False
        self.best = value
        say(self, f"{log} improved from {before} to {value:.5f}, saving to {path}")
        return True

    def _save(self, path: str) -> None:
        if self.is_file:
            (self.model.save_weights if self.save_weights_only else self.model.save)(path)
            return
        if self._checkpoints is None or self._checkpoints.directory != Path(path).absolute():
            self._finish()
            self._checkpoints = self._open(path)
        self.model._start_saving(self._checkpoints, with_model=not self.save_weights_only)

    def _open(self, path: str) -> Checkpoints:
        return Checkpoints(path, alone=self.scope != "all_processes")

    def _finish(self) -> None:
        if self._checkpoints is not None:
            self._checkpoints.close()
            self._checkpoints = None


class OrbaxCheckpoint(ModelCheckpoint):
    """Saves the model to a directory of numbered checkpoints, in Orbax's layout.

    The arguments are those of Keras's callback: of the newest checkpoints `max_to_keep` stay, all
    if it is None, and without `save_on_background` training waits until each is written; the
    others are those of `ModelCheckpoint`. `load_weights(directory)` and
    `tnt_jax.models.load_model(directory)` read the newest one, on any number of devices. All
    processes write a checkpoint together, under the number of the last step.

    Raises:
        ValueError: If an argument is out of range, or the directory has the name of a file.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        monitor: str = "val_loss",
        verbose: int = 0,
        save_best_only: bool = False,
        mode: Mode = "auto",
        save_freq: SaveFreq = "epoch",
        initial_value_threshold: float | None = None,
        max_to_keep: int | None = 1,
        save_on_background: bool = True,
        save_weights_only: bool = False,
    ) -> None:
        super().__init__(
            directory,
            monitor,
            verbose,
            save_best_only,
            save_weights_only,
            mode,
            save_freq,
            initial_value_threshold,
        )
        if self.is_file:
            raise ValueError(
                f"OrbaxCheckpoint saves to a directory, but {self.filepath} has the name of a file."
            )
        if max_to_keep is not None and max_to_keep < 1:
            raise ValueError(f"max_to_keep must be at least 1 or None, but is {max_to_keep}.")
        self.directory = self.filepath
        self.max_to_keep = max_to_keep
        self.save_on_background = save_on_background

    def wait_until_finished(self) -> None:
        """Waits until everything is written."""
        if self._checkpoints is not None:
            self._checkpoints.wait()

    def _open(self, path: str) -> Checkpoints:
        return Checkpoints(path, max_to_keep=self.max_to_keep, alone=self.scope != "all_processes")

    def _save(self, path: str) -> None:
        super()._save(path)
        if not self.save_on_background:
            self.wait_until_finished()
