"""Times steps and epochs."""

import os
import time
from collections.abc import Mapping
from typing import Any

from tnt_jax.keras_compat.callbacks.base import Callback


class RuntimeProfiler(Callback):
    """Times steps and epochs, on the master.

    Every `logging_freq` batches it waits for the step and records the logs with `epoch`,
    `iteration` (from 1) and `iter_runtime_s`, the mean time of the steps since the last record.
    Every `print_freq` batches it writes the last record as a line `Iteration {...}`, and at the end
    of an epoch a line `Epoch {...}` with `epoch`, `size` (examples), `niterations` and
    `epoch_runtime_s`, from the start of the epoch to the end of its last training step, without
    validation.

    Args:
        batch_size: Rows of the global batch, for `size`; if None, rows are counted.
        log_file_path: File to which the lines are appended; standard output by default.
        logging_freq: Number of batches between two records.
        print_freq: Number of batches between two lines.

    Attributes:
        records: Records of steps so far.
        epochs: Records of epochs so far.

    Raises:
        ValueError: If a frequency is below 1.
    """

    def __init__(
        self,
        batch_size: int | None = None,
        log_file_path: str | os.PathLike[str] | None = None,
        logging_freq: int = 10,
        print_freq: int = 30,
    ) -> None:
        super().__init__()
        if min(logging_freq, print_freq) < 1:
            raise ValueError(
                f"logging_freq ({logging_freq}) and print_freq ({print_freq}) must be at least 1."
            )
        self.batch_size = batch_size
        self.log_file_path = log_file_path
        self.logging_freq = logging_freq
        self.print_freq = print_freq
        self.records: list[dict[str, Any]] = []
        self.epochs: list[dict[str, Any]] = []
        self._epoch = self._iteration = self._rows = self._recorded_at = 0
        self._epoch_start = self._last_record = self._train_end = 0.0

    def on_epoch_begin(self, epoch: int, logs: Mapping[str, float] | None = None) -> None:
        """Starts the clock of an epoch."""
        self._epoch = epoch
        self._iteration = self._rows = self._recorded_at = 0
        self._epoch_start = self._last_record = time.perf_counter()
        self._train_end = 0.0

    def on_train_batch_end(self, batch: int, logs: Mapping[str, float] | None = None) -> None:
        """Records and writes a step when it is due."""
        # Batch numbers jump if several steps run in one program, at last beyond the epoch.
        before = self._iteration
        self._iteration = min(batch + 1, self.params["steps"] or batch + 1)
        self._rows += self.model.rows_in_batch
        if _passes(before, self._iteration, self.logging_freq):
            # Reading the logs waits for the step, so the time is that of the devices.
            values = dict(logs or {})
            now = time.perf_counter()
            mean_s = (now - self._last_record) / (self._iteration - self._recorded_at)
            self.records.append(
                {
                    **values,
                    "epoch": self._epoch,
                    "iteration": self._iteration,
                    "iter_runtime_s": mean_s,
                }
            )
            self._last_record = now
            self._recorded_at = self._iteration
        if _passes(before, self._iteration, self.print_freq) and self.records:
            self._write(f"Iteration {self.records[-1]}")

    def on_test_begin(self, logs: Mapping[str, float] | None = None) -> None:
        """Marks the end of the training steps, whose logs have been read."""
        self._train_end = self._train_end or time.perf_counter()

    def on_epoch_end(self, epoch: int, logs: Mapping[str, float] | None = None) -> None:
        """Records and writes the epoch."""
        runtime_s = (self._train_end or time.perf_counter()) - self._epoch_start
        size = self._rows if self.batch_size is None else self.batch_size * self._iteration
        record = {
            "epoch": epoch,
            "size": size,
            "niterations": self._iteration,
            "epoch_runtime_s": runtime_s,
        }
        self.epochs.append({**(logs or {}), **record})
        self._write(f"Epoch {self.epochs[-1]}")

    def _write(self, line: str) -> None:
        if not self.writes:
            return
        if self.log_file_path is None:
            print(line, flush=True)
        else:
            with open(self.log_file_path, "a") as file:
                file.write(line + "\n")


def _passes(before: int, after: int, frequency: int) -> bool:
    """Returns whether there is a multiple of `frequency` after `before`, up to `after`."""
    return after // frequency > before // frequency
