"""Reads TFRecord files of images, in one order on all processes.

Errors name the file and the record.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import tensorflow as tf

OnError = Literal["raise", "skip"]


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
    """Returns `{"name": ..., "jpeg": bytes, "label": ...}` from TFRecord files.

    The records are `tf.train.Example`s.

    Args:
        files: A pattern such as `imagenet/train-*`, or the files themselves.
        label_offset: Added to the stored label; -1 for the usual ImageNet records, whose labels
            start at 1.
        image_key: Feature with the JPEG's bytes.
        label_key: Feature with the label, one int64.
        shuffle_files: Whether each epoch reads the files in an order of its own.
        seed: Seed of that order.
        cycle_length: Files read in turns; part of the order, so keep it fixed.
        on_error: `"raise"` ends the run at a file that is truncated or corrupt, naming the file and
            the record; `"skip"` leaves out the rest of such a file, with a warning. All processes
            must see the same files.

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
        return tf.data.Dataset.zip((records, tf.data.Dataset.counter())).map(
            lambda record, number: (path, number, record)
        )

    features = {
        image_key: tf.io.FixedLenFeature([], tf.string),
        label_key: tf.io.FixedLenFeature([], tf.int64),
    }

    def parse(path: Any, number: Any, record: Any) -> Any:
        example = tf.io.parse_single_example(record, features)
        name = tf.strings.join([path, ", record ", tf.strings.as_string(number)])
        return {
            "name": name,
            "jpeg": example[image_key],
            "label": tf.cast(example[label_key] + label_offset, tf.int32),
        }

    interleaved = order.interleave(
        of_file, cycle_length=cycle_length, num_parallel_calls=cycle_length, deterministic=True
    )
    return interleaved.map(parse, num_parallel_calls=tf.data.AUTOTUNE)


def check_records(files: str | Path | Sequence[str | Path]) -> int:
    """Reads TFRecord files from end to end and returns the number of their records.

    It raises a ValueError at the first one that is truncated or corrupt, with file and place.
    """
    total = 0
    for path in _paths(files):
        number = 0
        try:
            for number, _ in enumerate(tf.data.TFRecordDataset(path), 1):  # noqa: B007
                pass
        except tf.errors.DataLossError as error:
            raise ValueError(
                f"{path}, record {number} cannot be read: the file is truncated or corrupt "
                f"({error.message.split('[[')[0].strip()}). Copy the file again, or pass "
                "on_error='skip'."
            ) from error
        total += number
    return total


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
