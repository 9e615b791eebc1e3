"""A table of a model's arrays."""

import math
from typing import Any

import jax
import numpy as np


def summary_table(name: str, params: Any, model_state: Any) -> str:
    """Returns a table with path, shape, dtype, count and bytes of every array, and the totals.

    Args:
        name: Name of the model, for the headline.
        params: Trained arrays.
        model_state: Arrays that the model updates itself.
    """
    rows = [("Array", "Shape", "Type", "Count", "Bytes")]
    totals = []
    for title, tree in (("Trained", params), ("State", model_state)):
        leaves = jax.tree_util.tree_leaves_with_path(tree)
        for path, leaf in leaves:
            where = jax.tree_util.keystr(path, simple=True, separator="/")
            rows.append(
                (
                    where,
                    str(tuple(leaf.shape)),
                    str(leaf.dtype),
                    f"{math.prod(leaf.shape):,}",
                    f"{_nbytes(leaf):,}",
                )
            )
        count = sum(math.prod(leaf.shape) for _, leaf in leaves)
        nbytes = sum(_nbytes(leaf) for _, leaf in leaves)
        totals.append(
            f"{title}: {count:,} values in {len(leaves)} arrays, {nbytes / 2**20:,.2f} MiB"
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    line = "-" * (sum(widths) + 2 * (len(widths) - 1))
    body = [
        "  ".join(
            text.ljust(width) if column < 3 else text.rjust(width)
            for column, (text, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    ]
    return "\n".join([f"Model: {name}", line, body[0], line, *body[1:], line, *totals])


def _nbytes(leaf: Any) -> int:
    return math.prod(leaf.shape) * np.dtype(leaf.dtype).itemsize
