"""The arrays of a training state by path, as they are saved and must fit a model again."""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from tnt_jax import _jax
from tnt_jax.adapters.base import VariablePath
from tnt_jax.train.state import TrainState

_ACCUMULATED = ("accumulated/", "residual/")


def state_arrays(state: Any) -> dict[str, Any]:
    """Returns the arrays of a state, or other pytree, by path, such as `params/Dense_0/kernel`."""
    leaves = jax.tree_util.tree_leaves_with_path(state, is_leaf=is_array)
    return by_path(("/".join(map(_saved_part, path)), leaf) for path, leaf in leaves)


def by_path(leaves: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """Returns leaves by path.

    A ValueError says that two leaves have the same path, as the keys `"a/b"`, and `"b"` within
    `"a"`.
    """
    flat: dict[str, Any] = {}
    for path, leaf in leaves:
        if path in flat:
            raise ValueError(
                f"Two arrays of the state have the path {path}, so that a checkpoint could hold "
                "only one of them. Rename one: a slash in a name looks like a level of the tree."
            )
        flat[path] = leaf
    return flat


def digest(x: Any) -> str:
    """Returns a digest of an array's dtype, shape and bits."""
    array = np.asarray(x)
    return hashlib.md5(f"{array.dtype} {array.shape} ".encode() + array.tobytes()).hexdigest()


def with_arrays(state: TrainState, arrays: Mapping[str, Any]) -> TrainState:
    """Returns a state like `state` with other arrays by path, which must fit; see `check_match`."""
    expected = state_arrays(state)
    arrays = _for_ranks(arrays, expected)
    check_match(expected, arrays)
    return jax.tree.structure(state).unflatten([arrays[path] for path in expected])


def without_accumulated(arrays: Mapping[str, Any]) -> dict[str, Any]:
    """Returns arrays without what ranks have accumulated, of which each process holds a part."""
    return {path: leaf for path, leaf in arrays.items() if not path.startswith(_ACCUMULATED)}


def check_match(expected: Mapping[str, Any], found: Mapping[str, Any]) -> None:
    """Raises a ValueError unless arrays of a file have the model's paths, shapes and dtypes."""
    problems = {
        "not in the file": [path for path in expected if path not in found],
        "not in the model": [path for path in found if path not in expected],
        "different": [
            f"{path} (file: {_jax.kind_of(found[path])}, model: {_jax.kind_of(leaf)})"
            for path, leaf in expected.items()
            if path in found and _jax.kind_of(found[path]) != _jax.kind_of(leaf)
        ],
    }
    parts = [f"{what}: {listed(paths)}" for what, paths in problems.items() if paths]
    if parts:
        raise ValueError(
            f"What was saved does not fit the model. Leaves {'; '.join(parts)}. Load it into the "
            f"model that was saved."
        )


def _for_ranks(arrays: Mapping[str, Any], expected: Mapping[str, Any]) -> dict[str, Any]:
    """Returns arrays with accumulated gradients `[ranks, ...]` of as many ranks as expected."""
    found = dict(arrays)
    for path, leaf in expected.items():
        if not path.startswith(_ACCUMULATED):
            continue
        saved = found.get(path)
        if saved is None:
            found[path] = np.zeros(leaf.shape, leaf.dtype)
        elif saved.shape[0] != leaf.shape[0] and saved.shape[1:] == leaf.shape[1:]:
            found[path] = np.zeros(leaf.shape, leaf.dtype)
            # Only the sum of the gradients matters.
            found[path][0] = np.sum(saved, axis=0)
    return found


def listed(items: Sequence[Any], *, most: int = 8) -> str:
    """Returns the first items in words, and how many there are besides."""
    more = f" and {len(items) - most} more" if len(items) > most else ""
    return ", ".join(map(str, items[:most])) + more


def _saved_part(entry: Any) -> str:
    is_named = isinstance(entry, jax.tree_util.DictKey) and isinstance(entry.key, VariablePath)
    return entry.key.saved_as if is_named else jax.tree_util.keystr((entry,), simple=True)


def is_array(node: Any) -> bool:
    """Returns whether a node of a pytree is an array or the description of one."""
    # Orbax describes an array by an object that older JAX versions take for a container.
    return hasattr(node, "shape") and hasattr(node, "dtype")
