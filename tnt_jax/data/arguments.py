"""Which kind of data the arguments of a call are, and which of them no step could work with."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tnt_jax.data.elements import as_dense, is_numbers, is_of_library, is_torch_tensor
from tnt_jax.data.ray.spec import is_ray_dataset, is_ray_iterator

_NAMED_COLUMNS = 6
# A model with more inputs than this is less likely than rows that nobody has stacked.
_MOST_INPUTS = 100
_ADVICE = {
    "y": "Make class indices of labels: classes, y = numpy.unique(y, return_inverse=True).",
    "x": "Turn it into numbers first, for instance text into token ids.",
}


def check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    """Raises a ValueError if an argument is none of its choices."""
    if value not in choices:
        raise ValueError(
            f"{name} must be one of {', '.join(map(repr, choices))}, but is {value!r}."
        )


def is_arrays(x: Any) -> bool:
    """Returns whether `x` is an array, or a dict, tuple or list of arrays; no stream of batches."""
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
    """Returns whether data has no batches of its own: arrays, and Ray data without a `RayData`."""
    return is_arrays(x) or is_ray_dataset(x) or is_ray_iterator(x)


def is_taken_apart(x: Any, y: Any, sample_weight: Any) -> bool:
    """Returns whether `x` alone may be `(inputs, targets)` or `(inputs, targets, weights)`."""
    if y is not None or sample_weight is not None or not isinstance(x, (tuple, list)):
        return False
    # A tuple or list that holds only tuples or dicts is a stream of batches.
    are_batches = all(isinstance(part, (tuple, Mapping, int, float)) for part in x)
    return 2 <= len(x) <= 3 and not are_batches and all(map(is_arrays, x))


def is_tf_dataset(x: Any) -> bool:
    """Returns whether `x` is a `tf.data.Dataset`, without importing TensorFlow."""
    return is_of_library(x, "tensorflow", "DatasetV2")


def check_arguments(x: Any, y: Any, sample_weight: Any) -> None:
    """Raises a ValueError if an array holds no numbers, or a list holds rows; other data passes."""
    if as_dense(x) is not x or as_dense(y) is not y:
        raise ValueError(
            "x or y is one sparse array, but a batch is dense. Pass a generator or a PyDataset "
            "that yields sparse batches, each of which is made dense, or a dense array."
        )
    for key in x if isinstance(x, Mapping) else ():
        if x[key] is None:
            raise ValueError(
                f"x[{key!r}] is None, but each input of a dict is an array. Leave the key out, or "
                "pass an array."
            )
    for name, value, other in (("x", x, y), ("y", y, x), ("sample_weight", sample_weight, None)):
        is_text = isinstance(value, (list, tuple)) and value and isinstance(value[0], str)
        if not is_text and not is_arrays(value):
            continue
        _check_no_rows(name, value, other)
        # A PyTorch tensor holds numbers, and may refuse conversion to an array.
        for leaf in (leaf for leaf in jax.tree.leaves(value) if not is_torch_tensor(leaf)):
            if hasattr(leaf, "dtypes") and hasattr(leaf, "columns"):
                _check_table(name, leaf)
            elif isinstance(leaf, str) or (hasattr(leaf, "__array__") and hasattr(leaf, "dtype")):
                check_numbers(name, leaf)


def _check_no_rows(name: str, value: Any, other: Any) -> None:
    if not isinstance(value, (list, tuple)) or isinstance(value[0], (int, float, str)):
        return
    first = np.shape(value[0]) if hasattr(value[0], "shape") else (len(value[0]),)
    num_targets = len(other) if hasattr(other, "shape") and np.ndim(other) else None
    are_rows = name == "x" and all(isinstance(row, list) and is_numbers(row) for row in value)
    if first and (are_rows or len(value) == num_targets != first[0] or len(value) > _MOST_INPUTS):
        several = "inputs" if name == "x" else "outputs"
        raise ValueError(
            f"{name} is a {type(value).__name__} of {len(value)} arrays of shape {first}. As in "
            f"Keras, a list means several {several}, each with all rows. Make one array of rows: "
            f"numpy.asarray({name})."
        )


def _check_table(name: str, table: Any) -> None:
    if _is_number(np.asarray(table[:1]).dtype):
        return
    columns = [f"{column} ({dtype})" for column, dtype in table.dtypes.items()]
    more = f" and {len(columns) - _NAMED_COLUMNS} more" if len(columns) > _NAMED_COLUMNS else ""
    raise ValueError(
        f"{name} is a table whose columns make no array of numbers: "
        f"{', '.join(columns[:_NAMED_COLUMNS])}{more}. Turn text and categories into numbers, for "
        f"instance with pandas.get_dummies, and pass {name}.astype('float32')."
    )


def check_numbers(name: str, leaf: Any) -> None:
    """Raises a ValueError, with advice by the name of the argument, if an array has no numbers."""
    dtype = np.dtype(type(leaf)) if isinstance(leaf, str) else getattr(leaf, "dtype", None)
    if dtype is None or isinstance(leaf, jax.Array) or _is_number(dtype):
        return
    array = np.asarray(leaf)  # A pandas column may have a dtype of its own and still hold numbers.
    if _is_number(array.dtype):
        return
    example = next(array.flat, None)
    if isinstance(example, (list, tuple, np.ndarray)):
        raise ValueError(
            f"{name} holds rows of different lengths (dtype {dtype}, the first has {len(example)} "
            "values), but a batch is an array of rows of one length. Pad them to one length and "
            "mask what is padding."
        )
    is_text = isinstance(example, (str, bytes))
    kind = "text" if is_text else f"objects of the type {type(example).__name__}"
    raise ValueError(
        f"{name} holds {kind} (dtype {dtype}), such as {str(example)!r}, but a step computes with "
        f"numbers. {_ADVICE.get(name, 'Pass numbers.')}"
    )


def _is_number(dtype: Any) -> bool:
    return isinstance(dtype, np.dtype) and (jnp.issubdtype(dtype, np.number) or dtype == np.bool_)
