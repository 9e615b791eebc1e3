"""From what a user passes as a loss to a `Loss`."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from tnt_jax.keras_compat import names
from tnt_jax.keras_compat.losses import crossentropy, crossentropy_classes, margin, regression
from tnt_jax.keras_compat.losses.base import Loss, LossFunctionWrapper

_CLASSES: dict[str, Callable[[], Loss]] = {
    name: cls
    for module in (crossentropy_classes, regression, margin)
    for name, cls in vars(module).items()
    if inspect.isclass(cls) and issubclass(cls, Loss) and cls.__module__ == module.__name__
}
_ALIASES: dict[str, Callable[[], Loss]] = {
    "bce": crossentropy_classes.BinaryCrossentropy,
    "kld": crossentropy_classes.KLDivergence,
    "mae": regression.MeanAbsoluteError,
    "mape": regression.MeanAbsolutePercentageError,
    "mse": regression.MeanSquaredError,
    "msle": regression.MeanSquaredLogarithmicError,
}
_FUNCTIONS = {cls().fn: cls for cls in _CLASSES.values()}  # type: ignore[attr-defined]


def get(identifier: Any) -> Loss:
    """Returns the loss that `identifier` stands for.

    Args:
        identifier: A name as in Keras (`"mse"`, `"MSE"`, `"mean_squared_error"`, `"MeanSquaredError"`), `"crossentropy"` or
            `"ce"` (binary, sparse or categorical by the shapes), a `Loss` or a subclass of it, or a callable
            `f(y_true, y_pred) -> values [batch, ...]`.

    Returns:
        A loss; named by the string, or by the function.

    Raises:
        ValueError: If the name is unknown; the error lists the known ones.
    """
    if isinstance(identifier, Loss):
        return identifier
    if isinstance(identifier, str):
        return _by_name(identifier)
    if inspect.isclass(identifier) and issubclass(identifier, Loss):
        return identifier()
    if callable(identifier):
        if identifier in _FUNCTIONS:
            return _FUNCTIONS[identifier]()
        return LossFunctionWrapper(identifier)
    raise ValueError(f"loss must be a name, a Loss or a callable f(y_true, y_pred), got {identifier!r}.")


def _by_name(name: str) -> Loss:
    if name.lower() in ("crossentropy", "ce"):
        loss: Loss = LossFunctionWrapper(crossentropy.crossentropy, name=name)
        loss.expects_probabilities, loss.targets = True, "by_shape"
        return loss
    loss = names.find(name, _CLASSES, _ALIASES, kind="loss", extra=("crossentropy",))()
    loss.name = name
    return loss
