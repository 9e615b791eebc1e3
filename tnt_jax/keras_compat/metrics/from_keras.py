"""Keras metrics as tnt_jax metrics: their state is a sum over rows, or they are refused."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tnt_jax.keras_compat.keras_objects import require_jax_backend
from tnt_jax.keras_compat.metrics.base import Metric
from tnt_jax.keras_compat.metrics.reduction import MeanMetricWrapper
from tnt_jax.keras_compat.metrics.regression import R2Score
from tnt_jax.keras_compat.metrics.stateful import StatefulMetric


def from_keras(metric: Any, y_true_shape: tuple[int, ...], y_pred_shape: tuple[int, ...]) -> Metric:
    """Returns a Keras metric as a tnt_jax metric.

    Args:
        metric: A `keras.metrics.Metric`; its state is cleared.
        y_true_shape: Shape of the targets [batch, ...].
        y_pred_shape: Shape of the outputs of the model [batch, ...].

    Raises:
        ValueError: If Keras uses a backend other than JAX, shapes are missing, or updates of the
            metric do not add up.
    """
    keras = require_jax_backend()
    is_mean = type(metric).update_state is keras.metrics.MeanMetricWrapper.update_state
    if is_mean and type(metric).result is keras.metrics.Mean.result:
        # The mean of a function of rows is known to add up, and tnt_jax's metric handles padding.
        mean = MeanMetricWrapper(metric._fn, metric.name, metric.dtype, **metric._fn_kwargs)
        mean.keeps_sums = _keeps_state(metric)
        return mean
    if type(metric) is keras.metrics.R2Score:
        # Keras counts padding as samples.
        return R2Score(metric.class_aggregation, metric.num_regressors, metric.name, metric.dtype)
    return KerasMetric(metric, y_true_shape, y_pred_shape)


def _keeps_state(metric: Any) -> bool:
    """Returns whether `reset_state` of a Keras metric leaves its state as it is."""
    for variable in metric.variables:
        variable.assign(jnp.ones_like(variable.value))
    metric.reset_state()
    is_kept = all(np.all(variable.value) for variable in metric.variables)
    for variable in metric.variables:
        variable.assign(jnp.zeros_like(variable.value))
    return is_kept


class KerasMetric(StatefulMetric):
    """A `keras.metrics.Metric` whose updates were found to add up."""

    def compute(self, sums: list[jax.Array]) -> jax.Array:
        """Returns the result of the Keras metric."""
        keras = require_jax_backend()
        state = [
            jnp.asarray(start + added) for start, added in zip(self._initial, sums, strict=True)
        ]
        with keras.StatelessScope(
            state_mapping=list(zip(self.stateful.variables, state, strict=True))
        ):
            # Converted inside the scope: a result may be one of the variables, which has another
            # value outside.
            return keras.ops.convert_to_tensor(self.stateful.result())
