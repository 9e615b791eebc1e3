"""What every metric shares: sums that add up over rows, ranks and steps, and a result computed from them.

```python
sums = metric.increments(y_true, y_pred, weight)   # pure, on part of a batch, inside a compiled step
value = metric.compute(sums_of_all_parts)          # once
```
`update_state`, `result` and `reset_state` do the same with a state, as in Keras.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from tnt_jax.keras_compat.losses.base import Loss, at_least_float32, divide_no_nan, match_ranks
from tnt_jax.keras_compat.names import snake_case
from tnt_jax.keras_compat.recorded import Recorded


class Metric(Recorded):
    """Base class of metrics.

    Subclasses implement `increments` and `compute`. Increments are plain sums over rows: those of a batch equal the sum
    of those of its parts, so the result does not depend on how many ranks worked on it.

    Attributes:
        name: Name of the metric in logs.
    """

    def __init__(self, name: str | None = None) -> None:
        self.name = name or snake_case(type(self).__name__)
        self._sums: Any = None

    def increments(self, y_true: Any, y_pred: Any, weight: ArrayLike | None = None) -> Any:
        """Returns what these rows add to the sums.

        Args:
            y_true: Targets [rows, ...].
            y_pred: Outputs of the model [rows, ...].
            weight: Weight of each row [rows], or of each value. A row of weight 0 adds nothing, whatever it holds.

        Returns:
            A pytree of arrays, of the same structure and shapes for any number of rows.
        """
        raise NotImplementedError(f"{type(self).__name__} must implement increments(y_true, y_pred, weight) -> sums.")

    def compute(self, sums: Any) -> jax.Array:
        """Returns the metric from the sums of all rows."""
        raise NotImplementedError(f"{type(self).__name__} must implement compute(sums) -> scalar.")

    def update_state(self, *args: Any, sample_weight: ArrayLike | None = None) -> None:
        """Adds rows to the state.

        Args:
            *args: What `increments` takes, `y_true` and `y_pred`.
            sample_weight: Weights [rows], or one per value.
        """
        sums = self.increments(*args, weight=sample_weight)
        self._sums = sums if self._sums is None else jax.tree.map(jnp.add, self._sums, sums)

    def result(self) -> jax.Array:
        """Returns the metric of all rows since `reset_state`; 0 if there were none."""
        return jnp.zeros(()) if self._sums is None else self.compute(self._sums)

    def reset_state(self) -> None:
        """Forgets all rows."""
        self._sums = None

    def __call__(self, *args: Any, sample_weight: ArrayLike | None = None) -> jax.Array:
        """Adds rows to the state and returns the result."""
        self.update_state(*args, sample_weight=sample_weight)
        return self.result()


class Mean(Metric):
    """Weighted mean of values: `Mean().update_state(values, sample_weight=None)`."""

    def __init__(self, name: str = "mean") -> None:
        super().__init__(name)

    def increments(self, values: Any, weight: ArrayLike | None = None) -> dict[str, jax.Array]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Returns the weighted sum of values [rows, ...] and the sum of the weights; a scalar is one row."""
        return mean_sums(jnp.atleast_1d(jnp.asarray(values)), weight)

    def compute(self, sums: dict[str, jax.Array]) -> jax.Array:
        """Returns total / count, 0 if the count is 0."""
        return divide_no_nan(sums["total"], sums["count"])


class Sum(Metric):
    """Weighted sum of values: `Sum().update_state(values, sample_weight=None)`."""

    def __init__(self, name: str = "sum") -> None:
        super().__init__(name)

    def increments(self, values: Any, weight: ArrayLike | None = None) -> jax.Array:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Returns the weighted sum of values [rows, ...]."""
        values = at_least_float32(jnp.atleast_1d(jnp.asarray(values)))
        values, weight = align(values, weight, jnp.sum)
        return jnp.sum(values if weight is None else weigh(values, weight))

    def compute(self, sums: jax.Array) -> jax.Array:
        """Returns the sum."""
        return sums


class MeanMetricWrapper(Metric):
    """Mean over rows of a function `fn(y_true, y_pred, **fn_kwargs) -> values [rows, ...]`.

    Dimensions after the first are averaged within a row, as in Keras.

    Attributes:
        loss: The loss whose values are averaged, or None.
    """

    def __init__(self, fn: Callable[..., Any] | Loss, name: str | None = None, **fn_kwargs: Any) -> None:
        super().__init__(name or getattr(fn, "name", None) or getattr(fn, "__name__", None))
        self.loss = fn if isinstance(fn, Loss) else None
        self.fn = fn.call if isinstance(fn, Loss) else fn
        self.fn_kwargs = fn_kwargs

    def increments(self, y_true: Any, y_pred: Any, weight: ArrayLike | None = None) -> dict[str, jax.Array]:
        """Returns the weighted sum of the values [rows, ...] and the sum of the weights."""
        y_true, y_pred = jax.tree.map(jnp.asarray, y_true), jax.tree.map(at_least_float32, y_pred)
        values = jnp.asarray(self.fn(y_true, y_pred, **self.fn_kwargs))
        rows = jax.tree.leaves(y_pred)[0].shape[:1]
        if values.ndim == 0 or values.shape[:1] != rows:
            raise ValueError(
                f"Metric {self.name!r} returned values of shape {values.shape} for outputs of {rows[0]} rows. A mean over "
                "parts of a batch needs one value per row: return [batch, ...] and leave the mean over the batch to the metric."
            )
        return mean_sums(values, weight)

    def compute(self, sums: dict[str, jax.Array]) -> jax.Array:
        """Returns total / count, 0 if the count is 0."""
        return divide_no_nan(sums["total"], sums["count"])


def mean_sums(values: jax.Array, weight: ArrayLike | None) -> dict[str, jax.Array]:
    """Returns the weighted sum of values [rows, ...] averaged within rows, and the sum of the weights."""
    values, weight = align(at_least_float32(values), weight, jnp.mean)
    if weight is None:
        return {"total": jnp.sum(_within_rows(values)), "count": jnp.full((), values.shape[0], values.dtype)}
    total = jnp.sum(_within_rows(weigh(values, weight)))
    return {"total": total, "count": jnp.sum(_within_rows(weight))}


def align(values: jax.Array, weight: ArrayLike | None, reduce: Callable[..., jax.Array]) -> tuple[jax.Array, jax.Array | None]:
    """Returns values and weights of one shape; `reduce` removes the dimensions that the weights do not have.

    Raises:
        ValueError: If the weights fit neither the rows nor the values.
    """
    if weight is None:
        return values, None
    given = jnp.asarray(weight)
    shape = values.shape
    values, weight = match_ranks(values, given.astype(values.dtype))
    if values.ndim > weight.ndim:
        values = reduce(values, axis=tuple(range(weight.ndim, values.ndim)))
    if weight.ndim != values.ndim or any(w not in (1, v) for w, v in zip(weight.shape, values.shape, strict=True)):
        raise ValueError(
            f"Weights of shape {given.shape} do not fit values of shape {shape}: pass one per row, {shape[:1]}, or one per value."
        )
    return values, jnp.broadcast_to(weight, values.shape)


def weigh(values: jax.Array, weight: jax.Array) -> jax.Array:
    """Returns values * weight, and 0 where the weight is 0 even if the value is NaN or infinite."""
    return jnp.where(weight == 0, 0, values * weight)


def _within_rows(values: jax.Array) -> jax.Array:
    return jnp.mean(values, axis=tuple(range(1, values.ndim)))
