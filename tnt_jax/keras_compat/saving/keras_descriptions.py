"""Keras objects as JSON values, and back without running code that the values choose."""

import copy
import sys
from collections.abc import Mapping
from types import FunctionType
from typing import Any

import jax

from tnt_jax.keras_compat import configuration
from tnt_jax.log import logger

# Arguments of compile that Keras has, too, beside the optimizer.
COMPILE_NAMES = ("loss", "loss_weights", "metrics", "weighted_metrics")
_MODULES = {
    **{f"tnt_jax.{kind}": f"keras.{kind}" for kind in ("losses", "metrics", "optimizers")},
    "tnt_jax.schedules": "keras.optimizers.schedules",
}
# Names that Keras gives a meaning when it sees the data.
_CHOSEN_BY_SHAPE = ("accuracy", "acc", "crossentropy", "ce")


def describe(value: Any) -> Any:
    """Returns a Keras model, layer, loss, metric or optimizer as JSON values."""
    import keras

    return keras.saving.serialize_keras_object(value)


def describe_compile(optimizer: Any, given: Mapping[str, Any]) -> dict[str, Any] | None:
    """Returns the arguments of `compile` for Keras; None, logged, if it cannot create one."""
    try:
        state = {"config": configuration.plain(optimizer.get_config())}
        config = {
            "optimizer": _with_keras_modules({**configuration.serialize(optimizer.given), **state}),
            **{name: _as_keras(given[name]) for name in COMPILE_NAMES},
        }
        # Keras changes what it reads.
        _check_names(rebuild(copy.deepcopy(config), custom_objects={}, trust=False))
    # Keras, and the classes of a user, can raise anything.
    except Exception as error:
        logger.info("Keras will open the file without the arguments of compile: %s", error)
        return None
    return config


def _as_keras(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _as_keras(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_as_keras(item) for item in value]
    if getattr(value, "__name__", "") == "<lambda>":
        raise ValueError("a lambda has no name.")
    if not str(getattr(value, "__module__", "")).startswith("tnt_jax."):
        return describe(value)
    config = _with_keras_modules(configuration.serialize(value))
    if isinstance(value, FunctionType):
        config = describe(getattr(sys.modules[config["module"]], config["config"]))
    return config


def _with_keras_modules(config: Any) -> Any:
    if isinstance(config, dict):
        return {
            key: _MODULES.get(item, item) if key == "module" else _with_keras_modules(item)
            for key, item in config.items()
        }
    return [_with_keras_modules(item) for item in config] if isinstance(config, list) else config


def _check_names(arguments: Mapping[str, Any]) -> None:
    import keras

    for name in ("loss", "metrics", "weighted_metrics"):
        for leaf in jax.tree.leaves(arguments[name]):
            if isinstance(leaf, str) and leaf not in _CHOSEN_BY_SHAPE:
                (keras.losses if name == "loss" else keras.metrics).get(leaf)


def rebuild(config: Any, *, custom_objects: Mapping[str, Any], trust: bool) -> Any:
    """Returns the object that `describe` described."""
    import keras

    if not trust:
        _refuse_foreign_modules(config, custom_objects)
    try:
        return keras.saving.deserialize_keras_object(
            config, dict(custom_objects), safe_mode=not trust
        )
    except Exception as error:  # A damaged description can cause any error in Keras.
        raise ValueError(
            f"Keras cannot create the described object: {str(error)[:500]} Pass your own classes "
            "as custom_objects={name: class}; trust=True allows what Keras's safe mode refuses, "
            "and runs code of whoever wrote the description."
        ) from error


def _refuse_foreign_modules(config: Any, custom_objects: Mapping[str, Any]) -> None:
    """Refuses modules that Keras would import, such as `keras` and `keras_hub`."""
    if isinstance(config, dict):
        module = config.get("module") if "class_name" in config else None
        is_new = (
            isinstance(module, str) and module.startswith("keras") and module not in sys.modules
        )
        if is_new and not _is_registered(config, custom_objects):
            raise ValueError(
                f"The description names the module {module}, which is not imported: import it "
                "first if you trust it."
            )
    items = config.values() if isinstance(config, dict) else config
    for item in items if isinstance(config, (dict, list)) else ():
        _refuse_foreign_modules(item, custom_objects)


def _is_registered(config: Mapping[str, Any], custom_objects: Mapping[str, Any]) -> bool:
    """Returns whether Keras knows the class by its registered name, so that it imports nothing."""
    import keras

    name = config.get("registered_name")
    return (
        isinstance(name, str)
        and keras.saving.get_registered_object(name, dict(custom_objects)) is not None
    )
