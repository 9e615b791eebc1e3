"""Names as Keras spells them: by class (`MeanSquaredError`), in snake_case, and by short alias in either case (`mse`, `MSE`)."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping
from typing import TypeVar

T = TypeVar("T")


def find(name: str, classes: Mapping[str, T], aliases: Mapping[str, T]) -> T | None:
    """Returns the entry that a name stands for, None if there is none.

    Args:
        name: What the user wrote.
        classes: Entries by class name; their snake_case names are known too.
        aliases: Entries by lower-case alias; upper case is known too.
    """
    known = {**aliases, **{alias.upper(): entry for alias, entry in aliases.items()}}
    known |= {snake_case(class_name): entry for class_name, entry in classes.items()} | dict(classes)
    return known.get(name)


def unknown(name: str, listed: Iterable[str], *, kind: str, advice: str) -> ValueError:
    """Returns the error about an unknown name: it lists the known ones and the nearest.

    Args:
        name: What the user wrote.
        listed: The known names, in any order.
        kind: What they name.
        advice: What else to say.
    """
    listed = sorted(set(listed))
    nearest = difflib.get_close_matches(name.lower(), listed, n=1)
    hint = f" Did you mean {nearest[0]!r}?" if nearest else ""
    return ValueError(f"Unknown {kind} {name!r}.{hint} Known names: {', '.join(listed)}.{advice}")


def snake_case(name: str) -> str:
    """Returns a CamelCase name in snake_case, by Keras's rule: `KLDivergence` gives `kl_divergence`."""
    return re.sub("([a-z])([A-Z])", r"\1_\2", re.sub("(.)([A-Z][a-z]+)", r"\1_\2", re.sub(r"\W+", "", name))).lower()
