"""Writes the logs of each epoch to a CSV file."""

import csv
import os
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

from tnt_jax.keras_compat.callbacks.base import Callback


class CSVLogger(Callback):
    """Writes the logs of each epoch to a CSV file, one row per epoch.

    For the same logs the file is byte for byte that of Keras's callback.

    The columns are those of the first epoch, sorted, and their `val_` forms; a missing value is
    `NA`. A run that resumes from a backup goes on with the file of the interrupted run, and has
    each epoch once.

    Args:
        filename: File to write.
        separator: Separator between values.
        append: Whether to append to an existing file.
    """

    def __init__(
        self, filename: str | os.PathLike[str], separator: str = ",", append: bool = False
    ) -> None:
        super().__init__()
        self.filename = os.fspath(filename)
        self.separator = separator
        self.append = append
        self._file: IO[str] | None = None
        self._writer: Any = None
        self._written: set[str] = set()
        self._replaced = b""

    def state(self) -> dict[str, Any]:
        """Returns the file, and how far it is written."""
        return (
            {}
            if self._file is None
            else {"filename": os.path.abspath(self.filename), "size": self._file.tell()}
        )

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Goes on with the rows that the interrupted run had written.

        With `append`, rows that it wrote after the backup stay, and are not repeated.
        """
        if self._file is None or state["filename"] != os.path.abspath(self.filename):
            return
        if not self.append:
            self._file.write(self._replaced[: state["size"]].decode())
            self._file.flush()
            return
        with open(self.filename) as file:
            file.seek(state["size"])
            self._written = {row[0] for row in csv.reader(file, delimiter=self.separator) if row}

    def on_train_begin(self, logs: Mapping[str, float] | None = None) -> None:
        """Opens the file."""
        if self.writes:
            # A resumed run needs it, which is known only when all callbacks have begun.
            is_replaced = not self.append and os.path.exists(self.filename)
            self._replaced = Path(self.filename).read_bytes() if is_replaced else b""
            # The csv module ends lines by itself; Keras leaves that to the text file as well.
            self._file = open(self.filename, "a" if self.append else "w")  # noqa: SIM115
            self._writer = None
            self._written = set()

    def on_epoch_end(self, epoch: int, logs: Mapping[str, float] | None = None) -> None:
        """Writes a row."""
        if self._file is None or str(epoch) in self._written:
            return
        logs = logs or {}
        if self._writer is None:
            self._writer = csv.DictWriter(
                self._file, ["epoch", *_columns(logs)], delimiter=self.separator
            )
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
    return (
        names
        if any(name.startswith("val_") for name in names)
        else [*names, *(f"val_{name}" for name in names)]
    )
