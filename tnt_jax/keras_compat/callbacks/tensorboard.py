"""Scalars, histograms and profiles for TensorBoard."""

import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import jax

from tnt_jax.keras_compat.callbacks.base import Callback
from tnt_jax.runtime import get_rank


class TensorBoard(Callback):
    """Writes logs for TensorBoard, with Keras's tags and folders, through tensorboardX.

    Folders are `train` and `validation` below `log_dir`, in `OnAllRanks` with a sub-folder `rank_N` each. Tags are `epoch_loss` (at
    the number of the epoch, `epoch_learning_rate` among them), `batch_loss` (at the number of the step, from 1),
    `evaluation_loss_vs_iterations` and `<path of a weight>/histogram`. Steps are counted by the optimizer, so that a run that goes
    on continues its curves.

    Args:
        log_dir: Folder of the run.
        histogram_freq: Epochs between two histograms of the weights; 0 for none.
        write_steps_per_second: Whether to write `epoch_steps_per_second` (training and validation).
        update_freq: `"epoch"`, or steps between two writes of logs of a step, which then wait for the devices; `"batch"` is 1.
        profile_batch: Step, or first and last step, that the JAX profiler records, numbered from 1 in this run; 0 for none.

    Raises:
        ModuleNotFoundError: If tensorboardX is not installed.
        ValueError: If `update_freq` or `profile_batch` is out of range.
    """

    def __init__(
        self,
        log_dir: str | os.PathLike[str] = "logs",
        histogram_freq: int = 0,
        *,
        write_steps_per_second: bool = False,
        update_freq: int | Literal["epoch", "batch"] = "epoch",
        profile_batch: int | tuple[int, int] = 0,
    ) -> None:
        super().__init__()
        self.log_dir, self.histogram_freq = Path(log_dir), histogram_freq
        self.write_steps_per_second = write_steps_per_second
        self.update_freq = 1 if update_freq == "batch" else update_freq
        if self.update_freq != "epoch" and (not isinstance(self.update_freq, int) or self.update_freq < 1):
            raise ValueError(f"update_freq must be 'epoch', 'batch' or a number of steps from 1, but is {update_freq!r}.")
        first, last = profile_batch if isinstance(profile_batch, (tuple, list)) else (profile_batch, profile_batch)
        if first < 0 or last < first:
            raise ValueError(f"profile_batch must be a step from 1, or a pair of first and last step, but is {profile_batch!r}.")
        self._profiled = (first, last)
        _summary_writer()
        self._writers: dict[str, Any] = {}
        self._steps_before = self._run_steps = self._steps_at_epoch = 0
        self._epoch_start = 0.0
        self._is_profiling = self._is_training = False

    def on_train_begin(self, logs: Mapping[str, float] | None = None) -> None:
        """Notes the steps of earlier runs."""
        self._steps_before, self._run_steps, self._is_training = self.model.optimizer.iterations, 0, True

    def on_train_batch_begin(self, batch: int, logs: Mapping[str, float] | None = None) -> None:
        """Starts the profiler when its step comes."""
        first, last = self._profiled
        if first and first <= self._run_steps + 1 <= last and not self._is_profiling and self.writes:
            jax.profiler.start_trace(str(self._folder("train")))
            self._is_profiling = True

    def on_train_batch_end(self, batch: int, logs: Mapping[str, float] | None = None) -> None:
        """Writes the logs of the step when its turn comes, and stops the profiler after its last step."""
        before = self._run_steps
        self._run_steps = self._steps_at_epoch + batch + 1
        if self._is_profiling and self._run_steps >= self._profiled[1]:
            self._stop_profiler(logs)
        if not isinstance(self.update_freq, int) or not self.writes:
            return
        if self._run_steps // self.update_freq > before // self.update_freq:
            step = self._steps_before + self._run_steps
            for name, value in (logs or {}).items():
                self._write("train", f"batch_{name}", value, step)

    def on_test_end(self, logs: Mapping[str, float] | None = None) -> None:
        """Writes the results of an evaluation against the steps of training."""
        for name, value in (logs or {}).items():
            self._write("validation", f"evaluation_{name}_vs_iterations", value, self.model.optimizer.iterations)
        if not self._is_training:
            self._close()

    def on_epoch_begin(self, epoch: int, logs: Mapping[str, float] | None = None) -> None:
        """Starts the clock."""
        self._epoch_start, self._steps_at_epoch = time.perf_counter(), self._run_steps

    def on_epoch_end(self, epoch: int, logs: Mapping[str, float] | None = None) -> None:
        """Writes the logs, the learning rate and the histograms of an epoch."""
        if not self.writes:
            return
        values = dict(logs or {})
        if hasattr(self.model.optimizer, "learning_rate"):
            values["learning_rate"] = self.model.optimizer.learning_rate
        if self.write_steps_per_second:
            seconds = time.perf_counter() - self._epoch_start
            values["steps_per_second"] = (self._run_steps - self._steps_at_epoch) / seconds
        for name, value in values.items():
            where = "validation" if name.startswith("val_") else "train"
            self._write(where, f"epoch_{name.removeprefix('val_')}", value, epoch)
        if self.histogram_freq and epoch % self.histogram_freq == 0:
            for path, weight in self.model.weights_by_path().items():
                self._writer("train").add_histogram(f"{path}/histogram", weight, epoch)
        for writer in self._writers.values():
            writer.flush()

    def on_train_end(self, logs: Mapping[str, float] | None = None) -> None:
        """Closes the files."""
        if self._is_profiling:
            self._stop_profiler(None)
        self._is_training = False
        self._close()

    def _stop_profiler(self, logs: Mapping[str, float] | None) -> None:
        # The steps run behind the host: reading waits until they are in the profile.
        dict(logs or {})
        jax.profiler.stop_trace()
        self._is_profiling = False

    def _write(self, where: str, tag: str, value: float, step: int) -> None:
        if self.writes:
            self._writer(where).add_scalar(tag, value, step)

    def _writer(self, where: str) -> Any:
        if where not in self._writers:
            self._writers[where] = _summary_writer()(str(self._folder(where)))
        return self._writers[where]

    def _folder(self, where: str) -> Path:
        folder = self.log_dir / where
        return folder / f"rank_{get_rank()}" if self.company == "each" else folder

    def _close(self) -> None:
        for writer in self._writers.values():
            writer.close()
        self._writers = {}


def _summary_writer() -> Any:
    try:
        from tensorboardX import SummaryWriter
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError("The TensorBoard callback needs tensorboardX: pip install tensorboardX.") from error
    return SummaryWriter
