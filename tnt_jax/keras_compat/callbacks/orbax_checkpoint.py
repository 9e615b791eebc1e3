"""Saves numbered checkpoints in one directory during training."""

import os

from tnt_jax.keras_compat.callbacks.model_checkpoint import ModelCheckpoint
from tnt_jax.keras_compat.callbacks.monitor import Mode
from tnt_jax.keras_compat.callbacks.saving_times import SaveFreq
from tnt_jax.train.checkpoint import Checkpoints


class OrbaxCheckpoint(ModelCheckpoint):
    """Saves the model to a directory of numbered checkpoints, in Orbax's layout.

    The arguments are those of Keras's callback.

    `load_weights(directory)` and `tnt_jax.models.load_model(directory)` read the newest one, on any
    number of devices. A checkpoint has the number of the last step. All processes write it
    together.

    Args:
        directory: Where to save.
        monitor: As in `ModelCheckpoint`.
        verbose: As in `ModelCheckpoint`.
        save_best_only: As in `ModelCheckpoint`.
        mode: As in `ModelCheckpoint`.
        save_freq: As in `ModelCheckpoint`.
        initial_value_threshold: As in `ModelCheckpoint`.
        max_to_keep: Number of newest checkpoints to keep; all if None.
        save_on_background: False to wait until each checkpoint is written.
        save_weights_only: As in `ModelCheckpoint`.

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
