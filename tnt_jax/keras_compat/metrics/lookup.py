"""From what a user passes as a metric to a `Metric`, and what the first batch tells about it."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable
from typing import Any

import numpy as np

from tnt_jax.keras_compat import keras_objects, losses, names
from tnt_jax.keras_compat.losses.base import Loss, LossFunctionWrapper
from tnt_jax.keras_compat.losses.crossentropy import kind_of_labels
from tnt_jax.keras_compat.metrics import accuracy, base, confusion, of_losses
from tnt_jax.keras_compat.metrics.base import MeanMetricWrapper, Metric
from tnt_jax.keras_compat.metrics.from_keras import from_keras

_log = logging.getLogger("tnt_jax")

_CLASSES: dict[str, Callable[[], Metric]] = {
    name: cls
    for module in (base, accuracy, of_losses, confusion)
    for name, cls in vars(module).items()
    if inspect.isclass(cls) and issubclass(cls, Metric) and cls.__module__ == module.__name__
    if name not in ("Metric", "MeanMetricWrapper", "ThresholdCounts", "_Count")
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


def get(
    identifier: Any, y_true_shape: tuple[int, ...] = (), y_pred_shape: tuple[int, ...] = (), *, loss: Loss | None = None
) -> Metric:
    """Returns the metric that `identifier` stands for.

    Args:
        identifier: A name as in Keras (`"mse"`, `"AUC"`, `"binary_accuracy"`); `"accuracy"` or `"acc"`, `"crossentropy"` or
            `"ce"`, chosen by the shapes as Keras does: binary for one output, sparse for labels without a class dimension,
            else categorical; a `Metric` or a subclass of it; a real `keras.metrics.Metric` whose updates
            add up; a `Loss`; or a callable `f(y_true, y_pred) -> values [batch, ...]`. Names that only Keras has need Keras on
            its JAX backend.
        y_true_shape: Shape of the targets; needed for the names that depend on it.
        y_pred_shape: Shape of the outputs of the model; needed for the same names.
        loss: The loss trained with: `"crossentropy"` takes logits if it does.

    Returns:
        A metric, named by the string or by the function.

    Raises:
        ValueError: If the name is unknown (the error lists the known ones), or it needs shapes that are missing.
    """
    if isinstance(identifier, Metric):
        return identifier
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
        f"A metric must be a name, a Metric, a keras.metrics.Metric or a callable f(y_true, y_pred), got {identifier!r}."
    )


def check_outputs(metric: Metric, outputs: Any) -> None:
    """Checks that a metric of probabilities gets them; see `losses.check_outputs`.

    Args:
        metric: The metric.
        outputs: Concrete outputs of the model for the first batch [batch, ...].

    Raises:
        ValueError: If the metric averages a loss that expects probabilities and the outputs are none.
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
            f"Metric {metric.name!r} expects probabilities, but the outputs of the model are not: {span}. If they are logits, "
            f"pass {name}(from_logits=True)."
        )
    if getattr(metric, "threshold", None) == 0.5:
        _log.warning(
            "Metric %r compares outputs with the threshold 0.5, but %s: these look like logits. A threshold of 0.0 counts a "
            "positive logit as class 1.",
            metric.name,
            span,
        )


def _by_name(name: str, y_true_shape: tuple[int, ...], y_pred_shape: tuple[int, ...], loss: Loss | None) -> Metric:
    family = _SHORT.get(name.lower(), name.lower())
    if family not in _BY_SHAPE:
        cls = names.find(name, _CLASSES, _ALIASES)
        return _only_in_keras(name, y_true_shape, y_pred_shape) if cls is None else cls()
    if not y_pred_shape:
        raise ValueError(f"The metric {name!r} depends on the shapes of targets and outputs: pass them, or name it in full.")
    cls = _BY_SHAPE[family][kind_of_labels(y_true_shape, y_pred_shape)]
    from_logits = family == "crossentropy" and getattr(loss, "fn_kwargs", {}).get("from_logits", False)
    return cls(from_logits=True) if from_logits else cls()


def _only_in_keras(name: str, y_true_shape: tuple[int, ...], y_pred_shape: tuple[int, ...]) -> Metric:
    cls = keras_objects.find_class(name, "metrics")
    if cls is None:
        listed = [*map(names.snake_case, _CLASSES), *_ALIASES, "accuracy", "acc", "crossentropy"]
        raise names.unknown(name, listed, kind="metric", advice=keras_objects.advice())
    return from_keras(cls(), y_true_shape, y_pred_shape)
