"""Keras objects as JSON values, and back without running code that the values choose."""

import sys
from collections.abc import Mapping
from typing import Any


def describe(value: Any) -> Any:
    """Returns the configuration of a Keras object as JSON values.

    The object is a model, layer, loss, metric or optimizer.
    """
    import keras

    return keras.saving.serialize_keras_object(value)


def rebuild(config: Any, *, custom_objects: Mapping[str, Any], trust: bool) -> Any:
    """Returns the object that `describe` described.

    Args:
        config: The entry `"keras"` of the description.
        custom_objects: Classes and functions of the user by name.
        trust: Whether code in the description may run: Keras's `safe_mode=False`.

    Raises:
        ValueError: If the description names modules outside Keras, or what Keras refuses to load
            from a file.
    """
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
    """Refuses names of modules that Keras would import.

    Keras imports modules named `keras`, `keras_hub` and the like.
    """
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
