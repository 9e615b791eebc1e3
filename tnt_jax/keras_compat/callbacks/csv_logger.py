"""The logs of every epoch in a table."""

import csv
import os
from collections.abc import Mapping
from typing import IO, Any

from tnt_jax.keras_compat.callbacks.base import Callback


class CSVLogger(Callback):
    """Writes the logs of every epoch to a CSV file, one row each, byte for byte as Keras's callback does for the same logs.

    The columns are those of the first epoch, sorted, and their `val_` forms; a value that an epoch lacks is `NA`.

    Args:
        filename: Where to write.
        separator: What stands between values.
        append: Whether to go on with an existing file.
    """

    def __init__(self, filename: str | os.PathLike[str], separator: str = ",", append: bool = False) -> None:
        super().__init__()
        self.filename, self.separator, self.append = os.fspath(filename), separator, append
        self._file: IO[str] | None = None
        self._writer: Any = None

    def on_train_begin(self, logs: Mapping[str, float] | None = None) -> None:
        """Opens the file."""
        if self.writes:
            # The csv module ends lines by itself; Keras leaves that to the text file as well.
            self._file = open(self.filename, "a" if self.append else "w")  # noqa: SIM115
            self._writer = None

    def on_epoch_end(self, epoch: int, logs: Mapping[str, float] | None = None) -> None:
        """Writes a row."""
        if self._file is None:
            return
        logs = logs or {}
        if self._writer is None:
            self._writer = csv.DictWriter(self._file, ["epoch", *_columns(logs)], delimiter=self.separator)
            if self._file.tell() == 0:
                self._writer.writeheader()
        values = {name: logs.get(name, "NA") for name in self._writer.fieldnames if name != "epoch"}
        self._writer.writerow({"epoch": epoch, **values})
        self._file.flush()

    def on_train_end(self, logs: Mapping[str, float] | None = None) -> None:
        """Closes the file."""
        if self._file is not None:
            self._file.close()
            self._file = self._writer = None


def _columns(logs: Mapping[str, float]) -> list[str]:
    names = sorted(logs)
    # The first epoch may come without validation.
    return names if any(name.startswith("val_") for name in names) else [*names, *(f"val_{name}" for name in names)]
