"""Finds the `Loss` for a user's argument, or makes one of a function or of a Keras loss.

Functions may take the outputs first, as those of Optax do.
"""

import inspect
from collections.abc import Callable, Mapping
from typing import Any, overload

import jax
import jax.numpy as jnp

from tnt_jax.keras_compat import configuration, keras_objects
from tnt_jax.keras_compat.losses import crossentropy, regression, whole_rows
from tnt_jax.keras_compat.losses.base import Loss, LossFunctionWrapper

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


class KerasLoss(Loss):
    """A `keras.losses.Loss` whose `call` runs inside a tnt_jax step."""

    def __init__(self, loss: Any) -> None:
        keras_objects.require_jax_backend()
        super().__init__(loss.name, loss.reduction, loss.dtype)
        self.keras_loss = loss

    def call(self, y_true: Any, y_pred: Any) -> jax.Array:
        """Returns the values of the Keras loss [batch, ...]."""
        # Keras converts targets to floating numbers before the loss sees them.
        y_true = jax.tree.map(lambda leaf: jnp.asarray(leaf, self.keras_loss.dtype), y_true)
        return self.keras_loss.call(y_true, y_pred)

    def valid(self, y_true: Any, y_pred: Any) -> jax.Array | None:
        """Returns the mask that the Keras loss attaches to its values, or None."""
        return keras_objects.mask_of_outputs(self.call(y_true, y_pred))


# Argument names that functions use for the outputs of a model, and for targets.
_OUTPUTS = """
    logits predictions log_predictions predictor_outputs scores preds pred y_pred y_hat outputs
    output prediction predicted probs probabilities
""".split()
_TARGETS = "labels targets log_targets label target y_true y truth ground_truth".split()
# The kind of targets of Optax's losses; see `Loss.targets`.
_KINDS = {
    "softmax_cross_entropy": "distribution",
    "safe_softmax_cross_entropy": "distribution",
    "poly_loss_cross_entropy": "distribution",
    "kl_divergence": "distribution",
    "convex_kl_divergence": "distribution",
    "softmax_cross_entropy_with_integer_labels": "class_index",
    "multiclass_hinge_loss": "class_index",
    "multiclass_perceptron_loss": "class_index",
    "multiclass_sparsemax_loss": "class_index",
    "sigmoid_binary_cross_entropy": "binary",
    "sigmoid_focal_loss": "binary",
    "sparsemax_loss": "binary",
    "squared_error": "like_outputs",
    "l2_loss": "like_outputs",
    "huber_loss": "like_outputs",
    "log_cosh": "like_outputs",
}
_SOFTMAX = """
    softmax_cross_entropy safe_softmax_cross_entropy softmax_cross_entropy_with_integer_labels
""".split()


class OptaxLoss(LossFunctionWrapper):
    """A loss made from an Optax function, which is called as `f(outputs, targets)`."""

    # The activation that the loss applies to logits; None if it takes other outputs.
    takes_logits: str | None = None

    def __init__(self, fn: Callable[..., Any]) -> None:
        super().__init__(fn)
        self.name = name = _original(fn).__name__
        self.targets = _KINDS.get(name, "any")
        axis = getattr(fn, "keywords", {}).get("axis", -1)
        self.axis = axis if isinstance(axis, int) else -1
        self.takes_logits = "sigmoid" if name.startswith("sigmoid") else None
        if name in _SOFTMAX:
            self.takes_logits = "softmax"

    def call(self, y_true: Any, y_pred: Any) -> jax.Array:
        """Returns `fn(y_pred, y_true)` [batch, ...]."""
        is_index = self.targets == "class_index" and y_true.ndim == y_pred.ndim
        if is_index and y_true.shape[self.axis] == 1:
            y_true = jnp.squeeze(y_true, self.axis)
        swapped = LossFunctionWrapper(lambda targets, outputs: self.fn(outputs, targets))
        return swapped.call(y_true, y_pred)


def optax_loss(function: Callable[..., Any]) -> OptaxLoss | None:
    """Returns the loss of an Optax function, also within `functools.partial`; None for others."""
    original = _original(function)
    if str(getattr(original, "__module__", "")).split(".")[0] != "optax":
        return None
    name = original.__name__
    arguments = _required(function)
    if name == "cosine_similarity":
        raise ValueError(
            "optax.cosine_similarity grows as outputs approach their targets, so training would "
            "drive them apart. Use optax.cosine_distance as the loss, or the metric "
            "'cosine_similarity'."
        )
    if name == "ntxent" or not _is_reversed(function):
        raise ValueError(
            f"optax.{name}({', '.join(arguments)}) cannot be a loss or metric, which maps the "
            "targets and outputs of each row to a value. Call it in your own function, f(targets, "
            "outputs) -> values [batch, ...], or in an objective."
        )
    return OptaxLoss(function)


def check_order(function: Callable[..., Any]) -> None:
    """Raises an error if a function's argument names show that it takes the outputs first."""
    if _is_reversed(function):
        first, second = _required(function)[:2]
        name = getattr(_original(function), "__name__", "f")
        raise ValueError(
            f"Losses and metrics are called as f(targets, outputs), but {name} takes ({first}, "
            f"{second}), outputs first. Swap its arguments, or pass lambda targets, outputs: "
            f"{name if name != '<lambda>' else 'f'}(outputs, targets)."
        )


def _is_reversed(function: Callable[..., Any]) -> bool:
    names = _required(function)
    is_reversed = len(names) >= 2 and names[0] in _OUTPUTS and names[1] in _TARGETS
    return is_reversed and "label_paddings" not in names[2:]


def _required(function: Callable[..., Any]) -> list[str]:
    """Returns the names of the first two positional arguments, and of others without defaults."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # Some callables written in C have no signature.
        return []
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    return [p.name for index, p in enumerate(positional) if index < 2 or p.default is p.empty]


def _original(function: Any) -> Any:
    """Returns the function wrapped by `functools.partial`, `jax.jit` and the like."""
    while hasattr(function, "func") or hasattr(function, "__wrapped__"):
        function = function.func if hasattr(function, "func") else function.__wrapped__
    return function
