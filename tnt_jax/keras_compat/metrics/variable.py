"""The state of a metric: arrays that can be assigned, with the API of `keras.Variable`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from tnt_jax import _jax
from tnt_jax.train.loops.context import current_step


class Variable:
    """An array that can be replaced by another of its shape; arithmetic on it returns arrays.

    Args:
        value: The first value.
        name: Name of the variable.
        dtype: Dtype of all its values, that of `value` by default.

    Attributes:
        name: Name of the variable.
    """

    def __init__(self, value: Any, *, name: str | None = None, dtype: Any = None) -> None:
        # A NumPy array remains one until it is read: creating a metric must not open a device.
        self._value = (
            value.astype(jnp.dtype(dtype))
            if isinstance(value, np.ndarray)
            else jnp.asarray(value, dtype)
        )
        self.name = name

    @property
    def value(self) -> jax.Array:
        """The array; inside a traced function it may be a tracer."""
        return jnp.asarray(_jax.local_copy(self._value))

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the array."""
        return self._value.shape

    @property
    def ndim(self) -> int:
        """Number of dimensions of the array."""
        return self._value.ndim

    @property
    def dtype(self) -> str:
        """Name of the dtype of the array."""
        return self._value.dtype.name

    def assign(self, value: Any) -> jax.Array:
        """Replaces the array by one that broadcasts to its shape, and returns it.

        Raises:
            ValueError: If the shape does not fit.
        """
        if isinstance(value, Tracer) and current_step() is not None:
            raise TypeError(
                f"Variable {self.name!r} of a metric was assigned inside a distributed step. A "
                f"metric that is updated there must implement increments(y_true, y_pred, weight) "
                f"and compute(sums), which add up over ranks; result() and reset_state() belong "
                f"outside."
            )
        value = jnp.asarray(value).astype(self._value.dtype)
        if value.shape != self.shape and value.ndim:
            raise ValueError(
                f"Variable {self.name!r} has the shape {self.shape}: it cannot be assigned an "
                f"array of {value.shape}."
            )
        self._value = jnp.broadcast_to(value, self.shape)
        return self._value

    @property
    def stored(self) -> Any:
        """The array as it is stored, which may be a NumPy array."""
        return self._value

    def replace(self, value: Any) -> None:
        """Stores an array of the same shape and dtype as it is."""
        self._value = value

    @contextmanager
    def holding(self, value: Any) -> Iterator[None]:
        """Gives the variable another value temporarily."""
        before, self._value = self._value, jnp.asarray(value)
        try:
            yield
        finally:
            self._value = before

    def assign_add(self, value: Any) -> jax.Array:
        """Adds to the array and returns the sum."""
        return self.assign(self.value + jnp.asarray(value))

    def assign_sub(self, value: Any) -> jax.Array:
        """Subtracts from the array and returns the difference."""
        return self.assign(self.value - jnp.asarray(value))

    def numpy(self) -> np.ndarray:
        """Returns the array on the host."""
        return np.asarray(self.value)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        """Returns the array on the host, for NumPy."""
        return np.array(self.value, dtype, copy=copy)

    def __jax_array__(self) -> jax.Array:
        """Returns the array, for JAX."""
        return self.value

    def __repr__(self) -> str:
        """Returns name, shape, dtype and value."""
        return (
            f"<Variable name={self.name}, shape={self.shape}, dtype={self.dtype}, "
            f"value={self.value}>"
        )

    def __float__(self) -> float:
        return float(self.value)

    def __int__(self) -> int:
        return int(self.value)

    def __bool__(self) -> bool:
        return bool(self.value)

    def __len__(self) -> int:
        return len(self.value)

    def __getitem__(self, index: Any) -> jax.Array:
        return self.value[index]

    def __neg__(self) -> jax.Array:
        return -self.value

    def __add__(self, other: Any) -> jax.Array:
        return self.value + jnp.asarray(other)

    def __radd__(self, other: Any) -> jax.Array:
        return jnp.asarray(other) + self.value

    def __sub__(self, other: Any) -> jax.Array:
        return self.value - jnp.asarray(other)

    def __rsub__(self, other: Any) -> jax.Array:
        return jnp.asarray(other) - self.value

    def __mul__(self, other: Any) -> jax.Array:
        return self.value * jnp.asarray(other)

    def __rmul__(self, other: Any) -> jax.Array:
        return jnp.asarray(other) * self.value

    def __truediv__(self, other: Any) -> jax.Array:
        return self.value / jnp.asarray(other)

    def __rtruediv__(self, other: Any) -> jax.Array:
        return jnp.asarray(other) / self.value

    def __pow__(self, other: Any) -> jax.Array:
        return self.value ** jnp.asarray(other)

    def __lt__(self, other: Any) -> jax.Array:
        return self.value < jnp.asarray(other)

    def __le__(self, other: Any) -> jax.Array:
        return self.value <= jnp.asarray(other)

    def __gt__(self, other: Any) -> jax.Array:
        return self.value > jnp.asarray(other)

    def __ge__(self, other: Any) -> jax.Array:
        return self.value >= jnp.asarray(other)
