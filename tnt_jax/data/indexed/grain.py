"""Grain datasets that make batches at last, as rows that each process fetches for itself."""

from typing import Any

from tnt_jax.data.elements import is_of_library
from tnt_jax.data.indexed.random_access import RandomAccess
from tnt_jax.data.sources import is_endless, stages_of


def rows_of_batched(dataset: Any) -> RandomAccess | None:
    """Returns the rows of a `MapDataset` or `IterDataset` of Grain that makes batches at last.

    None if rows have no numbers: after a filter, without end, with another way to make batches, or
    in an `IterDataset` whose rows do not come straight from a `MapDataset`. What tells is private
    to Grain; where it is missing, the result is None, too: whole batches are prepared.
    """
    kind = type(dataset).__name__
    is_of_grain = any(is_of_library(dataset, "grain", n) for n in ("MapDataset", "IterDataset"))
    if not is_of_grain or kind not in ("BatchMapDataset", "BatchIterDataset"):
        return None
    (rows,) = dataset.parents
    num_threads = 0
    if kind == "BatchIterDataset":
        if type(rows).__name__ != "PrefetchIterDataset":
            return None
        num_threads = getattr(getattr(rows, "_read_options", None), "num_threads", 0)
        (rows,) = rows.parents
    size: Any = getattr(dataset, "_batch_size", None)
    drop_remainder: Any = getattr(dataset, "_drop_remainder", None)
    make = getattr(dataset, "_batch_fn", None)
    is_known = isinstance(size, int) and isinstance(drop_remainder, bool)
    is_plain = getattr(make, "__name__", type(make).__name__) in (
        "make_batch",
        "_MakeBatchParallel",
    )
    is_filtered = any("Filter" in type(stage).__name__ for stage in stages_of(rows))
    if not is_known or not is_plain or is_filtered or is_endless(rows):
        return None
    return RandomAccess(
        rows, batch_size=size, drop_remainder=drop_remainder, num_workers=num_threads
    )
