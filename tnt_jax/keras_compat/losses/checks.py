"""Checks of a loss on the first batch: logits or probabilities, range of labels, shapes.

They run on the host, on concrete arrays; inside a compiled step nothing can be checked.
"""

from typing import Any

import numpy as np

from tnt_jax.keras_compat.losses.base import Loss
from tnt_jax.keras_compat.losses.crossentropy import kind_of_labels

_SUM_TOLERANCE = 1e-2  # bfloat16 rounds a probability by up to 2**-9 of its size.


def check_outputs(loss: Loss, outputs: Any) -> None:
    """Raises a ValueError, with the remedies, if a loss of probabilities gets others.

    Outputs are the model's for the first batch [batch, ...]. NaN does not indicate logits; it is
    left to callbacks that check for NaN.
    """
    if not loss.expects_probabilities:
        return
    outputs = np.asarray(outputs, np.float64)
    is_independent = loss.targets == "binary" or (
        loss.targets == "by_shape" and outputs.shape[-1] == 1
    )
    problem = _range_problem(outputs) or (
        "" if is_independent else _sum_problem(outputs, loss.axis)
    )
    if problem:
        layer = "sigmoid" if is_independent else "softmax"
        raise ValueError(
            f"Loss {loss.name!r} expects probabilities, but the outputs of the model are not: "
            f"{problem}. If they are logits, use a loss that takes logits, "
            f"{_logits_loss(loss, is_independent)}; or end the model with jax.nn.{layer}."
        )


def check_labels(loss: Loss, y_true: Any, y_pred_shape: tuple[int, ...]) -> None:
    """Raises a ValueError if the targets have not the kind, range and shape that a loss takes.

    They are those of the first batch [batch, ...]; the error names the row and the value.
    """
    targets = np.asarray(y_true)
    shape = tuple(y_pred_shape)
    kind = kind_of_labels(targets.shape, shape) if loss.targets == "by_shape" else loss.targets
    if targets.shape[:1] != shape[:1]:
        raise ValueError(
            f"Loss {loss.name!r} needs as many targets as outputs, got shapes {targets.shape} and "
            f"{shape}."
        )
    if kind == "class_index":
        _check_class_index(loss, targets, shape)
    elif kind != "any":
        _check_same_shape(loss, kind, targets, shape)
    if kind == "binary":
        _require(
            loss, (targets >= 0) & (targets <= 1) | np.isnan(targets), targets, "targets in [0, 1]"
        )
    if kind == "sign":
        is_sign = (targets == 1) | (targets == (-1 if (targets == -1).any() else 0))
        _require(loss, is_sign, targets, "targets that are -1 and 1, or 0 and 1")


def _range_problem(outputs: np.ndarray) -> str:
    numbers = outputs[~np.isnan(outputs)]
    if numbers.size == 0 or (numbers.min() >= 0 and numbers.max() <= 1 + _SUM_TOLERANCE):
        return ""
    return f"they range from {numbers.min():.4g} to {numbers.max():.4g}"


def _sum_problem(outputs: np.ndarray, axis: int) -> str:
    sums = outputs.sum(axis=axis)
    wrong = np.argwhere(np.abs(sums - 1) > _SUM_TOLERANCE)  # A NaN sum compares false.
    if wrong.size:
        return f"row {wrong[0][0]} sums to {sums[tuple(wrong[0])]:.4g} over the classes"
    return ""


def _logits_loss(loss: Loss, is_independent: bool) -> str:
    if "from_logits" in getattr(loss, "fn_kwargs", {}):
        return f"tnt_jax.losses.{type(loss).__name__}(from_logits=True)"
    kind = "Binary" if is_independent else "Categorical"
    return f"for instance tnt_jax.losses.{kind}Crossentropy(from_logits=True)"


def _check_class_index(loss: Loss, labels: np.ndarray, shape: tuple[int, ...]) -> None:
    expected = tuple(np.delete(shape, loss.axis).tolist())
    given = labels.shape
    if labels.ndim == len(shape) and given[loss.axis] == 1:
        labels = np.squeeze(labels, loss.axis)
    if labels.shape != expected:
        hint = " One-hot targets need 'categorical_crossentropy'." if given == shape else ""
        raise ValueError(
            f"Loss {loss.name!r} needs integer labels of shape {expected} for outputs of shape "
            f"{shape}, got {given}.{hint}"
        )
    size = shape[loss.axis]
    is_label = (labels >= 0) & (labels < size) & (labels == np.round(labels))
    is_label |= labels == getattr(loss, "ignore_class", None)
    _require(loss, is_label, labels, f"integer labels in [0, {size}) for {size} outputs")


def _check_same_shape(loss: Loss, kind: str, targets: np.ndarray, shape: tuple[int, ...]) -> None:
    short, long = sorted((targets.shape, shape), key=len)
    if short != long and (*short, 1) != long:
        is_index = kind == "distribution" and targets.shape in (shape[:-1], (*shape[:-1], 1))
        hint = " Integer labels need 'sparse_categorical_crossentropy'." if is_index else ""
        raise ValueError(
            f"Loss {loss.name!r} needs targets of the outputs' shape {shape}, got "
            f"{targets.shape}.{hint}"
        )


def _require(loss: Loss, is_allowed: np.ndarray, targets: np.ndarray, needed: str) -> None:
    wrong = np.argwhere(~is_allowed)
    if wrong.size:
        first = tuple(wrong[0].tolist())
        where = f"row {first[0]}" + (f" at {first[1:]}" if targets[0].size > 1 else "")
        raise ValueError(
            f"Loss {loss.name!r} needs {needed}; {where} of this batch holds {targets[first]} "
            f"({len(wrong)} such values in all)."
        )
