"""Imports Ray where something needs it, or says how to install it."""

import importlib
from typing import Any

_OLDEST = (2, 60)


def import_ray(needed_by: str, module: str = "ray") -> Any:
    """Returns the module `ray`, or one below it; imports it on first use.

    `needed_by` is what needs Ray, as its user writes it, such as `tnt-jax --ray`. Errors say what
    to install: a ModuleNotFoundError, or an ImportError if Ray is older than 2.60.
    """
    try:
        ray = importlib.import_module("ray")
        found = importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"{needed_by} needs Ray, but {error.name} is not installed here. Install it with: "
            'pip install "tnt-jax[ray]"',
            name=error.name,
        ) from error
    if tuple(int(part) for part in ray.__version__.split(".")[:2]) < _OLDEST:
        raise ImportError(
            f"{needed_by} needs Ray {'.'.join(map(str, _OLDEST))} or later, but {ray.__version__} "
            'is installed here. Upgrade it with: pip install --upgrade "tnt-jax[ray]"'
        )
    return found
