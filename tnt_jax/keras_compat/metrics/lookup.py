"""Finds the `Metric` for a user's argument, and checks it on the first batch."""

import inspect
import logging
from collections.abc import Callable, Mapping
from typing import Any, overload

import jax
import jax.numpy as jnp
import numpy as np

from tnt_jax.keras_compat import configuration, keras_objects, losses
from tnt_jax.keras_compat.keras_objects import require_jax_backend
from tnt_jax.keras_compat.losses.base import Loss, LossFunctionWrapper
from tnt_jax.keras_compat.losses.crossentropy import kind_of_labels
from tnt_jax.keras_compat.metrics import (
    accuracy,
    confusion,
    f_score,
    iou,
    of_losses,
    reduction,
    regression,
)
from tnt_jax.keras_compat.metrics.base import Metric
from tnt_jax.keras_compat.metrics.reduction import MeanMetricWrapper
from tnt_jax.keras_compat.metrics.regression import R2Score
from tnt_jax.keras_compat.metrics.stateful import StatefulMetric, keeps_own_state


def from_keras(metric: Any, y_true_shape: tuple[int, ...], y_pred_shape: tuple[int, ...]) -> Metric:
    """Returns a Keras metric as a tnt_jax metric."""
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


_log = logging.getLogger("tnt_jax")

_MODULES = (reduction, accuracy, of_losses, regression, confusion, confusion, f_score, iou)
_CLASSES: dict[str, Callable[..., Metric]] = {
    name: cls
    for name, cls in keras_objects.classes_of(_MODULES, Metric).items()
    if name not in ("MeanMetricWrapper", "ThresholdCounts")
}
_ALIASES: dict[str, Callable[[], Metric]] = {
    "bce": of_losses.BinaryCrossentropy,
    "kld": of_losses.KLDivergence,
    "mae": of_losses.MeanAbsoluteError,
    "mape": of_losses.MeanAbsolutePercentageError,
    "mse": of_losses.MeanSquaredError,
    "msle": of_losses.MeanSquaredLogarithmicError,
}
_BY_SHAPE: dict[str, dict[str, Callable[..., Metric]]] = {
    "accuracy": {
        "binary": accuracy.BinaryAccuracy,
        "class_index": accuracy.SparseCategoricalAccuracy,
        "distribution": accuracy.CategoricalAccuracy,
    },
    "crossentropy": {
        "binary": of_losses.BinaryCrossentropy,
        "class_index": of_losses.SparseCategoricalCrossentropy,
        "distribution": of_losses.CategoricalCrossentropy,
    },
}
_SHORT = {"acc": "accuracy", "ce": "crossentropy"}


@overload
def get(identifier: None) -> None: ...
@overload
def get(
    identifier: Any,
    y_true_shape: tuple[int, ...] = (),
    y_pred_shape: tuple[int, ...] = (),
    *,
    loss: Loss | None = None,
) -> Metric: ...
def get(
    identifier: Any,
    y_true_shape: tuple[int, ...] = (),
    y_pred_shape: tuple[int, ...] = (),
    *,
    loss: Loss | None = None,
) -> Metric | None:
    """Returns the metric that `identifier` stands for.

    Args:
        identifier: A name as in Keras (`"mse"`, `"AUC"`, `"binary_accuracy"`); `"accuracy"` or
            `"acc"`, `"crossentropy"` or `"ce"`, chosen by the shapes as Keras does: binary for one
            output, sparse for labels without a class dimension, else categorical; a `Metric` or a
            subclass of it; a real `keras.metrics.Metric` whose updates add up; a configuration as
            `serialize` writes it; a `Loss`; or a callable `f(y_true, y_pred) -> values [batch,
            ...]`; None gives None. Names that only Keras has need Keras on its JAX backend.
        y_true_shape: Shape of the targets; needed for the names that depend on it.
        y_pred_shape: Shape of the outputs of the model; needed for the same names.
        loss: The loss trained with: `"crossentropy"` takes logits if it does.

    Returns:
        A metric, named after the string or the function.

    Raises:
        ValueError: If the name is unknown (the error lists the known ones), or it needs shapes that
            are missing.
    """
    if identifier is None:
        return None
    if isinstance(identifier, Metric):
        if keeps_own_state(identifier):
            return StatefulMetric(identifier, *_tuples(y_true_shape, y_pred_shape))
        return identifier
    if isinstance(identifier, Mapping):
        return get(deserialize(identifier), y_true_shape, y_pred_shape, loss=loss)
    if isinstance(identifier, str):
        metric = _by_name(identifier, tuple(y_true_shape), tuple(y_pred_shape), loss)
        metric.name = identifier
        return metric
    if inspect.isclass(identifier):
        identifier = identifier()
        return get(identifier, y_true_shape, y_pred_shape)
    if keras_objects.is_keras(identifier, "metrics.Metric"):
        return from_keras(identifier, tuple(y_true_shape), tuple(y_pred_shape))
    if isinstance(identifier, Loss) or callable(identifier):
        as_loss = losses.get(identifier)
        return MeanMetricWrapper(identifier if type(as_loss) is LossFunctionWrapper else as_loss)
    raise ValueError(
        "A metric must be a name, a Metric, a keras.metrics.Metric or a callable f(y_true, "
        f"y_pred), got {identifier!r}."
    )


