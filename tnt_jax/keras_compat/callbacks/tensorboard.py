"""Scalars, histograms and profiles for TensorBoard."""

import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np

from tnt_jax.distributed.joining.runtime import get_rank
from tnt_jax.keras_compat.callbacks.base import Callback, StepCount, import_for
from tnt_jax.keras_compat.keras_objects import is_keras
from tnt_jax.log import logger


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
            place = {"epoch": self._epoch, "iteration": self._iteration}
            self.records.append({**values, **place, "iter_runtime_s": mean_s})
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
        record = {"epoch": epoch, "size": size, "niterations": self._iteration}
        self.epochs.append({**(logs or {}), **record, "epoch_runtime_s": runtime_s})
        self._write(f"Epoch {self.epochs[-1]}")

    def _write(self, line: str) -> None:
        if not self.writes:
            return
        if self.log_file_path is None:
            print(line, flush=True)
        else:
            with open(self.log_file_path, "a") as file:
                file.write(line + "\n")


# Buckets reach to nearly 1e20.
_LARGEST = 9e19


def _passes(before: int, after: int, frequency: int) -> bool:
    """Returns whether there is a multiple of `frequency` after `before`, up to `after`."""
    return after // frequency > before // frequency


# Last parts of the paths of embedding tables [entries, features]: Flax's and Keras's.
_TABLES = ("embedding", "embeddings")


def as_numbers(logs: Mapping[str, Any] | None) -> dict[str, float]:
    """Returns logs as numbers, of a metric of several classes each under a name of its own."""
    found = {}
    for name, value in (logs or {}).items():
        entries = np.ravel(np.asarray(value))
        names = [name] if entries.size == 1 else [f"{name}_{n}" for n in range(entries.size)]
        found |= dict(zip(names, map(float, entries), strict=True))
    return found


def finite_values(path: str, weight: np.ndarray) -> np.ndarray:
    """Returns the finite values of a weight in one dimension; warns if there are others.

    Those that are larger than tensorboardX's largest bucket have its size: it would lose them.
    """
    values = np.asarray(weight, np.float32).ravel()
    is_finite = np.isfinite(values)
    if not is_finite.all():
        logger.warning(
            "%s: %d of %d values are NaN or infinite. TensorBoard shows the others.",
            path,
            np.sum(~is_finite),
            values.size,
        )
    return values[is_finite].clip(-_LARGEST, _LARGEST)


def as_images(weight: np.ndarray) -> np.ndarray | None:
    """Returns a weight as grey or colour images `[images, height, width, channels]` of bytes.

    The shapes are those of Keras. A vector becomes a column, and a matrix lies on its long side;
    each channel of a kernel `[height, width, channels]` is an image. Values are scaled from their
    minimum to their maximum; NaN becomes the minimum. The result is None for other shapes.
    """
    image = np.squeeze(weight)
    if image.ndim == 1:
        image = image[None, :, None, None]
    elif image.ndim == 2:
        image = (image.T if image.shape[0] > image.shape[1] else image)[None, :, :, None]
    elif image.ndim == 3:
        image = image.transpose(2, 0, 1)[..., None]
    if image.ndim != 4 or image.shape[-1] not in (1, 3, 4):
        return None
    image = np.asarray(image, np.float32)
    finite = image[np.isfinite(image)]
    low, high = (float(finite.min()), float(finite.max())) if finite.size else (0.0, 0.0)
    image = np.nan_to_num(image, nan=low, posinf=high, neginf=low)
    return ((image - low) / ((high - low) or 1) * 255).astype(np.uint8)


def write_embeddings(
    log_dir: str | os.PathLike[str],
    weights: Mapping[str, np.ndarray],
    metadata: str | Mapping[str, str] | None,
    epoch: int,
) -> None:
    """Writes the embedding tables among weights for TensorBoard's projector, by layer path."""
    tables = {
        path.rpartition("/")[0] or path: np.asarray(weight, np.float32)
        for path, weight in weights.items()
        if path.split("/")[-1] in _TABLES and weight.ndim == 2
    }
    by_layer = metadata if isinstance(metadata, Mapping) else dict.fromkeys(tables, metadata)
    names = {name for layer in tables for name in (layer, layer.rpartition("/")[2])}
    if unknown := sorted(set(by_layer) - names):
        raise ValueError(
            f"embeddings_metadata names {', '.join(unknown)}, but the layers with embeddings are: "
            f"{', '.join(tables) or 'none'}."
        )
    entries = []
    for layer, table in tables.items():
        file = Path("train") / f"{layer.replace('/', '.')}.embeddings-{epoch}.tsv"
        (Path(log_dir) / file).parent.mkdir(parents=True, exist_ok=True)
        np.savetxt(Path(log_dir) / file, table, delimiter="\t", fmt="%.6g")
        labels = by_layer.get(layer, by_layer.get(layer.rpartition("/")[2]))
        lines = [f'tensor_name: "{layer}"', f'tensor_path: "{file}"']
        if labels:
            lines.append(f'metadata_path: "{labels}"')
        entries.append("embeddings {\n" + "".join(f"  {line}\n" for line in lines) + "}\n")
    if entries:
        (Path(log_dir) / "projector_config.pbtxt").write_text("".join(entries))


