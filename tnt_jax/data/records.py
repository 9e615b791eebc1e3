"""TFRecord files of images: read in one order on every process, with errors that name the file and the record."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tensorflow as tf

from tnt_jax.data.images import OnError


def image_records(
    files: str | Path | Sequence[str | Path],
    *,
    label_offset: int = 0,
    image_key: str = "image/encoded",
    label_key: str = "image/class/label",
    shuffle_files: bool = False,
    seed: int = 42,
    cycle_length: int = 8,
    on_error: OnError = "raise",
) -> Any:
    """Returns the dataset of `{"name": ..., "jpeg": bytes, "label": ...}` of TFRecord files with `tf.train.Example`s.

    Args:
        files: A pattern such as `imagenet/train-*`, or the files themselves.
        label_offset: Added to the stored label; -1 for the usual ImageNet records, whose labels start at 1.
        image_key: Feature with the JPEG's bytes.
        label_key: Feature with the label, one int64.
        shuffle_files: Whether each epoch reads the files in an order of its own.
        seed: Seed of that order.
        cycle_length: Files read in turns; part of the order, so keep it fixed.
        on_error: `"raise"` ends the run at a file that is truncated or corrupt, naming the file and the record; `"skip"` leaves the
            rest of such a file out, with a warning.

    Raises:
        FileNotFoundError: If no file matches.
    """
    paths = _paths(files)
    order = tf.data.Dataset.from_tensor_slices(paths)
    if shuffle_files:
        order = order.shuffle(len(paths), seed)

    def of_file(path: Any) -> Any:
        records = tf.data.TFRecordDataset(path)
        if on_error == "skip":
            records = records.ignore_errors(log_warning=True)
        return tf.data.Dataset.zip((records, tf.data.Dataset.counter())).map(lambda record, number: (path, number, record))

    features = {image_key: tf.io.FixedLenFeature([], tf.string), label_key: tf.io.FixedLenFeature([], tf.int64)}

    def parse(path: Any, number: Any, record: Any) -> Any:
        example = tf.io.parse_single_example(record, features)
        name = tf.strings.join([path, ", record ", tf.strings.as_string(number)])
        return {"name": name, "jpeg": example[image_key], "label": tf.cast(example[label_key] + label_offset, tf.int32)}

    interleaved = order.interleave(of_file, cycle_length=cycle_length, num_parallel_calls=cycle_length, deterministic=True)
    return interleaved.map(parse, num_parallel_calls=tf.data.AUTOTUNE)


def check_records(files: str | Path | Sequence[str | Path]) -> int:
    """Reads TFRecord files from end to end and returns the number of their records.

    Raises:
        ValueError: At the first record that is truncated or corrupt; the text names the file, the record and where it stands.
        FileNotFoundError: If no file matches.
    """
    total = 0
    for path in _paths(files):
        number = 0
        try:
            for number, _ in enumerate(tf.data.TFRecordDataset(path), 1):  # noqa: B007
                pass
        except tf.errors.DataLossError as error:
            raise ValueError(
                f"{path}, record {number} cannot be read: the file is truncated or corrupt ({error.message.split('[[')[0].strip()}). "
                "Copy the file again, or pass on_error='skip'."
            ) from error
        total += number
    return total


def files_of(dataset: Any) -> list[str]:
    """Returns the existing files that the sources of a pipeline name."""
    names: list[str] = []
    if type(dataset).__name__ == "TFRecordDatasetV2":
        names = [name.decode() for name in dataset._filenames.as_numpy_iterator()]
    elif not dataset._inputs() and any(spec.dtype == tf.string for spec in tf.nest.flatten(dataset.element_spec)):
        strings = (value for element in dataset.as_numpy_iterator() for value in tf.nest.flatten(element))
        names = [value.decode() for value in strings if isinstance(value, bytes) and len(value) < 4096]
    found = [name for name in names if tf.io.gfile.exists(name)]
    return list(dict.fromkeys([*found, *(name for source in dataset._inputs() for name in files_of(source))]))


def _paths(files: str | Path | Sequence[str | Path]) -> list[str]:
    if isinstance(files, (str, Path)):
        paths = sorted(tf.io.gfile.glob(str(files)))
    else:
        paths = [str(file) for file in files]
    if not paths:
        raise FileNotFoundError(f"No file matches {files}.")
    missing = [path for path in paths if not tf.io.gfile.exists(path)]
    if missing:
        raise FileNotFoundError(f"{missing[0]} does not exist.")
    return paths
