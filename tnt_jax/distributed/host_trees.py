"""Pytrees of host values: as arrays, and in words in which processes compare them."""

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import core

from tnt_jax import _jax


def as_arrays(
    call: str, tree: Any, check: Callable[[str, np.ndarray], None] | None
) -> tuple[list[str], list[np.ndarray]]:
    """Returns the paths of the leaves of a tree, in words, and the leaves as arrays.

    Args:
        call: Name of the public call, for errors.
        tree: Pytree of numbers and arrays.
        check: Called with the path and the array; raises if the array cannot be used.

    Raises:
        TypeError: If a leaf is no number or array that this process holds.
    """
    paths, leaves = [], []
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        name = jax.tree_util.keystr(path) or "the value"
        _check_leaf(call, name, leaf)
        # In C order, and not by ascontiguousarray, which gives a scalar a dimension.
        array = np.asarray(leaf, order="C")
        if array.dtype.hasobject:
            raise TypeError(
                f"{call} takes numbers and arrays, but {name} is {type(leaf).__name__}: "
                f"{repr(leaf)[:200]}. tnt.all_gather_object and tnt.broadcast_object take objects."
            )
        if check is not None:
            check(name, array)
        paths.append(name)
        leaves.append(array)
    return paths, leaves


def _check_leaf(call: str, name: str, leaf: Any) -> None:
    if not isinstance(leaf, jax.Array):
        return
    if isinstance(leaf, core.Tracer):
        raise TypeError(
            f"{call} exchanges values between processes, outside of jit, but {name} is traced. In "
            f"a step use jax.lax.psum and its like over the axis {_jax.DATA_AXIS!r}."
        )
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        raise TypeError(
            f"{call} takes numbers and arrays, but {name} is a PRNG key. Pass "
            f"jax.random.key_data of it."
        )
    if not (leaf.is_fully_addressable or leaf.is_fully_replicated):
        raise TypeError(
            f"{call} takes values that this process holds, but {name} lies in parts on several "
            f"processes ({leaf.sharding}). It is one array of the whole job already."
        )


def check_rows(call: str, paths: list[str], leaves: list[np.ndarray]) -> None:
    """Raises a ValueError if a leaf has no rows, being without a dimension."""
    for path, leaf in zip(paths, leaves, strict=True):
        if leaf.ndim == 0:
            raise ValueError(
                f"{call} takes arrays of rows, but {path} is {leaf.dtype}[], without a dimension. "
                "Give it one, for instance by numpy.atleast_1d."
            )


def type_of(leaf: np.ndarray, is_ragged: bool) -> str:
    """Returns dtype and shape in words; of a ragged leaf without its number of rows."""
    order = " (big endian)" if leaf.dtype.str.startswith(">") else ""
    shape = ["rows", *leaf.shape[1:]] if is_ragged else leaf.shape
    return f"{leaf.dtype}{order}[{', '.join(map(str, shape))}]"


def raise_difference(call: str, told: dict[int, list[str]]) -> None:
    """Raises a ValueError that names two processes, which differ, and in what.

    Args:
        call: Name of the public call.
        told: By process the structure of its tree, and its leaves.
    """
    reference = next(iter(told))
    process = next(number for number in told if told[number] != told[reference])
    first, other = told[reference], told[process]
    pairs = [(a, b) for a, b in zip(first[1:], other[1:], strict=False) if a != b]
    if first[0] == other[0] and pairs:
        found = f"{pairs[0][0]} on process {reference}, {pairs[0][1]} on process {process}"
    else:
        found = (
            f"{len(first) - 1} leaves in {first[0]} on process {reference}, {len(other) - 1} "
            f"leaves in {other[0]} on process {process}"
        )
    raise ValueError(
        f"{call} needs the same structure, shapes and dtypes on every process, but got {found}."
    )


def text_of(structure: Any) -> str:
    """Returns the structure of a tree in words that are the same on every process."""
    # Functions and objects in it print where they lie in the memory of a process.
    return re.sub(r" at 0x[0-9a-f]+", "", str(structure))
