"""Pipelines that leave out unreadable records: every process must leave out the same.

Otherwise its stream shifts against those of the others.
"""

from itertools import count, islice
from typing import Any

import tensorflow as tf

from tnt_jax.data.agreement import Board, CoordinationBoard, gather
from tnt_jax.data.tf import private
from tnt_jax.data.tf.functions import function_nodes
from tnt_jax.job import Slot
from tnt_jax.log import logger


def files_of(dataset: Any, *, most: int | None = None) -> list[str]:
    """Returns the existing files that the sources of a pipeline name.

    Sources with more strings than `most` are passed over.
    """
    names: list[str] = []
    if type(dataset).__name__ == "TFRecordDatasetV2":
        filenames = private.parameter(dataset, "filenames").as_numpy_iterator()
        names = [name.decode() for name in filenames]
    elif not private.inputs(dataset) and any(
        spec.dtype == tf.string for spec in tf.nest.flatten(dataset.element_spec)
    ):
        elements = list(islice(dataset.as_numpy_iterator(), None if most is None else most + 1))
        elements = elements if most is None or len(elements) <= most else []
        strings = (value for element in elements for value in tf.nest.flatten(element))
        names = [
            value.decode() for value in strings if isinstance(value, bytes) and len(value) < 4096
        ]
    found = [name for name in names if tf.io.gfile.exists(name)]
    for source in private.inputs(dataset):
        found += files_of(source, most=most)
    return list(dict.fromkeys(found))


# More names than this are those of single examples, of which a bad one is masked in its place.
_MOST_FILES = 10_000
_numbers = Slot(count)


def check_skips_alike(dataset: Any) -> None:
    """Compares, over all processes, the files of a pipeline that ignores errors."""
    board = CoordinationBoard()
    if board.num_processes == 1:
        return
    try:
        sizes = file_sizes(dataset) if ignores_errors(dataset) else None
    except private.Unreadable as error:
        logger.warning(
            "Whether all processes read the same files is not checked: this version of TensorFlow "
            "differs (%s).",
            error,
        )
        return
    if sizes is not None:
        require_same_sizes(sizes, board, f"files/{next(_numbers.get())}")


def ignores_errors(dataset: Any) -> bool:
    """Returns whether a pipeline drops elements that raise errors.

    The functions of `interleave` and `flat_map` count, too.
    """
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


def require_same_sizes(sizes: dict[str, int], board: Board, name: str) -> None:
    """Raises a ValueError on all processes if the size in bytes of a file differs between them.

    The name on the board is unique, and the same on all processes.
    """
    first, *others = gather(board, name, sizes)
    for process, other in enumerate(others, 1):
        for file in sorted(set(first) | set(other)):
            if first.get(file) != other.get(file):
                raise ValueError(
                    f"{file} has {first.get(file, 'no')} bytes on process 0 and "
                    f"{other.get(file, 'no')} on process {process}. The pipeline leaves out what "
                    "it cannot read (on_error='skip', ignore_errors), so their streams would shift "
                    "against each other. Copy the file again."
                )
