"""Elements of a stream of batches, as NumPy arrays.

An element is `inputs`, `(inputs, targets)` or `(inputs, targets, sample_weight)`. This module needs
only NumPy, so that worker processes start fast.
"""

import sys
import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

import ml_dtypes
import numpy as np

OnError = Literal["raise", "skip"]


def is_of_library(x: Any, package: str, name: str) -> bool:
    """Returns whether `x` is of a class in a package, which is not imported to find out."""
    of_name = [cls.__module__ for cls in type(x).__mro__ if cls.__name__ == name]
    return any(f"{module}.".startswith(f"{package}.") for module in of_name)


def is_torch_tensor(x: Any) -> bool:
    """Returns whether `x` is a PyTorch tensor, without importing PyTorch."""
    return is_of_library(x, "torch", "Tensor")


def torch_to_numpy(tensor: Any) -> np.ndarray:
    """Returns a tensor on any device as a host array, without its gradient; bfloat16 is kept."""
    import torch  # pyright: ignore[reportMissingImports]

    own = tensor.detach().cpu()
    if own.dtype == torch.bfloat16:
        return own.contiguous().view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return own.resolve_conj().resolve_neg().numpy()


# Kinds of NumPy arrays that hold text or Python objects.
_NOT_NUMBERS = "OUSMm"


def unpack(data: Any) -> tuple[Any, Any, Any]:
    """Returns the inputs, targets and sample weights of an element.

    As in Keras, an element is a tuple or list of up to three, or inputs alone. A list counts as
    such only if it contains an array: a list of tuples is a stream of batches.
    """
    if not isinstance(data, tuple) and not _is_list_of_parts(data):
        return data, None, None
    if len(data) > 3:
        raise ValueError(
            "An element of the data must be inputs, (inputs, targets) or (inputs, targets, "
            f"sample_weight), but is a {type(data).__name__} of {len(data)}. Put several inputs "
            "into a tuple or dict of their own: ((first, second), targets)."
        )
    inputs, targets, weight = (*data, None, None)[:3]
    return inputs, targets, weight


def as_batch(element: Any) -> Any:
    """Returns an element of a stream with NumPy arrays at its leaves.

    A list of anything but numbers counts as a tuple, because the default collation of PyTorch's
    `DataLoader` makes such lists; inside the element it means several inputs or outputs.
    """
    try:
        return _with_arrays(as_tuple(element), "")
    except ValueError as error:
        # The message names the leaf; the traceback adds nothing.
        raise ValueError(str(error)) from None


def as_tuple(element: Any) -> Any:
    """Returns a list of arrays or other parts as a tuple, and anything else unchanged."""
    return tuple(element) if isinstance(element, list) and not is_numbers(element) else element


def _with_arrays(tree: Any, path: str) -> Any:
    if tree is None:
        return None
    if isinstance(tree, Mapping):
        return {key: _with_arrays(value, f"{path}[{key!r}]") for key, value in tree.items()}
    if isinstance(tree, (tuple, list)) and not is_numbers(tree):
        parts = [_with_arrays(value, f"{path}[{index}]") for index, value in enumerate(tree)]
        return type(tree)(*parts) if hasattr(tree, "_fields") else type(tree)(parts)
    return _as_array(tree, path)


def _as_array(leaf: Any, path: str) -> np.ndarray:
    where = f"the component {path}" if path else "an element"
    try:
        array = torch_to_numpy(leaf) if is_torch_tensor(leaf) else np.asarray(as_dense(leaf))
    except ValueError as error:
        raise ValueError(
            f"The rows of a batch must have one shape, but {where} of the data is a "
            f"{type(leaf).__name__} whose rows differ ({error}). Pad them to one length."
        ) from error
    if array.dtype.kind in _NOT_NUMBERS and array.dtype.names is None:
        raise ValueError(
            f"A batch must hold arrays of numbers, but {where} of the data is a "
            f"{type(leaf).__name__} that gives an array of {array.dtype}. Turn text into token or "
            "class indices, and leave out what the model does not take."
        )
    return array


def as_dense(x: Any) -> Any:
    """Returns a sparse array of SciPy, JAX or TensorFlow as a dense one; others unchanged."""
    module = type(x).__module__
    if module.startswith("scipy.sparse"):
        return x.toarray()
    if module.startswith("jax.experimental.sparse"):
        return x.todense()
    if module.startswith("tensorflow") and type(x).__name__ == "SparseTensor":
        return sys.modules["tensorflow"].sparse.to_dense(x)
    return x


def is_numbers(tree: Any) -> bool:
    """Returns whether a list holds only numbers and lists of them: the rows of one array."""
    return isinstance(tree, list) and all(
        isinstance(value, (bool, int, float, complex, np.generic)) or is_numbers(value)
        for value in tree
    )


def checksums_of(
    arrays: Iterable[np.ndarray], targets: Sequence[np.ndarray]
) -> tuple[int, int | None]:
    """Returns a checksum of a batch, and one of its targets; None if they do not tell its rows."""
    tells_rows = any(bool((x != x[:1]).any()) for x in targets)
    return checksum(arrays), checksum(targets) if tells_rows else None


def checksum(arrays: Iterable[np.ndarray]) -> int:
    """Returns a number that tells the contents of arrays apart."""
    found = 0
    for x in arrays:
        found = zlib.crc32(repr(x.tolist()).encode() if x.dtype == object else x.tobytes(), found)
    return found


def _is_list_of_parts(data: Any) -> bool:
    if not isinstance(data, list) or is_numbers(data):
        return False
    return not all(isinstance(value, (tuple, Mapping)) for value in data)
