"""Descriptions of modules, losses, metrics and optimizers as JSON.

They name classes and functions, such as `flax.linen:Dense` or `my_package.nets:Net`, and hold
their arguments. `rebuild` creates the objects again.
"""

import dataclasses
import functools
import math
import sys
from collections.abc import Mapping
from types import FunctionType
from typing import Any

import numpy as np

from tnt_jax.keras_compat.configuration import Recorded
from tnt_jax.keras_compat.saving import keras_descriptions
from tnt_jax.keras_compat.saving.known_names import name_of


class NotDescribable(ValueError):
    """An object cannot be written as JSON; the message says which part and why."""


def describe(value: Any, *, where: str = "module") -> Any:
    """Returns JSON for plain values, and for objects the arguments of their constructors."""
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {"float": str(value)}
    if isinstance(value, (tuple, list)):
        items = [describe(item, where=f"{where}[{index}]") for index, item in enumerate(value)]
        return {"tuple": items} if isinstance(value, tuple) else items
    if isinstance(value, Mapping):
        return {
            "dict": [
                [describe(key, where=where), describe(item, where=f"{where}[{key!r}]")]
                for key, item in value.items()
            ]
        }
    if isinstance(value, np.generic):
        return describe(value.item(), where=where)
    if isinstance(value, functools.partial):
        parts = describe([value.func, list(value.args), value.keywords], where=where)
        return {"partial": parts}
    return _describe_object(value, where)


def _describe_object(value: Any, where: str) -> Any:
    if isinstance(value, np.dtype):
        return {"dtype": value.name}
    if is_linen(value):
        return {"linen": [_name(type(value), where), _describe_fields(value, where), value.name]}
    if isinstance(value, type) and issubclass(value, np.generic):
        return {"dtype": np.dtype(value).name}
    if type(value).__module__.split(".")[0] == "keras" and hasattr(value, "get_config"):
        return {"keras": keras_descriptions.describe(value)}
    if isinstance(value, Recorded):
        args, kwargs = value.given_arguments
        return {
            "object": [
                _name(type(value), where),
                describe(list(args), where=where),
                describe(kwargs, where=where),
            ]
        }
    if (
        isinstance(value, (FunctionType, type))
        or hasattr(value, "__wrapped__")
        or name_of(value) is not None
    ):
        return {"import": _name(value, where)}
    raise NotDescribable(
        f"{where} is a {type(value).__module__}.{type(value).__qualname__}, which cannot be "
        "written as JSON."
    )


def _describe_fields(module: Any, where: str) -> dict[str, Any]:
    fields = {}
    for field in dataclasses.fields(module):
        value = getattr(module, field.name)
        # Defaults such as initializers are closures or private functions, and are restored by
        # themselves.
        is_own = callable(value) and value is field.default and name_of(value) is None
        if field.init and field.name not in ("parent", "name") and not is_own:
            fields[field.name] = describe(value, where=f"{where}.{field.name}")
    return fields


def _name(value: Any, where: str) -> str:
    if (known := name_of(value)) is not None:
        return known
    name = f"{value.__module__}:{value.__qualname__}"
    if "<" in name:
        raise NotDescribable(
            f"{where} is {value.__qualname__}, which was defined inside a function and cannot be "
            "imported."
        )
    if _in_its_module(value) is not value:
        raise NotDescribable(f"{where} is {name}, but importing that name gives something else.")
    return name


def _in_its_module(value: Any) -> Any:
    """Returns the object that a class's or function's module has under its name, or None."""
    found: Any = sys.modules.get(value.__module__)
    for part in value.__qualname__.split("."):
        found = getattr(found, part, None)
    return found


def is_linen(value: Any) -> bool:
    """Returns whether a value is a Linen module, without importing Linen."""
    linen = sys.modules.get("flax.linen")
    return linen is not None and isinstance(value, linen.Module)
