"""Finds the `Optimizer` for a user's argument."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import optax

from tnt_jax.keras_compat import configuration, keras_objects
from tnt_jax.keras_compat.optimizers import adam, elementwise, layerwise
from tnt_jax.keras_compat.optimizers.base import Optimizer
from tnt_jax.keras_compat.optimizers.from_keras import KerasOptimizer
from tnt_jax.keras_compat.optimizers.loss_scaling import LossScaleOptimizer

_CLASSES: Mapping[str, Callable[..., Optimizer]] = keras_objects.classes_of(
    (elementwise, adam, layerwise), Optimizer
)

_BY_LOWER_NAME = {name.lower(): name for name in _CLASSES}


class OptaxOptimizer(Optimizer):
    """An unchanged Optax transformation with the interface of an optimizer.

    Its learning rate can be read and set if it was built by `optax.inject_hyperparams` with an
    argument `learning_rate`.
    """

    def __init__(self, transformation: optax.GradientTransformation) -> None:
        super().__init__(0.0, name="optax")
        self.learning_rate = None
        self._transformation = transformation

    def get_config(self) -> dict[str, Any]:
        """Raises a TypeError: an Optax transformation does not know its arguments."""
        raise TypeError(
            "An Optax transformation has no configuration: keep the code that creates it, or use a "
            "tnt_jax.optimizers class."
        )

    def transformation(self) -> optax.GradientTransformation:
        """Returns the given transformation."""
        return self._transformation


def get(identifier: Any) -> Any:
    """Returns the optimizer that `identifier` stands for.

    Args:
        identifier: A name as in Keras, in any case (`"adam"`, `"SGD"`), an `Optimizer` or a
            subclass of it, an Optax transformation, a real `keras.optimizers.Optimizer`, a result
            of `serialize`, or None, which stands for None. Names that only Keras has need Keras on
            its JAX backend.

    Raises:
        ValueError: If the name is unknown; the error lists the known ones.
    """
    if identifier is None:
        return None
    if isinstance(identifier, Mapping):
        return deserialize(identifier)
    if isinstance(identifier, Optimizer):
        return identifier
    if isinstance(identifier, str):
        return _by_name(identifier)
    if inspect.isclass(identifier):
        return get(identifier())
    if keras_objects.is_keras(identifier, "optimizers.LossScaleOptimizer"):
        inner, scale = get(identifier.inner_optimizer), identifier.initial_scale
        if identifier.built:
            scale = float(identifier.dynamic_scale.value)
        steps = identifier.dynamic_growth_steps
        return LossScaleOptimizer(inner, scale, steps, name=identifier.name)
    if keras_objects.is_keras(identifier, "optimizers.Optimizer"):
        return KerasOptimizer(identifier)
    if isinstance(identifier, optax.GradientTransformation):
        return OptaxOptimizer(identifier)
    raise ValueError(
        "optimizer must be a name, a tnt_jax.optimizers object, an Optax transformation or a Keras "
        f"optimizer, got {identifier!r}."
    )


def required(identifier: Any) -> Optimizer:
    """Returns the result of `get`, for a model to train."""
    optimizer = get(identifier)
    if optimizer is None:
        raise ValueError(
            "compile() needs an optimizer, for instance optimizer='adam', but got None."
        )
    return optimizer


def serialize(optimizer: Optimizer) -> dict[str, Any]:
    """Returns an optimizer in Keras's form, as JSON values; a TypeError for one of Optax."""
    return configuration.serialize(optimizer)


def deserialize(
    config: Mapping[str, Any], custom_objects: Mapping[str, Any] | None = None
) -> Optimizer:
    """Returns the optimizer that `serialize`, or Keras's own, wrote; its class may be in any case.

    Names are also those of the user's `custom_objects`; an unknown one raises a ValueError.
    """
    name = str(config["class_name"])
    known = {**config, "class_name": _BY_LOWER_NAME.get(name.lower(), name)}
    return configuration.deserialize(known, "optimizers", custom_objects)


def _by_name(name: str) -> Optimizer:
    if own := _BY_LOWER_NAME.get(name.lower()):
        return _CLASSES[own]()
    keras_class = keras_objects.find_class(name.lower(), "optimizers")
    if keras_class is None:
        raise keras_objects.unknown(
            name, _BY_LOWER_NAME, kind="optimizer", advice=keras_objects.advice()
        )
    return KerasOptimizer(keras_class(name=name.lower()))
