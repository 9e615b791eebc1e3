"""Reductions of host values over processes, exactly as NumPy reduces a stacked array.

Integers never wrap.
"""

from collections.abc import Callable
from typing import Literal

import jax.numpy as jnp
import numpy as np

Op = Literal["sum", "mean", "min", "max", "prod"]
_NUMPY: dict[str, Callable] = {
    "sum": np.sum,
    "mean": np.mean,
    "min": np.min,
    "max": np.max,
    "prod": np.prod,
}
OPS = tuple(_NUMPY)
# Above this, 64-bit integer results are computed again with unlimited integers, because the float64
# estimate may be rounded.
_DOUBTFUL = 2.0**62


def is_number(dtype: np.dtype) -> bool:
    """Returns whether arrays of a dtype can be reduced: booleans and numbers, also bfloat16."""
    return dtype.kind in "biufc" or bool(jnp.issubdtype(dtype, jnp.number))


def reduce_rows(rows: np.ndarray, op: Op) -> np.ndarray:
    """Returns the reduction of `[num_processes, size]` over the first dimension.

    The dtype is that of NumPy's function: sums and products of booleans and integers are 64 bits
    wide, means of them are float64. Sums, means and products of floating numbers below 32 bits are
    computed in float64 and rounded once.

    Args:
        rows: Numbers, one row per process.
        op: The reduction, such as `"sum"`.

    Raises:
        OverflowError: If a sum or product of integers has more than 64 bits.
    """
    dtype = rows.dtype
    reduce = _NUMPY[op]
    if op in ("min", "max"):
        return reduce(rows, axis=0)
    if dtype.kind in "biu" or jnp.issubdtype(dtype, jnp.integer):
        wide = rows
        if dtype.kind not in "biu":
            is_unsigned = jnp.issubdtype(dtype, jnp.unsignedinteger)
            wide = rows.astype(np.uint64 if is_unsigned else np.int64)
        result = reduce(wide, axis=0)
        if op != "mean":
            _check_fits(wide, result, op)
        return result
    if dtype.itemsize < 4:
        return reduce(rows.astype(np.float64), axis=0).astype(dtype)
    return reduce(rows, axis=0)


def _check_fits(rows: np.ndarray, result: np.ndarray, op: Op) -> None:
    """Raises an OverflowError if NumPy has wrapped an element of the result."""
    with np.errstate(over="ignore"):
        estimate = _NUMPY[op](np.abs(rows.astype(np.float64)), axis=0)
    doubtful = estimate >= _DOUBTFUL
    if not doubtful.any():
        return
    exact = _NUMPY[op](rows[:, doubtful].astype(object), axis=0)
    if np.any(exact != result[doubtful].astype(object)):
        raise OverflowError(
            f"The {op} over the processes of an array of {rows.dtype} has more than 64 bits. Pass "
            "float64, or smaller numbers."
        )
