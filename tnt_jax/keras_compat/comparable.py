"""Settings as plain values that two processes can compare, whatever objects they consist of.

What has no configuration, and could not be recreated, is named by its class or its code.
"""

import dataclasses
import functools
import inspect
import os
import sys
import zlib
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

import jax
import numpy as np

from tnt_jax import _jax
from tnt_jax.keras_compat.configuration import public_module

_MOST_ELEMENTS = 8
# Flax's own fields: the place of a module within another.
_OF_FLAX = ("parent", "name")


def comparable(value: Any) -> Any:
    """Returns a value as numbers, strings, lists and dicts that are equal for equal settings."""
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
        return class_name(value)
    return _object(value)


def flat(name: str, value: Any) -> dict[str, str]:
    """Returns the parts of a comparable value by name, such as `optimizer.learning_rate`."""
    if isinstance(value, dict) and value:
        parts = {f"{name}.{key}": item for key, item in value.items()}
    elif isinstance(value, list) and any(isinstance(item, (dict, list)) for item in value):
        parts = {f"{name}[{number}]": item for number, item in enumerate(value)}
    else:
        return {name: str(value)}
    return {path: text for part, item in parts.items() for path, text in flat(part, item).items()}


def class_name(kind: type) -> str:
    """Returns the name of a class, with a checksum of its code unless it is of a library."""
    return _name(kind) if _is_of_library(kind) else f"{_name(kind)} (code {_checksum(kind):08x})"


def _object(value: Any) -> Any:
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if hasattr(value, "get_config"):
        try:
            return {"class": class_name(type(value)), **comparable(value.get_config())}
        except Exception as error:  # A class of the user's need not support it.
            return {"class": class_name(type(value)), "get_config": type(error).__name__}
    if dataclasses.is_dataclass(value):
        fields = {
            field.name: comparable(getattr(value, field.name, None))
            for field in dataclasses.fields(value)
            if field.name not in _OF_FLAX
        }
        return {"class": class_name(type(value)), **fields}
    if isinstance(value, np.dtype):
        return value.name
    if callable(value) and hasattr(value, "__qualname__"):
        return _name(value)
    return class_name(type(value))


def _function(function: FunctionType) -> Any:
    """Returns the name and the code of a function, and what it closes over."""
    named = f"{_name(function)} (code {_checksum(function):08x})"
    held = dict(
        zip(function.__code__.co_freevars, map(_content, function.__closure__ or ()), strict=True)
    )
    held |= {f"default {n}": x for n, x in enumerate(function.__defaults__ or ())}
    held |= function.__kwdefaults__ or {}
    # Of the user's functions, objects may differ on each process.
    if not str(function.__module__).startswith("optax"):
        held = {name: x for name, x in held.items() if isinstance(x, (bool, int, float, str))}
    return {"function": named, **{k: comparable(x) for k, x in held.items()}} if held else named


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # It is empty so far.
        return None


def _checksum(value: Any) -> int:
    """Returns a checksum of the code of a function or class, and of what it uses of the user's."""
    checksum, waiting, seen = 0, [value], {id(value)}
    while waiting:
        codes, used = _parts(waiting.pop())
        for code in codes:
            checksum = zlib.crc32(str(_checksum_of_code(code)).encode(), checksum)
        new = [each for each in used if id(each) not in seen and not _is_of_library(each)]
        seen.update(map(id, new))
        waiting += new
    return checksum


def _parts(value: Any) -> tuple[list[CodeType], list[Any]]:
    """Returns the code of a function or class, and the functions and classes that it names."""
    if isinstance(value, type):
        members = [inspect.unwrap(getattr(x, "__func__", x)) for x in vars(value).values()]
        # Those that the user wrote, rather than `dataclass`, have a file.
        functions = [x for x in members if isinstance(x, FunctionType)]
        functions = [x for x in functions if not x.__code__.co_filename.startswith("<")]
        used = [base for base in value.__bases__ if base is not object]
    else:
        functions, used = [inspect.unwrap(value)], []
    for function in functions:
        named = (function.__globals__.get(name) for name in _names(function.__code__))
        used += [x for x in named if isinstance(x, (FunctionType, type))]
    return [function.__code__ for function in functions], used


def _names(code: CodeType) -> list[str]:
    inner = [_names(constant) for constant in code.co_consts if isinstance(constant, CodeType)]
    return [*code.co_names, *(name for names in inner for name in names)]


def _is_of_library(value: Any) -> bool:
    return _is_library(str(value.__module__))


@functools.cache
def _is_library(module: str) -> bool:
    """Returns whether a module is of Python, of this package or of an installed one."""
    root = module.partition(".")[0]
    file = getattr(sys.modules.get(module), "__file__", None) or ""
    is_installed = bool({"site-packages", "dist-packages"} & set(Path(file).parts))
    return root == "tnt_jax" or root in sys.stdlib_module_names - {"__main__"} or is_installed


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
    array = np.asarray(_jax.key_words(value))
    if array.size <= _MOST_ELEMENTS:
        return array.tolist() if array.dtype != object else str(array.dtype)
    checksum = zlib.crc32(np.ascontiguousarray(array).tobytes())
    return f"{array.dtype}{list(array.shape)} {checksum:08x}"


def _name(value: Any) -> str:
    return f"{public_module(value.__module__)}.{value.__qualname__}"
