"""What the order of a source's rows depends on, so that a later run can enter it in the middle."""

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class RowOrder:
    """What the order of a source's rows depends on.

    A source says so by its attribute `row_order`; one without it may have any order.

    Attributes:
        seed: Seeds of the order; empty if no seed that is known changes it.
        parts: What else changes it, by the names that users know; JSON values.
        is_of_rows: Whether rows come in the same order with every global batch size.
        can_go_back: Whether the data can be read again from its beginning; a generator cannot.
        unrepeatable: Why the rows come in another order in every run, and what to do; empty where
            they do not.
    """

    seed: list[int] = field(default_factory=list)
    parts: dict[str, Any] = field(default_factory=dict)
    is_of_rows: bool = False
    can_go_back: bool = True
    unrepeatable: str = ""


def row_order_of(source: Any) -> RowOrder:
    """Returns what the order of a source's rows depends on."""
    return getattr(source, "row_order", RowOrder())
