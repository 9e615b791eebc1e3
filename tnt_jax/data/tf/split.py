"""Moves the selection of a process's rows ahead of the costly operations of a `tf.data` pipeline.

It moves only where the stream stays exactly the same.

Let g be the selection of own rows of a global batch. From the end of the pipeline, g is moved

- ahead of operations on whole batches that do not look inside (take, skip, repeat, shard, seeded
  shuffle, memory cache, prefetch, concatenate) and, with `split="before"`, of maps,
- ahead of the batching operation, where it becomes a selection of elements: windows of the global
  batch size are cut to own elements,
- ahead of maps on elements, also those that stand before a shuffle, take, skip, repeat or shard:
  these go by position, so that they commute with maps.

Filters, flat maps, interleaves, unbatching, zip, random operations with a state and unknown
operations run for all rows, before the selection. Elements travel with the number of rows of their
global batch, because an incomplete last batch is known only when it comes.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Literal, NamedTuple

import tensorflow as tf

from tnt_jax.data.layout import RankSlice, micro_batch_size
from tnt_jax.data.tf import private
from tnt_jax.data.tf.replay import (
    BATCHES,
    INDEX_OPERATIONS,
    MAPS,
    Repairs,
    calls_python,
    operation_name,
    operation_names,
    stateful_operations,
)


def select_own(dataset: Any, size: int, rank_slice: RankSlice, *, drop_remainder: bool) -> Any:
    """Returns `(rows of the window, element)` for elements of each window that a process feeds."""
    is_tuple = type(dataset.element_spec) is tuple

    def own(*window: Any) -> Any:
        parts = window if is_tuple else window[0]
        rows: Any = tf.data.Dataset.zip(parts) if tf.nest.is_nested(parts) else parts
        count = rows.cardinality()
        micro = micro_batch_size(count, rank_slice.num_ranks)
        (first, end), local = rank_slice.rows_of(count), rank_slice.local_ranks * micro
        real = tf.minimum(tf.maximum(tf.minimum(count, end) - first, 0), local)
        padding = rows.skip(count - 1).repeat(local - real)
        return (
            rows.skip(first)
            .take(real)
            .concatenate(padding)
            .map(lambda *element: (count, element if is_tuple else element[0]))
        )

    return dataset.window(size, drop_remainder=drop_remainder).flat_map(own)


def take_own(batches: Any, rank_slice: RankSlice) -> Any:
    """Returns `(rows of the batch, own rows)` for each global batch."""

    def own(*batch: Any) -> Any:
        parts = batch if type(batches.element_spec) is tuple else batch[0]
        leaf = tf.nest.flatten(parts)[0]
        count: Any = leaf.shape[0] or tf.shape(leaf)[0]
        micro = micro_batch_size(count, rank_slice.num_ranks)
        indices = rank_slice.rows_of(count)[0] + tf.range(rank_slice.local_ranks * micro)
        chosen = tf.minimum(indices, count - 1)
        rows = tf.nest.map_structure(lambda x: tf.gather(x, chosen), parts)
        return tf.cast(count, tf.int64), rows

    return batches.map(own)


# Bytes up to which a whole batch is prepared, and own rows are taken from it.
_SMALL_BYTES = 2**22
read = private.parameter


class CannotSplitEarly(Exception):
    """The selection has to stand after an operation; the text says which one and why."""


class Later(NamedTuple):
    """An operation on elements that may run after the selection, on `(number of rows, element)`."""

    name: str
    apply: Callable[[Any], Any]


class Hoisted(NamedTuple):
    """A dataset as `base`, and the element operations that may run later, in order."""

    base: Any
    later: tuple[Later, ...]
    base_names: tuple[str, ...]


@dataclass
class Splitter:
    """Rebuilds a pipeline with the selection of rows as early as possible, and notes on its place.

    Operations run for all rows (`before`, of which `python_maps` only as they call Python code) or
    for own rows (`after`). For `split`, see `TfData`.
    """

    rank_slice: RankSlice
    split: Literal["auto", "before", "after"]
    repairs: Repairs
    before: list[str] = field(default_factory=list)
    after: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    python_maps: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        # A shuffle made twice would draw two orders.
        self.local_batches = cache(self._local_batches)
        self._hoist = cache(self._split_off)

    def _local_batches(self, dataset: Any) -> Any:
        """Returns the dataset of this process's rows for a dataset of global batches.

        Its elements are `(number of rows, own rows)`; the number is `[local_rows]` or a scalar. It
        raises `CannotSplitEarly` if an operation after the batching has to see whole batches.
        """
        kind = type(dataset).__name__
        inputs = private.inputs(dataset)
        if kind in BATCHES:
            return self._local_batch(dataset)
        if kind == "_OptionsDataset":
            return self.local_batches(inputs[0])
        if kind in INDEX_OPERATIONS or kind == "_PrefetchDataset":
            own = self.repairs.rebuild(dataset, [self.local_batches(inputs[0])])
        elif kind == "CacheDataset":
            own = self.repairs.cached(dataset, self.local_batches(inputs[0]))
        elif kind == "_ConcatenateDataset":
            own = self.local_batches(inputs[0]).concatenate(self.local_batches(inputs[1]))
        elif kind in MAPS:
            own = self._map_of_own_rows(dataset, inputs[0])
        else:
            name = operation_name(dataset)
            raise CannotSplitEarly(
                f"{name} stands after the batching and may look at the whole batch"
            )
        self.after.append(operation_name(dataset))
        return own

    def _map_of_own_rows(self, dataset: Any, source: Any) -> Any:
        if self.split != "before":
            self._record_python(dataset)
            raise CannotSplitEarly(
                f"{operation_name(dataset)} works on whole batches and may mix their rows; move it "
                "before batch(), or pass split='before' if each row is treated by itself"
            )
        rows = self.local_batches(source)
        specs = tf.nest.flatten(source.element_spec)
        if all(spec.shape.rank and spec.shape[0] is None for spec in specs):
            return self._later(dataset).apply(rows)
        try:
            return self._later(dataset, retrace=True).apply(rows)
        except (AttributeError, TypeError, ValueError, tf.errors.OpError) as error:
            raise CannotSplitEarly(
                f"{operation_name(dataset)} takes whole batches alone "
                f"({str(error).strip().splitlines()[-1].strip()})"
            ) from error

    def _local_batch(self, dataset: Any) -> Any:
        size = int(read(dataset, "batch_size"))
        drop = bool(read(dataset, "drop_remainder"))
        is_padded = type(dataset).__name__ == "_PaddedBatchDataset"
        specs = tf.nest.flatten(dataset.element_spec)
        if is_padded and not all(spec.shape[1:].is_fully_defined() for spec in specs):
            raise CannotSplitEarly(
                f"{operation_name(dataset)} pads to the longest row of the global batch, which "
                "only whole batches tell; give padded_shapes without None to split before it"
            )
        self._window = f"-by-{size}" + ("-full" if drop else "")
        hoisted = self._hoist(private.inputs(dataset)[0], at_selection=True)
        specs = tf.nest.flatten(hoisted.base.element_spec)
        if not all(isinstance(spec, tf.TensorSpec) for spec in specs):
            raise CannotSplitEarly("the elements before the batching are not plain tensors")
        if not hoisted.later and not is_padded and _is_small(specs, size):
            self.before += [*hoisted.base_names, operation_name(dataset)]
            return take_own(self._batched(dataset, hoisted.base, size, drop), self.rank_slice)
        own = select_own(hoisted.base, size, self.rank_slice, drop_remainder=drop)
        for operation in hoisted.later:
            own = operation.apply(own)
        self.before += hoisted.base_names
        self.after += [*(operation.name for operation in hoisted.later), operation_name(dataset)]
        rows = micro_batch_size(size, self.rank_slice.num_ranks) * self.rank_slice.local_ranks
        return self._batched(dataset, own, rows, drop)

    def _batched(self, dataset: Any, own: Any, rows: int, drop: bool) -> Any:
        if type(dataset).__name__ == "_PaddedBatchDataset":
            shapes = tf.nest.map_structure(lambda spec: spec.shape[1:], dataset.element_spec)
            values = (tf.constant(0, tf.int64), read(dataset, "padding_values"))
            return own.padded_batch(rows, ((), shapes), values, drop)
        if private.is_parallel(dataset):
            calls = int(read(dataset, "num_parallel_calls"))
            return own.batch(rows, drop, calls, deterministic=True)
        return own.batch(rows, drop)

    def _split_off(self, dataset: Any, *, at_selection: bool) -> Hoisted:
        """Hoists operations on elements; `at_selection`: none up to batching goes by position."""
        kind = type(dataset).__name__
        inputs = private.inputs(dataset)
        if kind == "_OptionsDataset":
            return self._hoist(inputs[0], at_selection=at_selection)
        if kind in INDEX_OPERATIONS:
            source = self._hoist(inputs[0], at_selection=False)
            base = self.repairs.rebuild(dataset, [source.base])
            return Hoisted(base, source.later, (*source.base_names, operation_name(dataset)))
        keeps_rows = kind == "_PrefetchDataset" or (kind == "CacheDataset" and at_selection)
        if keeps_rows or (kind in MAPS and self._may_move(dataset)):
            source = self._hoist(inputs[0], at_selection=at_selection)
            return Hoisted(source.base, (*source.later, self._later(dataset)), source.base_names)
        if inputs:
            self.notes.append(
                f"{operation_name(dataset)} and what stands before it run for all rows."
            )
        return Hoisted(self.repairs.repaired(dataset), (), tuple(operation_names(dataset)))

    def _may_move(self, dataset: Any) -> bool:
        kinds = stateful_operations(read(dataset, "map_func"))
        if not kinds or self.split == "before":
            return True
        self.notes.append(f"{_random_reason(dataset, kinds)}.")
        self._record_python(dataset)
        return False

    def _record_python(self, dataset: Any) -> None:
        if calls_python(read(dataset, "map_func")):
            self.python_maps.append(operation_name(dataset))

    def _later(self, dataset: Any, *, retrace: bool = False) -> Later:
        if type(dataset).__name__ == "_PrefetchDataset":
            return Later("prefetch", lambda own: own.prefetch(int(read(dataset, "buffer_size"))))
        if type(dataset).__name__ == "CacheDataset":
            return Later("cache", lambda own: self.repairs.cached(dataset, own, self._window))
        # A function that was traced for whole batches of a fixed size does not take own rows: the
        # user's code is traced for them.
        wrapper = read(dataset, "map_func")
        function = (private.user_function if retrace else private.traced_function)(wrapper)
        order: dict[str, Any] = {}
        if private.is_parallel(dataset):
            calls = int(read(dataset, "num_parallel_calls"))
            order = {"num_parallel_calls": calls, "deterministic": True}
        self.repairs.note_order(dataset)

        def with_count(count: Any, element: Any) -> Any:
            return count, function(*element) if type(element) is tuple else function(element)

        return Later(operation_name(dataset), lambda own: own.map(with_count, **order))


def _is_small(specs: list[Any], size: int) -> bool:
    """Returns whether a batch is made sooner than its elements are handled one by one."""
    for spec in specs:
        is_number = spec.dtype.is_numpy_compatible and spec.dtype != tf.string
        if not (is_number and spec.shape.is_fully_defined()):
            return False
    return size * sum(x.shape.num_elements() * x.dtype.size for x in specs) <= _SMALL_BYTES


def _random_reason(dataset: Any, kinds: list[str]) -> str:
    effect = "depends on how often it ran before"
    if private.is_parallel(dataset) and not any("PyFunc" in kind for kind in kinds):
        effect = "draws in parallel, so that its results differ from run to run"
    return (
        f"{operation_name(dataset)} runs for all rows, because {', '.join(kinds)} {effect}; use "
        "tf.random.stateless_* with a seed from the element (Dataset.enumerate), or pass "
        "split='before' to accept other random numbers"
    )
