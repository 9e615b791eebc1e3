"""Reads TFRecord files of images, in one order; errors name the file and the record."""

from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import jax
import tensorflow as tf

from tnt_jax.data.elements import OnError
from tnt_jax.data.tf import private
from tnt_jax.data.tf.replay import function_nodes
from tnt_jax.log import logger


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
        numbered = tf.data.Dataset.zip((records, tf.data.Dataset.counter()))
        return numbered.map(lambda record, number: (path, number, record))

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
    """Returns the number of records in TFRecord files; a ValueError names a corrupt one."""
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


def files_of(dataset: Any, *, most: int | None = None) -> list[str]:
    """Returns the existing files that sources of a pipeline with at most `most` strings name."""
    elements: list[Any] = []
    specs = tf.nest.flatten(dataset.element_spec)
    if type(dataset).__name__ == "TFRecordDatasetV2":
        elements = list(private.parameter(dataset, "filenames").as_numpy_iterator())
    elif not private.inputs(dataset) and any(spec.dtype == tf.string for spec in specs):
        elements = list(islice(dataset.as_numpy_iterator(), None if most is None else most + 1))
        elements = elements if most is None or len(elements) <= most else []
    strings = (value for element in elements for value in tf.nest.flatten(element))
    names = [x.decode() for x in strings if isinstance(x, bytes) and len(x) < 4096]
    found = [name for name in names if tf.io.gfile.exists(name)]
    for source in private.inputs(dataset):
        found += files_of(source, most=most)
    return list(dict.fromkeys(found))


# More names than this are those of single examples, of which a bad one is masked in its place.
_MOST_FILES = 10_000


def sizes_if_skipped(dataset: Any) -> dict[str, int] | None:
    """Returns the sizes of files, for `require_same_sizes`, of a pipeline that ignores errors."""
    if jax.process_count() == 1:
        return None
    try:
        return file_sizes(dataset) if ignores_errors(dataset) else None
    except private.Unreadable as error:
        logger.warning(
            "Whether all processes read the same files is not checked: this version of TensorFlow "
            "differs (%s).",
            error,
        )
        return None


def ignores_errors(dataset: Any) -> bool:
    """Returns whether a pipeline drops elements that raise errors, also in an inner dataset."""
    return any(map(_ignores_errors_itself, private.operations(dataset)))


def _ignores_errors_itself(operation: Any) -> bool:
    kind = type(operation).__name__
    # A map's function must replace what it drops: each call returns one element.
    functions = private.functions(operation) if "Interleave" in kind or "FlatMap" in kind else []
    nodes = (node for function in functions for node in function_nodes(function))
    return "IgnoreErrors" in kind or any(node.op.startswith("IgnoreErrors") for node in nodes)


def file_sizes(dataset: Any) -> dict[str, int]:
    """Returns the sizes in bytes of the files that the sources of a pipeline name."""
    return {name: tf.io.gfile.stat(name).length for name in files_of(dataset, most=_MOST_FILES)}


def require_same_sizes(sizes: Sequence[dict[str, int] | None]) -> None:
    """Raises a ValueError if the size in bytes of a file differs between processes that know it."""
    first, *others = sizes
    for process, other in enumerate(others, 1):
        if first is None or other is None:
            continue
        for file in sorted(set(first) | set(other)):
            if first.get(file) != other.get(file):
                raise ValueError(
                    f"{file} has {first.get(file, 'no')} bytes on process 0 and "
                    f"{other.get(file, 'no')} on process {process}. The pipeline leaves out what "
                    "it cannot read (on_error='skip', ignore_errors), so their streams would shift "
                    "against each other. Copy the file again."
                )
