"""Settings as plain values that two processes can compare, whatever objects they consist of.

Unlike a description for a file, which must recreate an object, this one always exists: what has no
configuration is named by its class or its code.
"""

import dataclasses
import zlib
from collections.abc import Mapping
from functools import partial
from types import CodeType, FunctionType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

_MOST_ELEMENTS = 8
# Flax's own fields: the place of a module within another.
_OF_FLAX = ("parent", "name")


def comparable(value: Any) -> Any:
    """Returns a value as numbers, strings, lists and dicts that are equal for equal settings.

    Args:
        value: Any object. Arrays become a checksum, functions the checksum of their code, objects
            the arguments of their constructors as far as they tell them.
    """
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, Mapping):
        return {str(key): comparable(item) for key, item in value.items()}
    if isinstance(value, (set, frozenset)):
        return sorted(str(comparable(item)) for item in value)
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        return comparable(value._asdict())  # pyright: ignore[reportAttributeAccessIssue]
    if isinstance(value, (tuple, list)):
        return [comparable(item) for item in value]
    if isinstance(value, partial):
        return ["partial", comparable(value.func), comparable((value.args, value.keywords))]
    if isinstance(value, FunctionType):
        return _function(value)
    if isinstance(value, (np.generic, np.ndarray, jax.Array)):
        return _array(value)
    if isinstance(value, type):
        return _name(value)
    return _object(value)


def flat(name: str, value: Any) -> dict[str, str]:
    """Returns the parts of a comparable value by name, such as `optimizer.learning_rate`.

    Args:
        name: Name of the whole.
        value: Result of `comparable`.
    """
    if isinstance(value, dict) and value:
        parts = {f"{name}.{key}": item for key, item in value.items()}
    elif isinstance(value, list) and any(isinstance(item, (dict, list)) for item in value):
        parts = {f"{name}[{number}]": item for number, item in enumerate(value)}
    else:
        return {name: str(value)}
    return {path: text for part, item in parts.items() for path, text in flat(part, item).items()}


def _object(value: Any) -> Any:
    """Returns the class and the settings of an object."""
    if hasattr(value, "get_config"):
        try:
            return {"class": _name(type(value)), **comparable(value.get_config())}
        except Exception as error:  # A class of the user's need not support it.
            return {"class": _name(type(value)), "get_config": type(error).__name__}
    if dataclasses.is_dataclass(value):
        fields = {
            field.name: comparable(getattr(value, field.name, None))
            for field in dataclasses.fields(value)
            if field.name not in _OF_FLAX
        }
        return {"class": _name(type(value)), **fields}
    if isinstance(value, np.dtype):
        return value.name
    return _name(value if callable(value) and hasattr(value, "__qualname__") else type(value))


def _function(function: FunctionType) -> Any:
    """Returns the name and the code of a function; of one of Optax also what it closes over.

    What functions of the user's close over may well be different on each process.
    """
    named = f"{_name(function)} (code {_checksum_of_code(function.__code__):08x})"
    if not str(function.__module__).startswith("optax"):
        return named
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    held = {name: comparable(cell.cell_contents) for name, cell in cells}
    return {"function": named, **held} if held else named


def _checksum_of_code(code: CodeType) -> int:
    checksum = zlib.crc32(code.co_code)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            text = str(_checksum_of_code(constant))
        elif isinstance(constant, frozenset):
            text = str(sorted(map(repr, constant)))
        else:
            text = repr(constant)
        checksum = zlib.crc32(text.encode(), checksum)
    return zlib.crc32(" ".join(code.co_names).encode(), checksum)


def _array(value: Any) -> Any:
    if isinstance(value, jax.Array) and not value.is_fully_addressable:
        return f"{value.dtype}{list(value.shape)}"
    if isinstance(value, jax.Array) and jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
        value = jax.random.key_data(value)
    array = np.asarray(value)
    if array.size <= _MOST_ELEMENTS:
        return array.tolist() if array.dtype != object else str(array.dtype)
    checksum = zlib.crc32(np.ascontiguousarray(array).tobytes())
    return f"{array.dtype}{list(array.shape)} {checksum:08x}"


def _name(value: Any) -> str:
    return f"{value.__module__}.{value.__qualname__}"
