"""Rows of the blocks in which Ray keeps a dataset.

This module needs only NumPy and Ray: it is also used by an actor, which does not import JAX.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tnt_jax.data.tables.columns import Batch, dense
from tnt_jax.on_ray.require import import_ray


@dataclass(frozen=True)
class Piece:
    """Consecutive rows of a block, a `ray.ObjectRef`."""

    block: Any
    start: int
    num_rows: int

    def part(self, first: int, end: int) -> "Piece":
        """Returns the rows from number `first` of this piece up to, but without, `end`."""
        return Piece(self.block, self.start + first, end - first)


def rows_of(pieces: Sequence[Piece], blocks: Sequence[Any]) -> Batch:
    """Returns the rows of several pieces, of whose blocks each is given, by column."""
    accessor = import_ray("Ray Data", "ray.data.block").BlockAccessor
    parts = []
    for piece, block in zip(pieces, blocks, strict=True):
        rows = accessor.for_block(block).slice(piece.start, piece.start + piece.num_rows, False)
        parts.append(dense(accessor.for_block(rows).to_batch_format("numpy")))
    first = parts[0]
    if len(parts) == 1:
        return first
    for part in parts:
        if part.keys() != first.keys():
            raise ValueError(
                f"The rows of a dataset must have the same columns, but some have {sorted(first)} "
                f"and some have {sorted(part)}."
            )
    return {name: np.concatenate([part[name] for part in parts]) for name in first}