def serialize(metric: Any) -> dict[str, Any]:
    """Returns the configuration of a metric or of a function, as `keras.metrics.serialize` does."""
    return configuration.serialize(metric)


def deserialize(config: Any, custom_objects: Mapping[str, Any] | None = None) -> Any:
    """Returns the metric or function that `serialize`, or Keras's own, wrote, or that has a name.

    Names are also those of the user's `custom_objects`; an unknown one raises a ValueError.
    """
    return configuration.deserialize(config, "metrics", custom_objects)


def check_outputs(metric: Metric, outputs: Any) -> None:
    """Raises a ValueError if a metric of probabilities gets others; see `losses.check_outputs`.

    Outputs are those of the model for the first batch [batch, ...].
    """
    loss = getattr(metric, "loss", None)
    if loss is not None:
        losses.check_outputs(loss, outputs)
    if np.size(outputs) == 0 or (np.nanmin(outputs) >= 0 and np.nanmax(outputs) <= 1):
        return
    span = f"they range from {np.nanmin(outputs):.4g} to {np.nanmax(outputs):.4g}"
    if loss is None and getattr(metric, "expects_probabilities", False):
        name = f"tnt_jax.metrics.{type(metric).__name__}"
        raise ValueError(
            f"Metric {metric.name!r} expects probabilities, but the outputs of the model are not: "
            f"{span}. If they are logits, pass {name}(from_logits=True)."
        )
    if getattr(metric, "threshold", None) == 0.5:
        argument = "threshold" if isinstance(metric, accuracy.BinaryAccuracy) else "thresholds"
        _log.warning(
            "Metric %r compares outputs with the threshold 0.5, but %s: these look like logits. "
            "Pass tnt_jax.metrics.%s, which counts a positive logit as class 1.",
            metric.name,
            span,
            f"{type(metric).__name__}({argument}=0.0)",
        )


def _tuples(*shapes: Any) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(shape) for shape in shapes)


def _by_name(
    name: str, y_true_shape: tuple[int, ...], y_pred_shape: tuple[int, ...], loss: Loss | None
) -> Metric:
    family = _SHORT.get(name.lower(), name.lower())
    if family not in _BY_SHAPE:
        cls = keras_objects.find(name, _CLASSES, _ALIASES)
        return _only_in_keras(name, y_true_shape, y_pred_shape) if cls is None else cls()
    if not y_pred_shape:
        raise ValueError(
            f"The metric {name!r} depends on the shapes of targets and outputs: pass them, or use "
            "its full name."
        )
    cls = _BY_SHAPE[family][kind_of_labels(y_true_shape, y_pred_shape)]
    from_logits = family == "crossentropy" and getattr(loss, "fn_kwargs", {}).get(
        "from_logits", False
    )
    return cls(from_logits=True) if from_logits else cls()


def _only_in_keras(
    name: str, y_true_shape: tuple[int, ...], y_pred_shape: tuple[int, ...]
) -> Metric:
    cls = keras_objects.find_class(name, "metrics")
    if cls is None:
        listed = [
            *map(keras_objects.snake_case, _CLASSES),
            *_ALIASES,
            "accuracy",
            "acc",
            "crossentropy",
        ]
        raise keras_objects.unknown(name, listed, kind="metric", advice=keras_objects.advice())
    return from_keras(cls(), y_true_shape, y_pred_shape)
