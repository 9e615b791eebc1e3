"""Finds the `Optimizer` for a user's argument, and the learning rate inside its state."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
import optax

from tnt_jax.keras_compat import configuration, keras_objects, names
from tnt_jax.keras_compat.optimizers import averaging, elementwise, layerwise
from tnt_jax.keras_compat.optimizers.base import Optimizer
from tnt_jax.keras_compat.optimizers.from_keras import KerasOptimizer
from tnt_jax.keras_compat.optimizers.loss_scaling import LossScaleOptimizer

_CLASSES: Mapping[str, Callable[..., Optimizer]] = names.classes_of(
    (averaging, elementwise, layerwise), Optimizer
)


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
        inner = get(identifier.inner_optimizer)
        scale = (
            float(identifier.dynamic_scale.value) if identifier.built else identifier.initial_scale
        )
        return LossScaleOptimizer(
            inner, scale, identifier.dynamic_growth_steps, name=identifier.name
        )
    if keras_objects.is_keras(identifier, "optimizers.Optimizer"):
        return KerasOptimizer(identifier)
    if isinstance(identifier, optax.GradientTransformation):
        return OptaxOptimizer(identifier)
    raise ValueError(
        "optimizer must be a name, a tnt_jax.optimizers object, an Optax transformation or a Keras "
        f"optimizer, got {identifier!r}."
    )


def required(identifier: Any) -> Optimizer:
    """Returns the result of `get`, for a model to train.

    Raises:
        ValueError: If there is no such optimizer.
    """
    optimizer = get(identifier)
    if optimizer is None:
        raise ValueError(
            "compile() needs an optimizer, for instance optimizer='adam', but got None."
        )
    return optimizer


def serialize(optimizer: Optimizer) -> dict[str, Any]:
    """Returns an optimizer as plain values that JSON can hold, in Keras's form.

    Raises:
        TypeError: If it is an Optax transformation, which does not know its arguments.
    """
    return configuration.serialize(optimizer)


def deserialize(
    config: Mapping[str, Any], custom_objects: Mapping[str, Any] | None = None
) -> Optimizer:
    """Returns the optimizer that `serialize`, or Keras's own, wrote.

    Args:
        config: What it returned; names of classes may be in any case.
        custom_objects: Classes and functions of the user by name.

    Raises:
        ValueError: If a name is unknown.
    """
    by_lower_name = {name.lower(): name for name in _CLASSES}
    name = str(config["class_name"])
    known = {**config, "class_name": by_lower_name.get(name.lower(), name)}
    return configuration.deserialize(known, "optimizers", custom_objects)


def _by_name(name: str) -> Optimizer:
    by_lower_name = {key.lower(): cls for key, cls in _CLASSES.items()}
    cls = by_lower_name.get(name.lower())
    if cls is not None:
        return cls()
    keras_class = keras_objects.find_class(name.lower(), "optimizers")
    if keras_class is None:
        raise names.unknown(name, by_lower_name, kind="optimizer", advice=keras_objects.advice())
    return KerasOptimizer(keras_class(name=name.lower()))


def read_learning_rate(opt_state: Any) -> jax.Array | None:
    """Returns the learning rate in a state, or None if it holds none.

    It is the rate of the last update or, before the first update, of the next.
    """
    injected = _injected(opt_state)
    return injected[0].hyperparams["learning_rate"] if injected else None


def write_learning_rate(opt_state: Any, learning_rate: Any) -> Any:
    """Returns the state with another learning rate, without retracing.

    The dtype and the placement of the rate are kept.

    Args:
        opt_state: State of the transformation of an optimizer.
        learning_rate: The rate, a number or scalar.

    Raises:
        TypeError: If a schedule sets the rate.
        ValueError: If the state holds no rate, as for an Optax transformation not built by
            `optax.inject_hyperparams`.
    """
    injected = _injected(opt_state)
    if not injected:
        raise ValueError(
            "This optimizer's state holds no learning rate to set. Build the Optax transformation "
            "with optax.inject_hyperparams(optax.sgd)(learning_rate=...), or use a "
            "tnt_jax.optimizers class."
        )
    if any("learning_rate" in state.hyperparams_states for state in injected):
        raise TypeError(
            "A schedule decides the learning rate, so it cannot be set; create the optimizer with "
            "a number."
        )

    def replaced(node: Any) -> Any:
        if not _is_injected(node):
            return node
        old = node.hyperparams["learning_rate"]
        return node._replace(
            hyperparams={**node.hyperparams, "learning_rate": _like(old, learning_rate)}
        )

    return jax.tree.map(replaced, opt_state, is_leaf=_is_injected)


def _like(old: Any, value: Any) -> Any:
    """Returns a number as an array with the dtype and, on devices, the sharding of another."""
    value = np.asarray(value, old.dtype)
    # Each process creates its own copies: device_put to several processes would communicate.
    return (
        jax.make_array_from_callback((), old.sharding, lambda _: value)
        if isinstance(old, jax.Array)
        else value
    )


def _is_injected(node: Any) -> bool:
    return "learning_rate" in getattr(node, "hyperparams", ()) and hasattr(
        node, "hyperparams_states"
    )


def _injected(opt_state: Any) -> list[Any]:
    """Returns the states of `inject_hyperparams` within a state that hold a learning rate."""
    return [node for node in jax.tree.leaves(opt_state, is_leaf=_is_injected) if _is_injected(node)]