def write_keras_graph(writer: Any, module: Any) -> None:
    """Writes the layers of a functional or Sequential Keras model for TensorBoard's graph."""
    if not (is_keras(module) and type(module).__name__ in ("Functional", "Sequential")):
        return
    from tensorboardX.proto.summary_pb2 import Summary, SummaryMetadata  # pyright: ignore
    from tensorboardX.proto.tensor_pb2 import TensorProto  # pyright: ignore

    try:
        text = module.to_json()
    # A custom layer may not be describable; as in Keras, only the graph is lost.
    except Exception as error:
        logger.warning(
            "TensorBoard shows no graph of %r, which cannot be written as JSON: %s",
            module.name,
            error,
        )
        return
    plugin = SummaryMetadata.PluginData(plugin_name="graph_keras_model", content=b"1")
    value = Summary.Value(
        tag="keras",
        metadata=SummaryMetadata(plugin_data=plugin),
        tensor=TensorProto(dtype="DT_STRING", string_val=[text.encode()]),
    )
    writer.file_writer.add_summary(Summary(value=[value]), 0)


class TensorBoard(Callback):
    """Writes logs for TensorBoard, with Keras's tags and folders, through tensorboardX.

    The folders are `train` and `validation` below `log_dir`; in `OnAllRanks` each has a subfolder
    `rank_N`. The tags are `epoch_loss` and the like, including `epoch_learning_rate` (by epoch
    number), `batch_loss` (by step number, from 1), `evaluation_loss_vs_iterations` and `<path of a
    weight>/histogram`. The model counts the steps, so a resumed run continues its curves.

    Args:
        log_dir: Folder of the run.
        histogram_freq: Number of epochs between two histograms of the weights; 0 for none.
        write_graph: Whether to write the layers of a functional or Sequential Keras model; other
            models have no layer graph.
        write_images: Whether to write weights as images, too, together with histograms.
        write_steps_per_second: Whether to write `epoch_steps_per_second` (training and validation)
            and, with step logs, `batch_steps_per_second`, the mean since the last write.
        update_freq: `"epoch"`, or the number of steps between two writes of step logs, which wait
            for the devices; `"batch"` is 1.
        profile_batch: Step, or first and last step, that the JAX profiler records, counted from 1
            in this run; 0 for none.
        embeddings_freq: Number of epochs between two writes of embedding tables for the projector;
            0 for none. The tables are the two-dimensional arrays named `embedding` or `embeddings`.
        embeddings_metadata: File below `log_dir` with one label per line: one file for all tables,
            or a dict by the path of the layer.

    Raises:
        ModuleNotFoundError: If tensorboardX is not installed.
        ValueError: If `update_freq` or `profile_batch` is out of range, or `embeddings_metadata`
            names an unknown layer.
    """

    def __init__(
        self,
        log_dir: str | os.PathLike[str] = "logs",
        histogram_freq: int = 0,
        write_graph: bool = True,
        write_images: bool = False,
        write_steps_per_second: bool = False,
        update_freq: int | Literal["epoch", "batch"] = "epoch",
        profile_batch: int | tuple[int, int] | str = 0,
        embeddings_freq: int = 0,
        embeddings_metadata: str | Mapping[str, str] | None = None,
    ) -> None:
        super().__init__()
        self.log_dir = os.fspath(log_dir)
        self.histogram_freq = histogram_freq
        self.write_graph = write_graph
        self.write_images = write_images
        self.embeddings_freq = embeddings_freq
        self.embeddings_metadata = embeddings_metadata
        self.write_steps_per_second = write_steps_per_second
        self.update_freq = freq = 1 if update_freq == "batch" else update_freq
        if freq != "epoch" and (not isinstance(freq, int) or freq < 1):
            raise ValueError(
                "update_freq must be 'epoch', 'batch' or a number of steps from 1, but is "
                f"{update_freq!r}."
            )
        self._profiled = _profiled_steps(profile_batch)
        _tensorboard()
        self._writers: dict[str, Any] = {}
        self._steps = StepCount()
        self._steps_at_epoch = 0
        self._epoch_start = 0.0
        self._last_write = (0.0, 0)
        self._is_profiling = self._is_training = False

    def on_train_begin(self, logs: Mapping[str, float] | None = None) -> None:
        """Forgets the steps of earlier runs."""
        self._steps = StepCount()
        self._is_training = True
        if self.write_graph and self.writes:
            write_keras_graph(self._writer("train"), self.model.module)

    def on_train_batch_begin(self, batch: int, logs: Mapping[str, float] | None = None) -> None:
        """Starts the profiler at its first step."""
        self._steps.begin(batch, self.model)
        first, last = self._profiled
        is_chosen = bool(first) and first <= self._steps.of_run + 1 <= last
        if is_chosen and self.writes and not self._is_profiling:
            jax.profiler.start_trace(str(self._folder("train")))
            self._is_profiling = True

    def on_train_batch_end(self, batch: int, logs: Mapping[str, float] | None = None) -> None:
        """Writes the logs of the step when due, and stops the profiler after its last step."""
        before = self._steps.of_run
        self._steps.end(batch, self.model, self.params["steps"])
        if self._is_profiling and self._steps.of_run >= self._profiled[1]:
            self._stop_profiler(logs)
        if not isinstance(self.update_freq, int) or not self.writes:
            return
        if self._steps.of_run // self.update_freq > before // self.update_freq:
            step = self._steps.done
            for name, value in (logs or {}).items():
                self._write("train", f"batch_{name}", value, step)
            if self.write_steps_per_second:
                # Reading the logs has waited for the step.
                now = time.perf_counter()
                moment, first = self._last_write
                steps_per_second = (self._steps.of_run - first) / (now - moment)
                self._write("train", "batch_steps_per_second", steps_per_second, step)
                self._last_write = (now, self._steps.of_run)

    def on_test_end(self, logs: Mapping[str, float] | None = None) -> None:
        """Writes the results of an evaluation against the steps of training."""
        step = self.model.optimizer.iterations
        for name, value in (logs or {}).items():
            self._write("validation", f"evaluation_{name}_vs_iterations", value, step)
        if not self._is_training:
            self._close()

    def on_epoch_begin(self, epoch: int, logs: Mapping[str, float] | None = None) -> None:
        """Starts the clock."""
        self._steps.begin_epoch()
        self._epoch_start = time.perf_counter()
        self._steps_at_epoch = self._steps.of_run
        self._last_write = (self._epoch_start, self._steps.of_run)

    def on_epoch_end(self, epoch: int, logs: Mapping[str, float] | None = None) -> None:
        """Writes the logs, the learning rate and the histograms of an epoch."""
        if not self.writes:
            return
        values = dict(logs or {})
        if hasattr(self.model.optimizer, "learning_rate"):
            values["learning_rate"] = self.model.optimizer.learning_rate
        if self.write_steps_per_second:
            seconds = time.perf_counter() - self._epoch_start
            values["steps_per_second"] = (self._steps.of_run - self._steps_at_epoch) / seconds
        for name, value in values.items():
            where = "validation" if name.startswith("val_") else "train"
            self._write(where, f"epoch_{name.removeprefix('val_')}", value, epoch)
        if self.histogram_freq and epoch % self.histogram_freq == 0:
            writer = self._writer("train")
            for path, weight in self.model.weights_by_path().items():
                if (finite := finite_values(path, weight)).size:
                    writer.add_histogram(f"{path}/histogram", finite, epoch)
                if self.write_images and (images := as_images(weight)) is not None:
                    writer.add_images(f"{path}/image", images, epoch, dataformats="NHWC")
        if self.embeddings_freq and epoch % self.embeddings_freq == 0:
            weights = self.model.weights_by_path()
            write_embeddings(self.log_dir, weights, self.embeddings_metadata, epoch)
        for writer in self._writers.values():
            writer.flush()

    def on_train_end(self, logs: Mapping[str, float] | None = None) -> None:
        """Closes the files."""
        if self._is_profiling:
            self._stop_profiler(None)
        self._is_training = False
        self._close()

    def _stop_profiler(self, logs: Mapping[str, float] | None) -> None:
        # The host runs ahead of the steps: reading waits until they are in the profile.
        dict(logs or {})
        jax.profiler.stop_trace()
        self._is_profiling = False

    def _write(self, where: str, tag: str, value: Any, step: int) -> None:
        if self.writes:
            for name, number in as_numbers({tag: value}).items():
                self._writer(where).add_scalar(name, number, step)

    def _writer(self, where: str) -> Any:
        if where not in self._writers:
            self._writers[where] = _tensorboard().SummaryWriter(str(self._folder(where)))
        return self._writers[where]

    def _folder(self, where: str) -> Path:
        folder = Path(self.log_dir) / where
        return folder / f"rank_{get_rank()}" if self.scope == "per_process" else folder

    def _close(self) -> None:
        for writer in self._writers.values():
            writer.close()
        self._writers = {}


def _profiled_steps(profile_batch: Any) -> tuple[int, int]:
    """Returns the first and the last step to profile, from one, a pair, or a string of either."""
    given = profile_batch.split(",") if isinstance(profile_batch, str) else profile_batch
    steps = [int(step) for step in given] if isinstance(given, (tuple, list)) else [given]
    first, last = steps[0], steps[-1]
    if len(steps) > 2 or first < 0 or last < first:
        raise ValueError(
            "profile_batch must be a step from 1, or a pair of first and last step, but is "
            f"{profile_batch!r}."
        )
    return first, last


def _tensorboard() -> Any:
    return import_for("The TensorBoard callback", "tensorboardX", "tensorboardX")
