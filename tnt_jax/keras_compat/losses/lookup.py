"""Finds the `Loss` for a user's argument."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any, overload

from tnt_jax.keras_compat import configuration, keras_objects
from tnt_jax.keras_compat.losses import crossentropy, regression, whole_rows
from tnt_jax.keras_compat.losses.base import Loss, LossFunctionWrapper
from tnt_jax.keras_compat.losses.from_functions import KerasLoss, check_order, optax_loss

_CLASSES: Mapping[str, Callable[..., Loss]] = keras_objects.classes_of(
    (crossentropy, regression, whole_rows), Loss
)
_FUNCTIONS = tuple(cls().fn for cls in _CLASSES.values())  # pyright: ignore


@overload
def get(identifier: None) -> None: ...
@overload
def get(identifier: Any) -> Loss: ...
def get(identifier: Any) -> Loss | None:
    """Returns the loss that `identifier` stands for.

    Unlike Keras's function, it also returns a `Loss` for the name of a function.

    Args:
        identifier: A name as in Keras (`"mse"`, `"MSE"`, `"mean_squared_error"`,
            `"MeanSquaredError"`), `"crossentropy"` or `"ce"` (binary, sparse or categorical by the
            shapes), a `Loss` or a subclass of it, a real `keras.losses.Loss`, or a configuration as
            `serialize` writes it, or a callable `f(y_true, y_pred) -> values [batch, ...]`; None
            gives None. Names that only Keras has need Keras on its JAX backend. The losses of
            Optax, which take the outputs first, are called in their own order.

    Returns:
        A loss, named after the string or the function.

    Raises:
        ValueError: If the name is unknown (the error lists the known ones), or a function takes the
            outputs first.
    """
    if identifier is None or isinstance(identifier, Loss):
        return identifier
    if isinstance(identifier, Mapping):
        return get(deserialize(identifier))
    if isinstance(identifier, str):
        return _by_name(identifier)
    if inspect.isclass(identifier):
        return get(identifier())
    if keras_objects.is_keras(identifier, "losses.Loss"):
        return _from_keras(identifier)
    if callable(identifier):
        return _from_function(identifier)
    raise ValueError(
        "loss must be a name, a Loss, a keras.losses.Loss or a callable f(y_true, y_pred), got "
        f"{identifier!r}."
    )


def serialize(loss: Any) -> dict[str, Any]:
    """Returns the configuration of a loss or of a function, as `keras.losses.serialize` does."""
    return configuration.serialize(loss)


def deserialize(name: Any, custom_objects: Mapping[str, Any] | None = None) -> Any:
    """Returns the loss or function that `serialize`, or Keras's own, wrote, or that has a name.

    Names are also those of the user's `custom_objects`; an unknown one raises a ValueError.
    """
    return configuration.deserialize(name, "losses", custom_objects)


def _by_name(name: str) -> Loss:
    if name.lower() in ("crossentropy", "ce"):
        loss: Loss = LossFunctionWrapper(crossentropy.crossentropy, name=name)
        loss.expects_probabilities, loss.targets = True, "by_shape"
        return loss
    cls = keras_objects.find(name, _CLASSES)
    if cls is None:
        keras_class = keras_objects.find_class(name, "losses")
        if keras_class is None:
            names = map(keras_objects.snake_case, _CLASSES)
            listed = [*names, *keras_objects.ALIASES, "crossentropy"]
            raise keras_objects.unknown(name, listed, kind="loss", advice=keras_objects.advice())
        return KerasLoss(keras_class(name=name))
    loss = cls()
    loss.name = name
    return loss


def _from_keras(loss: Any) -> Loss:
    """Returns the tnt_jax loss of the same class and settings, if any: it has more checks."""
    cls = _CLASSES.get(type(loss).__name__)
    if cls is None or not type(loss).__module__.startswith("keras."):
        return KerasLoss(loss)
    return cls(reduction=loss.reduction, name=loss.name, dtype=loss.dtype, **loss._fn_kwargs)


def _from_function(function: Callable[..., Any]) -> Loss:
    """Returns a loss around a function; one of Keras or tnt_jax becomes the loss of its name."""
    name = getattr(function, "__name__", "")
    module = str(getattr(function, "__module__", ""))
    is_known = function in _FUNCTIONS or module.startswith("keras.")
    cls = keras_objects.find(name, _CLASSES, {}) if is_known else None
    if cls is not None:
        return cls()
    loss = optax_loss(function)
    if loss is None:
        check_order(function)
    return loss or LossFunctionWrapper(function)
