"""Which kind of data an object is, by its type alone."""

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from tnt_jax.data.ray.kinds import is_ray_dataset, is_ray_iterator


def is_arrays(x: Any) -> bool:
    """Returns whether `x` is an array, or a dict, tuple or list of arrays, not a stream of batches.

    A list or tuple whose elements are tuples or dicts is a stream: each element is a batch.
    """
    if isinstance(x, Mapping):
        return bool(x) and all(is_arrays(value) for value in x.values())
    if isinstance(x, (tuple, list)):
        return bool(x) and all(
            isinstance(value, (int, float))
            or (not isinstance(value, (tuple, Mapping)) and is_arrays(value))
            for value in x
        )
    return isinstance(x, (np.ndarray, jax.Array)) or (
        hasattr(x, "__array__") and hasattr(x, "shape")
    )


def takes_batch_size(x: Any) -> bool:
    """Returns whether data has no batches of its own, so that a call gives their size.

    It is true of arrays, and of Ray datasets and iterators without a `RayData`.
    """
    return is_arrays(x) or is_ray_dataset(x) or is_ray_iterator(x)


def is_taken_apart(x: Any, y: Any, sample_weight: Any) -> bool:
    """Returns whether `x` alone may be `(inputs, targets)` or `(inputs, targets, weights)`.

    It must be a tuple or list of two or three arrays. A tuple or list that holds only tuples or
    dicts is a stream of batches.
    """
    if (
        y is not None
        or sample_weight is not None
        or not isinstance(x, (tuple, list))
        or not 2 <= len(x) <= 3
    ):
        return False
    return all(map(is_arrays, x)) and not all(
        isinstance(part, (tuple, Mapping, int, float)) for part in x
    )


def is_tf_dataset(x: Any) -> bool:
    """Returns whether `x` is a `tf.data.Dataset`, without importing TensorFlow."""
    return any(
        cls.__module__.startswith("tensorflow.") and cls.__name__ == "DatasetV2"
        for cls in type(x).__mro__
    )
