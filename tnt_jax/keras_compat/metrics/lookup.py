"""Finds the `Metric` for a user's argument, and checks it on the first batch."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any, overload

import numpy as np

from tnt_jax.keras_compat import configuration, keras_objects, losses
from tnt_jax.keras_compat.losses.base import Loss, LossFunctionWrapper
from tnt_jax.keras_compat.losses.crossentropy import kind_of_labels
from tnt_jax.keras_compat.metrics import accuracy, reduction
from tnt_jax.keras_compat.metrics.base import Metric
from tnt_jax.keras_compat.metrics.reduction import MeanMetricWrapper
from tnt_jax.keras_compat.metrics.stateful import StatefulMetric, from_keras, keeps_own_state
from tnt_jax.log import logger

_BY_SHAPE = {
    "accuracy": {
        "binary": "BinaryAccuracy",
        "class_index": "SparseCategoricalAccuracy",
        "distribution": "CategoricalAccuracy",
    },
    "crossentropy": {
        "binary": "BinaryCrossentropy",
        "class_index": "SparseCategoricalCrossentropy",
        "distribution": "CategoricalCrossentropy",
    },
}
_SHORT = {"acc": "accuracy", "ce": "crossentropy"}
_ALIASES = {
    "bce": "BinaryCrossentropy",
    "kld": "KLDivergence",
    "mae": "MeanAbsoluteError",
    "mape": "MeanAbsolutePercentageError",
    "mse": "MeanSquaredError",
    "msle": "MeanSquaredLogarithmicError",
}


def _classes() -> dict[str, Callable[..., Metric]]:
    """Returns all metrics by the names of their classes."""
    # Their files are imported when a name asks for one of them.
    from tnt_jax.keras_compat.metrics import confusion, f_score, iou, of_losses, regression

    modules = (reduction, accuracy, of_losses, regression, confusion, f_score, iou)
    found = keras_objects.classes_of(modules, Metric)
    return {n: cls for n, cls in found.items() if n not in ("MeanMetricWrapper", "ThresholdCounts")}


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
            return StatefulMetric(identifier, tuple(y_true_shape), tuple(y_pred_shape))
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
        logger.warning(
            "Metric %r compares outputs with the threshold 0.5, but %s: these look like logits. "
            "Pass tnt_jax.metrics.%s, which counts a positive logit as class 1.",
            metric.name,
            span,
            f"{type(metric).__name__}({argument}=0.0)",
        )


def _by_name(
    name: str, y_true_shape: tuple[int, ...], y_pred_shape: tuple[int, ...], loss: Loss | None
) -> Metric:
    family = _SHORT.get(name.lower(), name.lower())
    if family not in _BY_SHAPE:
        classes = _classes()
        aliases = {alias: classes[known] for alias, known in _ALIASES.items()}
        cls = keras_objects.find(name, classes, aliases)
        return _only_in_keras(name, y_true_shape, y_pred_shape) if cls is None else cls()
    if not y_pred_shape:
        raise ValueError(
            f"The metric {name!r} depends on the shapes of targets and outputs: pass them, or use "
            "its full name."
        )
    chosen = _BY_SHAPE[family][kind_of_labels(y_true_shape, y_pred_shape)]
    cls = getattr(accuracy, chosen) if family == "accuracy" else _classes()[chosen]
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
            *map(keras_objects.snake_case, _classes()),
            *_ALIASES,
            "accuracy",
            "acc",
            "crossentropy",
        ]
        raise keras_objects.unknown(name, listed, kind="metric", advice=keras_objects.advice())
    return from_keras(cls(), y_true_shape, y_pred_shape)
