"""Keras-style configurations: constructor arguments as plain values that JSON can represent.

```python
# {"delta": 1.0, "reduction": "sum", "name": "huber_loss", "dtype": None}
config = config_of(loss, "name")
# {"module": "tnt_jax.losses", "class_name": "Huber", "config": config, ...}
written = serialize(loss)
loss = deserialize(written, "losses")           # also results of keras.losses.serialize
```

Names are looked up in public names, in `custom_objects`, and among what the user registered with
Keras. Nothing is imported because a configuration names it, and only constructors run.
"""

import importlib
import inspect
import sys
from collections.abc import Mapping
from types import FunctionType
from typing import Any, Self

import numpy as np

_ROOMS = ("losses", "metrics", "optimizers", "schedules")


def config_of(made: Any, *current: str) -> dict[str, Any]:
    """Returns the constructor arguments of a `Recorded` object by name, including defaults.

    They are plain values. Attributes named by `current` replace the arguments of their names.
    """
    args, kwargs = made.given_arguments
    bound = inspect.signature(type(made).__init__).bind(made, *args, **kwargs)
    bound.apply_defaults()
    config: dict[str, Any] = {}
    for name, parameter in list(bound.signature.parameters.items())[1:]:
        value = bound.arguments[name]
        if parameter.kind is parameter.VAR_POSITIONAL and value:
            raise TypeError(
                f"{type(made).__name__}(*{name}) has no names for its arguments: write its "
                "get_config()."
            )
        if parameter.kind is not parameter.VAR_POSITIONAL:
            config.update(value if parameter.kind is parameter.VAR_KEYWORD else {name: value})
    config |= {name: getattr(made, name) for name in current if name in config}
    return {name: plain(value) for name, value in config.items()}


def plain(value: Any) -> Any:
    """Returns what JSON can represent: functions and objects become names, arrays lists."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (tuple, list)):
        return type(value)(plain(item) for item in value)
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, np.dtype) or (isinstance(value, type) and issubclass(value, np.generic)):
        return np.dtype(value).name
    if hasattr(value, "__array__"):
        return np.asarray(value).tolist()
    return serialize(value)


def serialize(value: Any) -> dict[str, Any]:
    """Returns a loss, metric, optimizer, schedule or function as Keras's `serialize` functions do.

    Of a function, `class_name` is `"function"` and `config` its name. What has no `get_config` is a
    TypeError.
    """
    if isinstance(value, FunctionType):
        name = value.__name__
        return {
            "module": public_module(value.__module__),
            "class_name": "function",
            "config": name,
            "registered_name": name,
        }
    if not hasattr(value, "get_config"):
        raise TypeError(
            f"{value!r} has no get_config(), so it cannot be written as a configuration: add one "
            "to its class."
        )
    cls = type(value)
    if _root(cls.__module__) == "keras":
        return sys.modules["keras"].saving.serialize_keras_object(value)
    registered = None if _root(cls.__module__) == "tnt_jax" else cls.__name__
    config = plain(value.get_config())
    return {
        "module": public_module(cls.__module__),
        "class_name": cls.__name__,
        "config": config,
        "registered_name": registered,
    }


def deserialize(config: Any, room: str, custom_objects: Mapping[str, Any] | None = None) -> Any:
    """Returns the object, or for a function or a mere name the function or class, that Keras wrote.

    Names whose module is not a room belong to `room`. An unknown name is a ValueError, and what is
    no configuration a TypeError; None gives None.
    """
    if config is None:
        return None
    if isinstance(config, str):
        return _find(config, room, custom_objects)
    if not isinstance(config, Mapping) or "class_name" not in config:
        raise TypeError(
            f"A configuration is a name or a dict with 'class_name' and 'config', got {config!r}."
        )
    module = str(config.get("module") or "").rpartition(".")[2]
    room = module if module in _ROOMS else room
    if config["class_name"] == "function":
        return _find(config["config"], room, custom_objects)
    cls = _find(config["class_name"], room, custom_objects)
    # A function may have the form of a class without settings, as Keras allows.
    if isinstance(cls, type):
        return cls.from_config(resolved(config.get("config") or {}, room, custom_objects))
    return cls


def resolved(value: Any, room: str, custom_objects: Mapping[str, Any] | None = None) -> Any:
    """Returns plain values in which objects and functions are restored; see `deserialize`."""
    if isinstance(value, Mapping) and {"class_name", "config"} <= set(value):
        return deserialize(value, room, custom_objects)
    if isinstance(value, Mapping):
        return {key: resolved(item, room, custom_objects) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return type(value)(resolved(item, room, custom_objects) for item in value)
    return value


def _find(name: Any, room: str, custom_objects: Mapping[str, Any] | None) -> Any:
    if not isinstance(name, str):
        raise ValueError(
            f"{name!r} is not in tnt_jax.{room}: a name is a string. custom_objects= are also "
            "found by name."
        )
    own = registered_with_keras() | dict(custom_objects or {})
    if name in own:
        return own[name]
    module = importlib.import_module(f"tnt_jax.keras_compat.{room}")
    found = getattr(module, name) if name in module.__all__ else None
    if not callable(found) or _root(found.__module__) != "tnt_jax":
        raise ValueError(
            f"{name!r} is not in tnt_jax.{room}. Pass your own class or function by its name: "
            f"custom_objects={{{name!r}: ...}}."
        )
    return found


def registered_with_keras() -> dict[str, Any]:
    """Returns what the user registered with Keras, or in a scope of it, by name."""
    if "keras" not in sys.modules:
        return {}
    registered = sys.modules["keras"].saving.get_custom_objects()
    return {name.rpartition(">")[2]: value for name, value in registered.items()}


def public_module(module: str) -> str:
    """Returns the module under which users know what a module of `keras_compat` defines."""
    parts = module.split(".")
    return f"tnt_jax.{parts[2]}" if parts[:2] == ["tnt_jax", "keras_compat"] else module


def _root(module: str) -> str:
    return module.partition(".")[0]


class Recorded:
    """Base class of objects that can be recreated from their constructor's arguments."""

    given_arguments: tuple[tuple[Any, ...], dict[str, Any]]

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        """Records the arguments before the constructor runs."""
        made = super().__new__(cls)
        made.given_arguments = (args, kwargs)
        return made

    def get_config(self) -> dict[str, Any]:
        """Returns the arguments that make an equal object, by name and as plain values."""
        return config_of(self, "name")

    @classmethod
    def from_config(
        cls, config: Mapping[str, Any], custom_objects: Mapping[str, Any] | None = None
    ) -> Self:
        """Returns the object that a configuration describes, also one of Keras.

        Names in it are also those of the user's `custom_objects`.
        """
        return cls(**resolved(dict(config), _room(cls), custom_objects))


def _room(cls: type) -> str:
    """Returns the package of the first tnt_jax class in a class's bases, such as `"losses"`."""
    names = [base.__module__.split(".") for base in cls.__mro__]
    return next(name[2] for name in names if name[:2] == ["tnt_jax", "keras_compat"])
