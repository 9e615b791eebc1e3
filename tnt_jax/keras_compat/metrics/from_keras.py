"""Real Keras metrics as metrics of ours: their state is a sum over rows, or they are refused.

A Keras metric may do anything with its state. Only where updates add up can ranks work on parts of the data, so before a metric
is accepted its updates are tried on random rows: whole and in two parts, from two states, and with rows of weight 0.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from tnt_jax.keras_compat.keras_objects import require_jax_backend
from tnt_jax.keras_compat.losses.base import at_least_float32
from tnt_jax.keras_compat.metrics.base import MeanMetricWrapper, Metric
from tnt_jax.keras_compat.metrics.of_losses import R2Score

_PROBE_ROWS = 6


def from_keras(metric: Any, y_true_shape: tuple[int, ...], y_pred_shape: tuple[int, ...]) -> Metric:
    """Returns a Keras metric as one of ours.

    Args:
        metric: A `keras.metrics.Metric`; what its state holds is forgotten.
        y_true_shape: Shape of the targets [batch, ...].
        y_pred_shape: Shape of the outputs of the model [batch, ...].

    Raises:
        ValueError: If Keras runs on another backend than JAX, shapes are missing, or updates of the metric do not add up.
    """
    keras = require_jax_backend()
    is_mean = type(metric).update_state is keras.metrics.MeanMetricWrapper.update_state
    if is_mean and type(metric).result is keras.metrics.Mean.result:
        # The mean of a function of rows is known to add up, and ours knows what padding is.
        return MeanMetricWrapper(metric._fn, metric.name, **metric._fn_kwargs)
    if type(metric) is keras.metrics.R2Score and metric.class_aggregation and not metric.num_regressors:
        # Keras counts padding as samples, which its score without regressors does not use.
        return R2Score(metric.class_aggregation, name=metric.name)
    if not y_pred_shape:
        raise ValueError(f"The Keras metric {metric.name!r} needs the shapes of targets and outputs: pass them to metrics.get.")
    return KerasMetric(metric, y_true_shape, y_pred_shape)


class KerasMetric(Metric):
    """A `keras.metrics.Metric` whose updates were found to add up."""

    def __init__(self, metric: Any, y_true_shape: tuple[int, ...], y_pred_shape: tuple[int, ...]) -> None:
        super().__init__(metric.name)
        self.keras_metric = metric
        rows = _random_rows(y_true_shape, y_pred_shape)
        metric.update_state(*rows)  # Some metrics make their variables at the first update.
        metric.reset_state()
        self._initial = [np.asarray(variable.value) for variable in metric.variables]
        self._refuse_unless_additive(*rows)

    def increments(self, y_true: Any, y_pred: Any, weight: ArrayLike | None = None) -> list[jax.Array]:
        """Returns what an update adds to the variables of the Keras metric."""
        return self._added(self._initial, y_true, y_pred, weight)

    def compute(self, sums: list[jax.Array]) -> jax.Array:
        """Returns the result of the Keras metric."""
        keras = require_jax_backend()
        state = [jnp.asarray(start + added) for start, added in zip(self._initial, sums, strict=True)]
        with keras.StatelessScope(state_mapping=list(zip(self.keras_metric.variables, state, strict=True))):
            # Converted inside the scope: a result may be one of the variables, whose value is another outside.
            return keras.ops.convert_to_tensor(self.keras_metric.result())

    def _added(self, state: list[Any], y_true: Any, y_pred: Any, weight: ArrayLike | None) -> list[jax.Array]:
        state = [jnp.asarray(value) for value in state]
        y_pred = jax.tree.map(at_least_float32, y_pred)
        if weight is not None and jnp.issubdtype(self.keras_metric.dtype, jnp.integer):
            weight = jnp.asarray(weight).astype(self.keras_metric.dtype)
        weights = {} if weight is None else {"sample_weight": weight}
        updated = self.keras_metric.stateless_update_state(state, y_true, y_pred, **weights)
        return [new - old for new, old in zip(updated, state, strict=True)]

    def _refuse_unless_additive(self, y_true: np.ndarray, y_pred: np.ndarray) -> None:
        try:
            half = np.arange(_PROBE_ROWS) < _PROBE_ROWS // 2
            whole = self.increments(y_true, y_pred)
            first, second = (self.increments(y_true[part], y_pred[part]) for part in (half, ~half))
            later = self._added([start + added for start, added in zip(self._initial, first, strict=True)], y_true, y_pred, None)
            masked = self.increments(y_true, y_pred, half.astype(np.float32))
        except TypeError as error:
            raise ValueError(self._refusal(f"its update_state failed on random rows with sample_weight: {error}")) from error
        summed = [a + b for a, b in zip(first, second, strict=True)]
        claims = {
            "updates of two parts do not add up to the update of the whole": (whole, summed),
            "an update depends on what the state holds": (whole, later),
            "rows of sample_weight 0 change the state": (first, masked),
        }
        for problem, (left, right) in claims.items():
            if not all(np.allclose(a, b, rtol=1e-4, atol=1e-5) for a, b in zip(left, right, strict=True)):
                raise ValueError(self._refusal(problem))

    def _refusal(self, problem: str) -> str:
        return (
            f"The Keras metric {self.name!r} cannot be computed from parts of the data: {problem}. Use a tnt_jax.metrics class, "
            "or compute it from the result of predict."
        )


def _random_rows(y_true_shape: tuple[int, ...], y_pred_shape: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    """Returns targets 0 and 1, and outputs in (0, 1), as a metric of classes or of numbers takes them."""
    rng = np.random.default_rng(0)
    y_true = rng.integers(0, 2, size=(_PROBE_ROWS, *y_true_shape[1:])).astype(np.float32)
    return y_true, rng.random((_PROBE_ROWS, *y_pred_shape[1:])).astype(np.float32)
