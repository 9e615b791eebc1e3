"""Modules, losses, metrics and optimizers as JSON, and back.

A description names classes and functions by module and name and holds their arguments; rebuilding imports them, so they must still
be there. It runs no code but the constructors of modules, losses, metrics, optimizers and schedules.
"""

import dataclasses
import functools
import importlib
import json
import math
import sys
from collections.abc import Callable, Mapping
from types import FunctionType
from typing import Any

import numpy as np


class NotDescribable(ValueError):
    """An object cannot be written as JSON; the message says which part and why."""


def describe(value: Any, *, where: str = "module") -> Any:
    """Returns JSON for a Linen module, for what was made by a constructor of this library, or for plain values in them.

    Args:
        value: Numbers, strings, sequences, dicts, dtypes, functions and classes that can be imported, `functools.partial`, Linen
            modules, and losses, metrics, optimizers and schedules of this library and of Keras.
        where: Name of the value, for errors.

    Raises:
        NotDescribable: If there is no JSON for a part of it; the message names the part.
    """
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {"float": str(value)}
    if isinstance(value, (tuple, list)):
        items = [describe(item, where=f"{where}[{index}]") for index, item in enumerate(value)]
        return {"tuple": items} if isinstance(value, tuple) else items
    if isinstance(value, Mapping):
        return {"dict": [[describe(key, where=where), describe(item, where=f"{where}[{key!r}]")] for key, item in value.items()]}
    if isinstance(value, np.generic):
        return describe(value.item(), where=where)
    if isinstance(value, functools.partial):
        parts = describe([value.func, list(value.args), value.keywords], where=where)
        return {"partial": parts}
    return _describe_object(value, where)


def rebuild(description: Any) -> Any:
    """Returns what was described.

    Raises:
        ValueError: If a class or function is not there, or is of no kind that may be rebuilt.
    """
    if isinstance(description, list):
        return [rebuild(item) for item in description]
    if not isinstance(description, dict):
        return description
    ((kind, content),) = description.items() if len(description) == 1 else ((None, None),)
    if kind not in _REBUILDERS:
        raise ValueError(f"This is no description of a module: {json.dumps(description)[:200]}")
    return _REBUILDERS[kind](content)


def _describe_object(value: Any, where: str) -> Any:
    if isinstance(value, np.dtype):
        return {"dtype": value.name}
    if is_linen(value):
        return {"linen": [_import_name(type(value), where), _describe_fields(value, where), value.name]}
    if isinstance(value, type) and issubclass(value, np.generic):
        return {"dtype": np.dtype(value).name}
    if _root(type(value)) == "keras" and hasattr(value, "get_config"):
        import keras

        return {"keras": keras.saving.serialize_keras_object(value)}
    if hasattr(value, "given_arguments") and _root(type(value)) == "tnt_jax":
        args, kwargs = value.given_arguments
        return {"object": [_import_name(type(value), where), describe(list(args), where=where), describe(kwargs, where=where)]}
    if isinstance(value, (FunctionType, type)) or hasattr(value, "__wrapped__"):
        return {"import": _import_name(value, where)}
    raise NotDescribable(f"{where} is a {type(value).__module__}.{type(value).__qualname__}, which cannot be written as JSON.")


def _describe_fields(module: Any, where: str) -> dict[str, Any]:
    fields = {}
    for field in dataclasses.fields(module):
        value = getattr(module, field.name)
        if not field.init or field.name in ("parent", "name"):
            continue
        try:
            fields[field.name] = describe(value, where=f"{where}.{field.name}")
        except NotDescribable:
            # Initialisers are closures; the default one comes back by itself.
            if value is not field.default:
                raise
    return fields


def _import_name(value: Any, where: str) -> str:
    name = f"{value.__module__}:{value.__qualname__}"
    if "<" in value.__qualname__:
        raise NotDescribable(f"{where} is {value.__qualname__}, which was defined inside a function and cannot be imported.")
    if _find(name) is not value:
        raise NotDescribable(f"{where} is {name}, but importing that gives something else.")
    return name


def _find(name: str) -> Any:
    module, _, path = name.partition(":")
    try:
        found: Any = sys.modules.get(module) or importlib.import_module(module)
        for part in path.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError) as error:
        raise ValueError(
            f"{name} cannot be imported: {error}. Make the module importable, or pass the model as module=."
        ) from error
    return found


def _rebuild_linen(content: Any) -> Any:
    import flax.linen as nn

    name, fields, own_name = content
    cls = _find(name)
    if not (isinstance(cls, type) and issubclass(cls, nn.Module)):
        raise ValueError(f"{name} is not a flax.linen.Module.")
    return cls(**{field: rebuild(value) for field, value in fields.items()}, **({"name": own_name} if own_name else {}))


def _rebuild_object(content: Any) -> Any:
    name, args, kwargs = content
    cls = _find(name)
    if not (isinstance(cls, type) and _root(cls) == "tnt_jax"):
        raise ValueError(f"{name} is not a class of tnt_jax.")
    return cls(*rebuild(args), **rebuild(kwargs))


def _rebuild_partial(content: Any) -> Any:
    function, args, kwargs = rebuild(content)
    return functools.partial(function, *args, **kwargs)


def _rebuild_keras(content: Any) -> Any:
    import keras

    return keras.saving.deserialize_keras_object(content)


def _root(cls: type) -> str:
    return cls.__module__.split(".")[0]


def is_linen(value: Any) -> bool:
    """Tells whether a value is a Linen module, without importing Linen."""
    linen = sys.modules.get("flax.linen")
    return linen is not None and isinstance(value, linen.Module)


def _dtype(name: str) -> Any:
    import jax.numpy as jnp

    return jnp.dtype(name)


_REBUILDERS: dict[Any, Callable[[Any], Any]] = {
    "float": float,
    "tuple": lambda items: tuple(rebuild(item) for item in items),
    "dict": lambda items: {rebuild(key): rebuild(value) for key, value in items},
    "dtype": _dtype,
    "import": _find,
    "partial": _rebuild_partial,
    "linen": _rebuild_linen,
    "object": _rebuild_object,
    "keras": _rebuild_keras,
}
