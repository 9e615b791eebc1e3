"""Callbacks that record a run: history, curves, CSV, reports to a server, the user's functions."""

import csv
import http.client
import json
import math
import os
import urllib.parse
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np

from tnt_jax.keras_compat.callbacks.base import Callback, import_for
from tnt_jax.log import logger


class LambdaCallback(Callback):
    """Calls functions as hooks on every process: `on_epoch_end=lambda epoch, logs: ...`.

    Raises:
        TypeError: If a hook is unknown; the message lists the hooks.
    """

    def __init__(
        self,
        on_epoch_begin: Callable[..., Any] | None = None,
        on_epoch_end: Callable[..., Any] | None = None,
        on_train_begin: Callable[..., Any] | None = None,
        on_train_end: Callable[..., Any] | None = None,
        on_train_batch_begin: Callable[..., Any] | None = None,
        on_train_batch_end: Callable[..., Any] | None = None,
        **hooks: Callable[..., Any] | None,
    ) -> None:
        super().__init__()
        hooks |= {
            "on_epoch_begin": on_epoch_begin,
            "on_epoch_end": on_epoch_end,
            "on_train_begin": on_train_begin,
            "on_train_end": on_train_end,
            "on_train_batch_begin": on_train_batch_begin,
            "on_train_batch_end": on_train_batch_end,
        }
        known = sorted(name for name in dir(Callback) if name.startswith("on_"))
        unknown = sorted(name for name in hooks if name.startswith("on_") and name not in known)
        if unknown:
            raise TypeError(
                f"LambdaCallback has no hook {', '.join(unknown)}. The hooks are: "
                f"{', '.join(known)}."
            )
        for name, function in hooks.items():
            if function is not None:
                setattr(self, name, function)


_TIMEOUT_S = 10.0


class RemoteMonitor(Callback):
    """Posts the logs of each epoch to a server, from the master.

    If the server does not answer, or answers with an error, training continues with a warning.

    Args:
        root: Address of the server.
        path: Path under the address to which to post.
        field: Form field that holds the logs as JSON.
        headers: Further HTTP headers.
        send_as_json: Whether to post the logs as JSON instead of in a form.

    Raises:
        ValueError: If the address does not begin with http:// or https://.
    """

    def __init__(
        self,
        root: str = "http://localhost:9000",
        path: str = "/publish/epoch/end/",
        field: str = "data",
        headers: Mapping[str, str] | None = None,
        send_as_json: bool = False,
    ) -> None:
        super().__init__()
        if not root.lower().startswith(("http://", "https://")):
            # Raised here, on all processes: posting fails on the master alone.
            raise ValueError(
                f"root must be an address that begins with http:// or https://, but is {root!r}."
            )
        self.root = root
        self.path = path
        self.field = field
        self.headers = dict(headers or {})
        self.send_as_json = send_as_json

    def on_epoch_end(self, epoch: int, logs: Mapping[str, float] | None = None) -> None:
        """Posts the logs and the number of the epoch."""
        if not self.writes:
            return
        # A metric of several thresholds or classes has a vector of results.
        values = {name: np.asarray(value).tolist() for name, value in (logs or {}).items()}
        text = json.dumps({"epoch": epoch, **values})
        body = text if self.send_as_json else urllib.parse.urlencode({self.field: text})
        kind = "application/json" if self.send_as_json else "application/x-www-form-urlencoded"
        url, headers = self.root + self.path, {"Content-Type": kind, **self.headers}
        request = urllib.request.Request(url, body.encode(), headers)
        try:
            urllib.request.urlopen(request, timeout=_TIMEOUT_S).close()
        except (OSError, http.client.HTTPException) as error:
            logger.warning("RemoteMonitor could not post to %s: %s.", url, error)


