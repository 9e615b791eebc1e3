"""From what a user passes as a loss to a `Loss`."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from tnt_jax.keras_compat import keras_objects, names
from tnt_jax.keras_compat.losses import crossentropy, crossentropy_classes, margin, regression
from tnt_jax.keras_compat.losses.base import Loss, LossFunctionWrapper
from tnt_jax.keras_compat.losses.from_keras import KerasLoss

_CLASSES: dict[str, Callable[..., Loss]] = {
    name: cls
    for module in (crossentropy_classes, regression, margin)
    for name, cls in vars(module).items()
    if inspect.isclass(cls) and issubclass(cls, Loss) and cls.__module__ == module.__name__
}
_ALIASES: dict[str, Callable[..., Loss]] = {
    "bce": crossentropy_classes.BinaryCrossentropy,
    "kld": crossentropy_classes.KLDivergence,
    "mae": regression.MeanAbsoluteError,
    "mape": regression.MeanAbsolutePercentageError,
    "mse": regression.MeanSquaredError,
    "msle": regression.MeanSquaredLogarithmicError,
}
_FUNCTIONS = tuple(cls().fn for cls in _CLASSES.values())  # pyright: ignore[reportAttributeAccessIssue]


def get(identifier: Any) -> Loss:
    """Returns the loss that `identifier` stands for.

    Args:
        identifier: A name as in Keras (`"mse"`, `"MSE"`, `"mean_squared_error"`, `"MeanSquaredError"`), `"crossentropy"` or
            `"ce"` (binary, sparse or categorical by the shapes), a `Loss` or a subclass of it, a real `keras.losses.Loss`, or a
            callable `f(y_true, y_pred) -> values [batch, ...]`. Names that only Keras has need Keras on its JAX backend.

    Returns:
        A loss; named by the string, or by the function.

    Raises:
        ValueError: If the name is unknown; the error lists the known ones.
    """
    if isinstance(identifier, Loss):
        return identifier
    if isinstance(identifier, str):
        return _by_name(identifier)
    if inspect.isclass(identifier):
        return get(identifier())
    if keras_objects.is_keras(identifier, "losses.Loss"):
        return _from_keras(identifier)
    if callable(identifier):
        return _from_function(identifier)
    raise ValueError(f"loss must be a name, a Loss, a keras.losses.Loss or a callable f(y_true, y_pred), got {identifier!r}.")


def _by_name(name: str) -> Loss:
    if name.lower() in ("crossentropy", "ce"):
        loss: Loss = LossFunctionWrapper(crossentropy.crossentropy, name=name)
        loss.expects_probabilities, loss.targets = True, "by_shape"
        return loss
    cls = names.find(name, _CLASSES, _ALIASES)
    if cls is None:
        keras_class = keras_objects.find_class(name, "losses")
        if keras_class is None:
            listed = [*map(names.snake_case, _CLASSES), *_ALIASES, "crossentropy"]
            raise names.unknown(name, listed, kind="loss", advice=keras_objects.advice())
        return KerasLoss(keras_class(name=name))
    loss = cls()
    loss.name = name
    return loss


def _from_keras(loss: Any) -> Loss:
    """Returns our loss of the same class and settings where there is one: it knows what it expects of the model."""
    cls = _CLASSES.get(type(loss).__name__)
    if cls is None or not type(loss).__module__.startswith("keras."):
        return KerasLoss(loss)
    return cls(reduction=loss.reduction, name=loss.name, **loss._fn_kwargs)


def _from_function(function: Callable[..., Any]) -> Loss:
    """Returns a loss around a function; one of Keras's or ours becomes the loss of its name, which has its checks."""
    name, module = getattr(function, "__name__", ""), str(getattr(function, "__module__", ""))
    is_known = function in _FUNCTIONS or module.startswith("keras.")
    cls = names.find(name, _CLASSES, {}) if is_known else None
    return LossFunctionWrapper(function) if cls is None else cls()
