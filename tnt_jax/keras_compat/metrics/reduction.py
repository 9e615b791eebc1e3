"""Means and sums of values over rows, and means of functions of targets and outputs."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from tnt_jax.keras_compat.keras_objects import mask_of_outputs
from tnt_jax.keras_compat.losses.base import Loss, divide_no_nan, in_dtype, standardized
from tnt_jax.keras_compat.metrics.base import Metric
from tnt_jax.train.loops.context import weight_of_real_rows
from tnt_jax.train.steps.row_weights import match_ranks

_TOTAL_AND_COUNT: dict[str, tuple[int, ...]] = {"total": (), "count": ()}


class Mean(Metric):
    """Weighted mean of values: `Mean().update_state(values, sample_weight=None)`."""

    def __init__(self, name: str | None = "mean", dtype: Any = None) -> None:
        super().__init__(dtype, name)
        self._declare(_TOTAL_AND_COUNT)

    def increments(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, values: Any, weight: ArrayLike | None = None
    ) -> dict[str, jax.Array]:
        """Returns the weighted sum of values [rows, ...] or a scalar, and that of the weights."""
        return mean_sums(jnp.atleast_1d(in_dtype(values, self.dtype)), weight)

    def compute(self, sums: dict[str, jax.Array]) -> jax.Array:
        """Returns total / count, 0 if the count is 0."""
        return quotient(sums, self.dtype)

    def update_state(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, values: Any, sample_weight: ArrayLike | None = None
    ) -> None:
        """Adds values [rows, ...] to the state."""
        self._add(self.increments(values, weight_of_real_rows(sample_weight, values)))


class Sum(Metric):
    """Weighted sum of values: `Sum().update_state(values, sample_weight=None)`."""

    def __init__(self, name: str | None = "sum", dtype: Any = None) -> None:
        super().__init__(dtype, name)
        self._declare({"total": ()})

    def increments(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, values: Any, weight: ArrayLike | None = None
    ) -> dict[str, jax.Array]:
        """Returns the weighted sum of values [rows, ...]."""
        values = jnp.atleast_1d(in_dtype(values, self.dtype))
        values, weight = align(values, weight, jnp.sum)
        return {"total": sum_of(values if weight is None else weigh(values, weight))}

    def compute(self, sums: dict[str, jax.Array]) -> jax.Array:
        """Returns the sum."""
        return jnp.asarray(sums["total"]).astype(self.dtype)

    def update_state(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, values: Any, sample_weight: ArrayLike | None = None
    ) -> None:
        """Adds values [rows, ...] to the state."""
        self._add(self.increments(values, weight_of_real_rows(sample_weight, values)))


class MeanMetricWrapper(Metric):
    """Mean over rows of a function `fn(y_true, y_pred, **kwargs) -> values [rows, ...]`.

    Dimensions after the first are averaged within a row, as in Keras. `loss` is that whose values
    are averaged, or None.
    """

    def __init__(
        self,
        fn: Callable[..., Any] | Loss,
        name: str | None = None,
        dtype: Any = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(dtype, name or getattr(fn, "name", None) or getattr(fn, "__name__", None))
        self.loss = fn if isinstance(fn, Loss) else None
        self.fn = fn.call if isinstance(fn, Loss) else fn
        self.fn_kwargs = kwargs
        self._declare(_TOTAL_AND_COUNT)

    def increments(
        self, y_true: Any, y_pred: Any, weight: ArrayLike | None = None
    ) -> dict[str, jax.Array]:
        """Returns the weighted sum of the values [rows, ...] and the sum of the weights."""
        values = self._values(y_true, y_pred)
        rows = jnp.shape(jax.tree.leaves(y_pred)[0])[:1]
        if values.ndim == 0 or values.shape[:1] != rows:
            raise ValueError(
                f"Metric {self.name!r} returned values of shape {values.shape} for outputs of "
                f"{rows[0]} rows. A mean over parts of a batch needs one value per row: return "
                "[batch, ...] and leave the mean over the batch to the metric."
            )
        return mean_sums(values, weight)

    def compute(self, sums: dict[str, jax.Array]) -> jax.Array:
        """Returns total / count, 0 if the count is 0."""
        return quotient(sums, self.dtype)

    def update_state(
        self, y_true: Any, y_pred: Any, sample_weight: ArrayLike | None = None
    ) -> None:
        """Adds rows to the state, except values that a Keras mask on `y_pred` excludes."""
        weight = weight_of_real_rows(self.without_ignored(y_true, y_pred, sample_weight))
        weight = and_valid(weight, mask_of_outputs(y_pred))
        # A whole batch may have a single value, which training refuses; see `increments`.
        self._add(mean_sums(jnp.atleast_1d(self._values(y_true, y_pred)), weight))

    def without_ignored(self, y_true: Any, y_pred: Any, sample_weight: ArrayLike | None) -> Any:
        """Returns the user's weights, with 0 for values that the loss ignores.

        As in Keras, these count as 0 without weights, and not at all with weights.
        """
        if sample_weight is None or self.loss is None:
            return sample_weight
        return and_valid(sample_weight, self.loss.valid(*standardized(y_true, y_pred)))

    def _values(self, y_true: Any, y_pred: Any) -> jax.Array:
        return in_dtype(
            self.fn(*standardized(y_true, y_pred, self.dtype), **self.fn_kwargs), self.dtype
        )


def quotient(sums: dict[str, jax.Array], dtype: str) -> jax.Array:
    """Returns total / count, 0 if the count is 0."""
    return divide_no_nan(sums["total"], sums["count"]).astype(dtype)


def mean_sums(values: jax.Array, weight: ArrayLike | None) -> dict[str, jax.Array]:
    """Returns the weighted sum of values [rows, ...] averaged within rows, and that of weights."""
    values, weight = align(values, weight, jnp.mean)
    if weight is None:
        total = sum_of(_within_rows(values))
        return {"total": total, "count": jnp.full((), values.shape[0], total.dtype)}
    return {
        "total": sum_of(_within_rows(weigh(values, weight))),
        "count": sum_of(_within_rows(weight)),
    }


def sum_of(values: jax.Array) -> jax.Array:
    """Returns the sum in integers or at least float32: half precision is too coarse for sums."""
    is_integer = jnp.issubdtype(values.dtype, jnp.integer)
    return jnp.sum(
        values, dtype=values.dtype if is_integer else jnp.promote_types(values.dtype, jnp.float32)
    )


def align(
    values: jax.Array, weight: ArrayLike | None, reduce: Callable[..., jax.Array]
) -> tuple[jax.Array, jax.Array | None]:
    """Returns values and weights of one shape, where a scalar weight applies to all rows.

    `reduce` removes the dimensions that the weights do not have.
    """
    if weight is None:
        return values, None
    given = jnp.asarray(weight)
    shape = values.shape
    values, weight = match_ranks(values, jnp.atleast_1d(given.astype(values.dtype)))
    if values.ndim > weight.ndim:
        values = reduce(values, axis=tuple(range(weight.ndim, values.ndim)))
    if weight.ndim != values.ndim or any(
        w not in (1, v) for w, v in zip(weight.shape, values.shape, strict=True)
    ):
        raise ValueError(
            f"Weights of shape {given.shape} do not fit values of shape {shape}: pass one per row, "
            f"{shape[:1]}, or one per value."
        )
    return values, jnp.broadcast_to(weight, values.shape)


def and_valid(weight: ArrayLike | None, valid: ArrayLike | None) -> Any:
    """Returns weights, of values or of rows, that are 0 for invalid values."""
    if valid is None:
        return weight
    valid = jnp.asarray(valid).astype(jnp.float32)
    if weight is None:
        return valid
    valid, weight = match_ranks(valid, jnp.asarray(weight))
    return valid * weight.reshape(*weight.shape, *(1,) * (valid.ndim - weight.ndim))


def weigh(values: jax.Array, weight: jax.Array) -> jax.Array:
    """Returns values * weight, and 0 if the weight is 0, even if the value is NaN or infinite."""
    return jnp.where(weight == 0, 0, values * weight)


def _within_rows(values: jax.Array) -> jax.Array:
    return jnp.mean(values, axis=tuple(range(1, values.ndim)))
