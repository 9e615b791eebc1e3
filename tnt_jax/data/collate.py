"""Stacks examples, trees with arrays at the leaves, into a batch.

Trees consist of tuples, named tuples and dictionaries. This module needs only NumPy, so that worker
processes start fast.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np


def map_arrays(function: Callable[..., Any], tree: Any, *others: Any) -> Any:
    """Applies `function` to the leaves of `tree` and the leaves at the same positions of `others`.

    Tuples, named tuples and mappings are structure; everything else is a leaf. Unlike in JAX's
    pytrees, that includes lists: a list of token ids is one array.
    """
    if isinstance(tree, Mapping):
        return {
            key: map_arrays(function, tree[key], *(other[key] for other in others)) for key in tree
        }
    if isinstance(tree, tuple):
        parts = [map_arrays(function, *leaves) for leaves in zip(tree, *others, strict=True)]
        return type(tree)(*parts) if hasattr(tree, "_fields") else tuple(parts)
    return function(tree, *others)


def stack_examples(examples: Sequence[Any]) -> Any:
    """Returns one batch `[len(examples), ...]` with the structure of an example.

    Leaves become NumPy arrays (numbers, lists of numbers, tensors of other libraries that NumPy can
    read); a Python float becomes float32 and a Python int int32 where it fits, as they would in
    JAX.

    Args:
        examples: At least one example; all with the same structure and, leaf by leaf, the same
            shape.

    Raises:
        ValueError: If the examples differ in structure or shape; the message names both.
    """
    try:
        return map_arrays(lambda *values: _stack(values), *examples)
    except (KeyError, TypeError, ValueError) as error:
        shapes = dict.fromkeys(
            str(map_arrays(lambda value: np.shape(value), example)) for example in examples
        )
        raise ValueError(
            "The examples of a batch must have the same structure and shapes, but there are "
            f"{' and '.join(list(shapes)[:3])}. Pad or crop them to one shape in the dataset, or "
            "filter them."
        ) from error


def concatenate_batches(batches: Sequence[Any]) -> Any:
    """Returns the rows of `batches`, one after another, as one batch.

    A single batch is returned as it is.
    """
    if len(batches) == 1:
        return batches[0]
    return map_arrays(lambda *parts: np.concatenate(parts), *batches)


def take_rows(batch: Any, indices: np.ndarray) -> Any:
    """Returns the rows of `batch` at `indices`, in that order.

    Consecutive rows are a view, without a copy.

    Args:
        batch: Tree of arrays `[rows, ...]`.
        indices: int64 `[local_rows]`, repetitions allowed.
    """
    first = int(indices[0])
    count = len(indices)
    if np.array_equal(indices, np.arange(first, first + count)):
        return map_arrays(lambda array: array[first : first + count], batch)
    return map_arrays(lambda array: np.take(array, indices, axis=0), batch)


def _stack(values: tuple[Any, ...]) -> np.ndarray:
    if all(value is None for value in values):
        raise ValueError("None is not an array")
    array = np.stack([np.asarray(value) for value in values])
    if isinstance(values[0], bool | np.ndarray | np.generic) or hasattr(values[0], "dtype"):
        return array
    if array.dtype == np.float64:
        return array.astype(np.float32)
    if array.dtype == np.int64 and (not array.size or (abs(array) < 1 << 31).all()):
        return array.astype(np.int32)
    return array