class CSVLogger(Callback):
    """Writes the logs of each epoch to a CSV file, one row per epoch.

    For the same logs the file is byte for byte that of Keras's callback. The columns are those of
    the first epoch, sorted, and their `val_` forms, or those that the file has; a missing value is
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
        # Bytes of an earlier run's file that this one goes on with; None for all of them.
        self._kept: int | None = None

    def state(self) -> dict[str, Any]:
        """Returns the file, and how far it is written."""
        if self._file is None:
            return {}
        return {"filename": os.path.abspath(self.filename), "size": self._file.tell()}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Goes on with the rows that the interrupted run had written.

        With `append`, rows that it wrote after the backup stay, and are not repeated.
        """
        if self._file is None or state["filename"] != os.path.abspath(self.filename):
            return
        if not self.append:
            self._kept = state["size"]
            return
        with open(self.filename) as file:
            file.seek(state["size"])
            self._written = {row[0] for row in csv.reader(file, delimiter=self.separator) if row}

    def on_train_begin(self, logs: Mapping[str, float] | None = None) -> None:
        """Opens the file."""
        if self.writes:
            # A resumed run needs what is there, which a start that fails leaves as it is.
            self._kept = None if self.append else 0
            # The csv module ends lines by itself; Keras leaves that to the text file as well.
            self._file = open(self.filename, "a+")  # noqa: SIM115
            self._writer = None
            self._written = set()

    def on_generation(self) -> None:
        """Goes on with the file of a master that is lost, which may have written the last row."""
        if self.writes and self._file is None:
            self._file = open(self.filename, "a+")  # noqa: SIM115
            self._file.seek(0)
            rows = list(csv.reader(self._file, delimiter=self.separator))
            self._written = {row[0] for row in rows[-1:] if row}

    def on_epoch_begin(self, epoch: int, logs: Mapping[str, float] | None = None) -> None:
        """Drops what an earlier run has written, except what this one goes on with."""
        self._drop_earlier()

    def on_epoch_end(self, epoch: int, logs: Mapping[str, float] | None = None) -> None:
        """Writes a row."""
        self._drop_earlier()  # A loop of one's own may leave out the beginning.
        if self._file is None or str(epoch) in self._written:
            return
        logs = logs or {}
        if self._writer is None:
            self._file.seek(0)
            header = next(csv.reader([self._file.readline()], delimiter=self.separator), [])
            self._file.seek(0, os.SEEK_END)
            columns = header if header[:1] == ["epoch"] else ["epoch", *_columns(logs)]
            self._writer = csv.DictWriter(self._file, columns, delimiter=self.separator)
            if self._file.tell() == 0:
                self._writer.writeheader()
        names = [name for name in self._writer.fieldnames if name != "epoch"]
        values = {name: _cell(logs.get(name, "NA")) for name in names}
        self._writer.writerow({"epoch": epoch, **values})
        self._file.flush()

    def _drop_earlier(self) -> None:
        if self._file is not None and self._kept is not None:
            self._file.truncate(min(self._kept, self._file.seek(0, os.SEEK_END)))
            self._file.seek(0, os.SEEK_END)
            self._kept = None

    def on_train_end(self, logs: Mapping[str, float] | None = None) -> None:
        """Closes the file."""
        if self._file is not None:
            self._file.close()
            self._file = self._writer = None


def _cell(value: Any) -> Any:
    # As Keras writes the results of a metric of several thresholds or classes.
    return f'"[{", ".join(map(str, value))}]"' if np.ndim(value) else value


def _columns(logs: Mapping[str, float]) -> list[str]:
    names = sorted(logs)
    # The first epoch may come without validation.
    if any(name.startswith("val_") for name in names):
        return names
    return [*names, *(f"val_{name}" for name in names)]


# Size of one plot, in inches.
_WIDTH, _HEIGHT = 5.0, 3.4
_COLUMNS = 3


def draw_curves(
    path: str | os.PathLike[str],
    history: Mapping[str, Sequence[float]],
    epochs: Sequence[int] | None = None,
) -> None:
    """Draws one plot for each log, with its `val_` curve."""
    if not history:
        raise ValueError("There are no logs to draw.")
    figures = import_for("Drawing curves", "matplotlib.figure", "matplotlib")
    # Those with `val_` share the plot of the log without.
    beside = {f"val_{name}" for name in history}
    names = [name for name in history if name not in beside]
    columns = min(len(names), _COLUMNS)
    rows = math.ceil(len(names) / columns)
    # A separate figure, without pyplot: nothing stays open and no screen is needed.
    figure = figures.Figure(figsize=(_WIDTH * columns, _HEIGHT * rows), layout="constrained")
    for index, name in enumerate(names):
        axes = figure.add_subplot(rows, columns, index + 1)
        for log in (name, f"val_{name}"):
            if history.get(log):
                places = _places(len(history[log]), epochs, len(history[name]))
                axes.plot(places, history[log], label=log, marker=".")
        axes.set_xlabel("epoch")
        axes.set_title(name)
        axes.grid(alpha=0.3)
        axes.legend()
    figure.savefig(path)


def _places(count: int, epochs: Sequence[int] | None, num_epochs: int) -> list[float]:
    """Returns the places of a log's values: epochs, or evenly spaced if some have none."""
    numbers = [float(epoch + 1) for epoch in (epochs or range(num_epochs))]
    if count == len(numbers):
        return numbers
    first = numbers[0] - 1
    return [first + (numbers[-1] - first) * (index + 1) / count for index in range(count)]


class PlotHistory(Callback):
    """Draws the curves of all logs after every epoch, on the master.

    Args:
        filepath: File to write; its extension determines the format, for instance `.png`.
    """

    _state_names = ("_epochs", "_history")

    def __init__(self, filepath: str | os.PathLike[str]) -> None:
        super().__init__()
        self.filepath = Path(filepath)
        self._epochs: list[int] = []
        self._history: dict[str, list[float]] = {}

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


class History(Callback):
    """Records the logs of each epoch; `fit` returns one, the same on every process.

    Attributes:
        history: The values of each log by epoch.
        epoch: Numbers of the epochs, from 0.
    """

    _state_names = ("epoch", "history")

    def __init__(self) -> None:
        super().__init__()
        self.history: dict[str, list[float]] = {}
        self.epoch: list[int] = []

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
