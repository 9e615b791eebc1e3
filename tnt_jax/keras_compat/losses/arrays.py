"""Arrays of losses and metrics: dtypes, matching ranks, and weights that fit values."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

EPSILON = 1e-7  # keras.config.epsilon(): keeps logarithms and quotients of probabilities finite.


def compute_dtype(dtype: Any) -> str:
    """Returns the name of the dtype that Keras computes in for a `dtype=` argument.

    Args:
        dtype: A name (`"int"` is int32, `"mixed_bfloat16"` computes in bfloat16), a NumPy or JAX
            dtype, a Keras dtype policy, or None for float32.

    Raises:
        ValueError: If it is not a dtype.
    """
    name = getattr(dtype, "compute_dtype", dtype)
    if isinstance(name, str):
        name = {"int": "int32", "float": "float32"}.get(name, name.removeprefix("mixed_"))
    try:
        return jnp.dtype("float32" if name is None else name).name
    except TypeError as error:
        raise ValueError(
            f"dtype must be a dtype such as 'float32' or 'bfloat16', got {dtype!r}."
        ) from error


def divide_no_nan(total: Any, count: Any) -> Any:
    """Returns total / count, and 0 where count is 0; of float32 host arrays as a host array."""
    if all(isinstance(x, np.ndarray) and x.dtype == np.float32 for x in (total, count)):
        # The same quotient, without programs to compile.
        with np.errstate(all="ignore"):
            return np.divide(total, count, out=np.zeros_like(total + count), where=count != 0)
    is_empty = jnp.equal(count, 0)
    return jnp.where(is_empty, 0, total / jnp.where(is_empty, 1, count))


def of_one_dtype(y_true: Any, y_pred: Any) -> tuple[jax.Array, jax.Array]:
    """Returns targets and outputs as arrays with the dtype of the outputs."""
    y_pred = jnp.asarray(y_pred)
    return jnp.asarray(y_true).astype(y_pred.dtype), y_pred


def at_least_float32(array: Any) -> jax.Array:
    """Returns a floating array; half precision and integers become float32."""
    array = jnp.asarray(array)
    return array.astype(jnp.promote_types(array.dtype, jnp.float32))


def in_dtype(array: Any, dtype: str) -> jax.Array:
    """Returns an array in a dtype; float32 means at least float32, so float64 is kept."""
    return at_least_float32(array) if dtype == "float32" else jnp.asarray(array).astype(dtype)


def standardized(y_true: Any, y_pred: Any, dtype: str = "float32") -> tuple[Any, Any]:
    """Returns arrays, with `y_pred` and floating targets in `dtype`; see `in_dtype`.

    Unlike in Keras, integer targets remain integers, which large labels need. Booleans and integers
    below 32 bits become int32, because arithmetic on them would wrap around.
    """

    def target(leaf: Any) -> jax.Array:
        leaf = jnp.asarray(leaf)
        if jnp.issubdtype(leaf.dtype, jnp.floating):
            return in_dtype(leaf, dtype)
        return (
            leaf.astype(jnp.promote_types(leaf.dtype, jnp.int32))
            if leaf.dtype.itemsize < 4
            else leaf
        )

    return (
        jax.tree.map(target, y_true, is_leaf=_is_array_as_list),
        jax.tree.map(lambda leaf: in_dtype(leaf, dtype), y_pred, is_leaf=_is_array_as_list),
    )


def _is_array_as_list(value: Any) -> bool:
    """Returns whether lists hold the numbers of one array, rather than several arrays."""
    return isinstance(value, (list, tuple)) and all(
        isinstance(leaf, (bool, int, float, np.generic)) for leaf in jax.tree.leaves(value)
    )
