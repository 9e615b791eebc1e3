"""Checks that losses and metrics fit the model and the targets, before anything is computed.

A trace is enough for these checks.
"""

from typing import Any

import jax
import numpy as np

from tnt_jax.keras_compat.losses import Loss
from tnt_jax.keras_compat.metrics import Metric

# The errors that JAX raises if a function needs the values of a traced array.
_NEEDS_NUMBERS = (
    jax.errors.TracerArrayConversionError,
    jax.errors.ConcretizationTypeError,
    jax.errors.TracerIntegerConversionError,
)
_BY_INDEX = ("SparseCategoricalAccuracy", "SparseTopKCategoricalAccuracy")


def check_traceable(part: Loss | Metric, y_true: Any, y_pred: Any) -> None:
    """Checks that a custom loss or metric is written in JAX.

    Args:
        part: The loss or metric.
        y_true: Targets `[rows, ...]`.
        y_pred: Arrays, or shapes and dtypes, of outputs `[rows, ...]`.

    Raises:
        ValueError: If it needs the values of an array while it is traced.
    """
    kind, function = ("Loss", part.terms) if isinstance(part, Loss) else ("Metric", part.increments)
    try:
        jax.eval_shape(function, y_true, y_pred)
    except _NEEDS_NUMBERS as error:
        raise ValueError(
            f"{kind} {part.name!r} needs the values of its arrays ({type(error).__name__}), which "
            "are unknown while a step is traced. Write it with jax.numpy instead of NumPy, "
            "scikit-learn or Python's if and float, or compute it in a callback from model.predict."
        ) from None


def check_activation(loss: Loss, activation: str | None) -> None:
    """Checks that a loss of logits does not get probabilities.

    Args:
        loss: The loss.
        activation: The activation of the model's output: `"sigmoid"`, `"softmax"` or None.

    Raises:
        ValueError: If it does.
    """
    takes_logits = getattr(loss, "fn_kwargs", {}).get("from_logits") or getattr(
        loss, "takes_logits", None
    )
    if not takes_logits or activation is None:
        return
    own = hasattr(loss, "takes_logits")
    other = "" if own else f", or use tnt_jax.losses.{type(loss).__name__}(from_logits=False)"
    raise ValueError(
        f"Loss {loss.name!r} expects logits, but the model ends with a {activation}, so its "
        f"outputs are probabilities. Leave the {activation} out of the model{other}."
    )


def check_targets_of_metric(metric: Metric, y_true: Any, y_pred_shape: tuple[int, ...]) -> None:
    """Checks that the targets have the form that a metric needs.

    The form is class indices or distributions over the classes.

    Args:
        metric: The metric.
        y_true: Targets `[rows, ...]`.
        y_pred_shape: Shape of the outputs `[rows, ..., classes]`.

    Raises:
        ValueError: If the shapes do not match.
    """
    loss = getattr(metric, "loss", None)
    by_index = type(metric).__name__ in _BY_INDEX or getattr(loss, "targets", "") == "class_index"
    shape = np.shape(y_true)
    features = y_pred_shape[1:]
    if by_index and features and features[-1] > 1 and shape[1:] == features:
        raise ValueError(
            f"Metric {metric.name!r} needs integer labels of shape {shape[:-1]} for outputs of "
            f"{features[-1]} classes, but the targets have the shape {shape}. One-hot targets need "
            "'categorical_accuracy', 'categorical_crossentropy', or 'accuracy', which takes either."
        )
