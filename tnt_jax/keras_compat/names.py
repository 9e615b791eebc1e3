"""Names in Keras's spellings: class name, snake case, and short alias in either case.

Examples are `MeanSquaredError`, `mean_squared_error`, `mse` and `MSE`.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping
from types import ModuleType
from typing import TypeVar

C = TypeVar("C")
T = TypeVar("T")


def classes_of(modules: Iterable[ModuleType], base: type[C]) -> dict[str, type[C]]:
    """Returns the public classes by name that modules define, of those that derive from `base`.

    Args:
        modules: Where to look; what a module only imports does not count.
        base: The base class, which is left out itself.
    """
    return {
        name: cls
        for module in modules
        for name, cls in vars(module).items()
        if isinstance(cls, type) and issubclass(cls, base) and cls is not base
        if cls.__module__ == module.__name__ and not name.startswith("_")
    }


def find(name: str, classes: Mapping[str, T], aliases: Mapping[str, T]) -> T | None:
    """Returns the entry for a name, or None.

    Args:
        name: What the user wrote.
        classes: Entries by class name; their snake_case names are known too.
        aliases: Entries by lower-case alias; upper case is known too.
    """
    known = {**aliases, **{alias.upper(): entry for alias, entry in aliases.items()}}
    known |= {snake_case(class_name): entry for class_name, entry in classes.items()} | dict(
        classes
    )
    return known.get(name)


def unknown(name: str, listed: Iterable[str], *, kind: str, advice: str) -> ValueError:
    """Returns the error for an unknown name, with the known names and the nearest one.

    Args:
        name: What the user wrote.
        listed: The known names, in any order.
        kind: What they name.
        advice: Text to append.
    """
    listed = sorted(set(listed))
    nearest = difflib.get_close_matches(name.lower(), listed, n=1)
    hint = f" Did you mean {nearest[0]!r}?" if nearest else ""
    return ValueError(f"Unknown {kind} {name!r}.{hint} Known names: {', '.join(listed)}.{advice}")


def snake_case(name: str) -> str:
    """Returns a CamelCase name in snake_case by Keras's rule: `KLDivergence` is `kl_divergence`."""
    return re.sub(
        "([a-z])([A-Z])", r"\1_\2", re.sub("(.)([A-Z][a-z]+)", r"\1_\2", re.sub(r"\W+", "", name))
    ).lower()
