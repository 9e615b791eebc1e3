"""Grain datasets that make batches at last, as rows that each process fetches for itself."""

from collections.abc import Mapping
from typing import Any

from tnt_jax.data.indexed.random_access import RandomAccess
from tnt_jax.data.sources import is_endless, stages_of

# Operations of a `MapDataset` with a row for each number. Others, such as `filter`, leave some out.
_WITH_ALL_ROWS = frozenset(
    "SourceMapDataset RangeMapDataset MapMapDataset RandomMapMapDataset MapWithIndexMapDataset "
    "ShuffleMapDataset WindowShuffleMapDataset RepeatMapDataset SliceMapDataset MixedMapDataset "
    "ConcatenateMapDataset ZipMapDataset _WithSeedMapDataset".split()
)


class _GrainRows:
    """The rows of a `MapDataset` as the trees that `stack_examples` stacks as Grain does."""

    def __init__(self, rows: Any) -> None:
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Any:
        row = self._rows[index]
        if row is None:
            raise ValueError(
                "A row of the Grain dataset is None. Leave rows out with filter and "
                "to_iter_dataset() before batch, or end with .map(lambda batch: batch), so that "
                "Grain makes the batches."
            )
        return _with_tuples(row)


def _with_tuples(tree: Any) -> Any:
    """Returns a tree with tuples for lists, which are structure for Grain and a leaf here."""
    if isinstance(tree, Mapping):
        return {name: _with_tuples(part) for name, part in tree.items()}
    if isinstance(tree, (tuple, list)):
        parts = map(_with_tuples, tree)
        return type(tree)(*parts) if hasattr(tree, "_fields") else tuple(parts)
    return tree


def rows_of_batched(dataset: Any) -> RandomAccess | None:
    """Returns the rows of a `MapDataset` or `IterDataset` of Grain that makes batches at last.

    None, so that whole batches are prepared, if rows have no numbers: after a filter, without end,
    with another function that makes batches, in an `IterDataset` whose rows do not come straight
    from a `MapDataset`, or where what is private to Grain and tells is missing or unknown.
    """
    kind = _grain_name(dataset)
    if kind not in ("BatchMapDataset", "BatchIterDataset"):
        return None
    rows, num_threads = _parent(dataset), 0
    if kind == "BatchIterDataset":
        if _grain_name(rows) != "PrefetchIterDataset":
            return None
        num_threads = getattr(getattr(rows, "_read_options", None), "num_threads", 0)
        rows = _parent(rows)
    size: Any = getattr(dataset, "_batch_size", None)
    drop_remainder: Any = getattr(dataset, "_drop_remainder", None)
    is_known = isinstance(size, int) and isinstance(drop_remainder, bool)
    makes_batch = _grain_name(getattr(dataset, "_batch_fn", None))
    is_plain = makes_batch in ("make_batch", "_MakeBatchParallel")
    has_all = all(_grain_name(stage) in _WITH_ALL_ROWS for stage in stages_of(rows))
    if not (is_known and is_plain and has_all) or is_endless(rows):
        return None
    return RandomAccess(
        _GrainRows(rows), batch_size=size, drop_remainder=drop_remainder, num_workers=num_threads
    )


def _grain_name(x: Any) -> str:
    """Returns the name of a function of Grain, or of the class of an object; else nothing."""
    named = x if hasattr(x, "__name__") and hasattr(x, "__module__") else type(x)
    return named.__name__ if named.__module__.startswith("grain.") else ""


def _parent(dataset: Any) -> Any:
    """Returns what a dataset is made of, if it is one dataset, or None."""
    parents = getattr(dataset, "parents", ())
    return parents[0] if len(parents) == 1 else None
