"""Names as Keras spells them: by class (`MeanSquaredError`), in snake_case, and by short alias in either case (`mse`, `MSE`)."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping
from typing import TypeVar

T = TypeVar("T")


def find(name: str, classes: Mapping[str, T], aliases: Mapping[str, T], *, kind: str, extra: Iterable[str] = ()) -> T:
    """Returns the entry that a name stands for.

    Args:
        name: What the user wrote.
        classes: Entries by class name; their snake_case names are known too.
        aliases: Entries by lower-case alias; upper case is known too.
        kind: What the entries are, for the error.
        extra: Further names that the caller knows, for the error.

    Raises:
        ValueError: If the name is unknown; the error lists the known names and the nearest one.
    """
    known = {**aliases, **{alias.upper(): entry for alias, entry in aliases.items()}}
    known |= {snake_case(class_name): entry for class_name, entry in classes.items()} | dict(classes)
    if name in known:
        return known[name]
    listed = sorted({snake_case(class_name) for class_name in classes} | set(aliases) | set(extra))
    nearest = difflib.get_close_matches(name.lower(), [*listed, *(entry.lower() for entry in classes)], n=1)
    hint = f" Did you mean {nearest[0]!r}?" if nearest else ""
    raise ValueError(f"Unknown {kind} {name!r}.{hint} Known names: {', '.join(listed)}.")


def snake_case(name: str) -> str:
    """Returns a CamelCase name in snake_case, by Keras's rule: `KLDivergence` gives `kl_divergence`."""
    return re.sub("([a-z])([A-Z])", r"\1_\2", re.sub("(.)([A-Z][a-z]+)", r"\1_\2", re.sub(r"\W+", "", name))).lower()
