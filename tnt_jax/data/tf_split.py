"""Moves the selection of a process's rows ahead of the costly operations of a `tf.data` pipeline, where the stream stays exactly the same.

Let g be the selection of own rows of a global batch. From the end of the pipeline, g is moved

- ahead of operations on whole batches that do not look inside (take, skip, repeat, shard, seeded shuffle, memory cache, prefetch,
  concatenate, zip) and of maps that treat each row by itself,
- ahead of the batching operation, where it becomes a selection of elements: windows of the global batch size are cut to own elements,
- ahead of maps on elements, also those that stand before a shuffle, take, skip, repeat, shard or zip: these go by position, so that they
  commute with maps.

Filters, flat maps, interleaves, unbatching, random operations with a state and unknown operations run for all rows, before the selection.
Elements travel with the number of rows of their global batch, because an incomplete last batch is known only when it comes.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import tensorflow as tf

from tnt_jax.data import _tensorflow
from tnt_jax.data.layout import Place, micro_batch_size
from tnt_jax.data.tf_functions import callable_of, stateful_operations
from tnt_jax.data.tf_replay import BATCHES, INDEX_OPERATIONS, MAPS, Repairs, operation_name, operation_names
from tnt_jax.data.tf_rowwise import why_not_rowwise

Split = Literal["auto", "before", "after"]


class CannotSplitEarly(Exception):
    """The selection has to stand after an operation; the text says which one and why."""


@dataclass(frozen=True)
class Later:
    """An operation on elements that may run after the selection.

    Attributes:
        name: For the log.
        apply: From a dataset of `(number of rows, element)` to one of the same form.
        on_element: The function on an element, for maps; None for others.
        parallel: `(num_parallel_calls,)` or empty.
    """

    name: str
    apply: Callable[[Any], Any]
    on_element: Callable[[Any], Any] | None = None
    parallel: tuple[Any, ...] = ()


@dataclass(frozen=True)
class Hoisted:
    """A dataset taken apart: `base`, and the operations on its elements that may run later, in order."""

    base: Any
    later: tuple[Later, ...]
    base_names: tuple[str, ...]


@dataclass
class Splitter:
    """Rebuilds a pipeline as a dataset of `(number of rows, own rows)` with the selection as early as it may stand.

    Attributes:
        place: This process's part of the data axis.
        split: `"before"` trusts that maps with random operations or on whole batches may run on own rows only.
        repairs: Rebuilds operations with seeds and in order.
        before: Names of the operations that run for all rows.
        after: Names of the operations that run for own rows.
        notes: Why the selection stands where it stands.
    """

    place: Place
    split: Split
    repairs: Repairs
    before: list[str] = field(default_factory=list)
    after: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    _done: dict[tuple[int, bool | None], Any] = field(default_factory=dict)

    def local_batches(self, dataset: Any) -> Any:
        """Returns the dataset of `(number of rows [local_rows] or scalar, own rows)` for a dataset of global batches.

        Raises:
            CannotSplitEarly: If an operation after the batching has to see whole batches.
        """
        return self._once((id(dataset), None), lambda: self._local_batches(dataset))

    def _once(self, key: tuple[int, bool | None], make: Callable[[], Any]) -> Any:
        """Returns what `make` gave for `key` the first time: a shuffle that occurs twice draws two orders from one generator."""
        if key not in self._done:
            self._done[key] = make()
        return self._done[key]

    def _local_batches(self, dataset: Any) -> Any:
        kind, inputs = type(dataset).__name__, dataset._inputs()
        if kind in BATCHES:
            return self._local_batch(dataset)
        if kind == "_OptionsDataset":
            return self.local_batches(inputs[0])
        if kind in INDEX_OPERATIONS or kind == "_PrefetchDataset":
            return self._record(dataset, self.repairs.rebuild(dataset, [self.local_batches(inputs[0])]))
        if kind == "CacheDataset":
            return self._record(dataset, self._cached(dataset, self.local_batches(inputs[0])))
        if kind == "_ConcatenateDataset":
            return self._record(dataset, self.local_batches(inputs[0]).concatenate(self.local_batches(inputs[1])))
        if kind == "_ZipDataset":
            return self._record(dataset, self._zipped(dataset))
        if kind in MAPS:
            self._check_rowwise(dataset)
            return self._record(
                dataset, self._later_map(dataset, retrace=not _has_open_rows(inputs[0])).apply(self.local_batches(inputs[0]))
            )
        raise CannotSplitEarly(f"{operation_name(dataset)} stands after the batching and may look at the whole batch")

    def _record(self, dataset: Any, result: Any) -> Any:
        self.after.append(operation_name(dataset))
        return result

    def _check_rowwise(self, dataset: Any) -> None:
        if self.split == "before":
            return
        if kinds := stateful_operations(dataset._map_func):
            raise CannotSplitEarly(_random_reason(dataset, kinds))
        if kind := why_not_rowwise(dataset._map_func):
            raise CannotSplitEarly(
                f"{operation_name(dataset)} works on whole batches and may mix their rows ({kind}); "
                "move it before batch(), or pass split='before' if each row is treated by itself"
            )

    def _local_batch(self, dataset: Any) -> Any:
        size, drop = int(dataset._batch_size), bool(dataset._drop_remainder)
        if type(dataset).__name__ == "_PaddedBatchDataset" and not _has_fixed_rows(dataset.element_spec):
            raise CannotSplitEarly(
                f"{operation_name(dataset)} pads to the longest row of the global batch, which only whole batches tell; "
                "give padded_shapes without None to split before it"
            )
        hoisted = self._hoist(dataset._inputs()[0], at_selection=True)
        if not all(isinstance(spec, tf.TensorSpec) for spec in _tensorflow.flatten(hoisted.base.element_spec)):
            raise CannotSplitEarly("the elements before the batching are not plain tensors")
        own = select_own(hoisted.base, size, self.place, drop_remainder=drop)
        for operation in hoisted.later:
            own = operation.apply(own)
        self.before += hoisted.base_names
        self.after += [*(operation.name for operation in hoisted.later), operation_name(dataset)]
        return self._batched(dataset, own, micro_batch_size(size, self.place.num_ranks) * self.place.local_ranks, drop)

    def _batched(self, dataset: Any, own: Any, rows: int, drop: bool) -> Any:
        if type(dataset).__name__ == "_PaddedBatchDataset":
            shapes = _tensorflow.map_structure(lambda spec: spec.shape[1:], dataset.element_spec)
            zero = tf.constant(0, tf.int64)
            return own.padded_batch(rows, ((), shapes), (zero, dataset._padding_values), drop)
        if hasattr(dataset, "_num_parallel_calls"):
            return own.batch(rows, drop, int(dataset._num_parallel_calls), deterministic=True)
        return own.batch(rows, drop)

    def _hoist(self, dataset: Any, *, at_selection: bool) -> Hoisted:
        """Takes a dataset of elements apart; `at_selection` says that nothing between it and the batching goes by position."""
        return self._once((id(dataset), at_selection), lambda: self._take_apart(dataset, at_selection=at_selection))

    def _take_apart(self, dataset: Any, *, at_selection: bool) -> Hoisted:
        kind, inputs = type(dataset).__name__, dataset._inputs()
        if kind == "_OptionsDataset":
            return self._hoist(inputs[0], at_selection=at_selection)
        if kind in MAPS and self._may_move(dataset):
            source = self._hoist(inputs[0], at_selection=at_selection)
            return Hoisted(source.base, (*source.later, self._later_map(dataset)), source.base_names)
        if kind in INDEX_OPERATIONS:
            source = self._hoist(inputs[0], at_selection=False)
            base = self.repairs.rebuild(dataset, [source.base])
            return Hoisted(base, source.later, (*source.base_names, operation_name(dataset)))
        if kind == "_PrefetchDataset":
            source = self._hoist(inputs[0], at_selection=at_selection)
            prefetch = Later("prefetch", lambda own: own.prefetch(int(dataset._buffer_size)))
            return Hoisted(source.base, (*source.later, prefetch), source.base_names)
        if kind == "CacheDataset" and at_selection:
            source = self._hoist(inputs[0], at_selection=True)
            cache = Later("cache", lambda own: self._cached(dataset, own))
            return Hoisted(source.base, (*source.later, cache), source.base_names)
        if kind == "_ZipDataset":
            return self._hoist_zip(dataset)
        if inputs:
            self.notes.append(f"{operation_name(dataset)} and what stands before it run for all rows.")
        return Hoisted(self.repairs.repaired(dataset), (), tuple(operation_names(dataset)))

    def _may_move(self, dataset: Any) -> bool:
        kinds = stateful_operations(dataset._map_func)
        if kinds and self.split != "before":
            self.notes.append(f"{_random_reason(dataset, kinds)}.")
            return False
        return True

    def _later_map(self, dataset: Any, *, retrace: bool = False) -> Later:
        # A function that was traced for whole batches of a fixed size does not take own rows: the user's code is traced for them.
        function = dataset._map_func._func if retrace else callable_of(dataset._map_func)
        parallel = (int(dataset._num_parallel_calls),) if hasattr(dataset, "_num_parallel_calls") else ()
        self.repairs.note_order(dataset)

        def on_element(element: Any) -> Any:
            return function(*element) if type(element) is tuple else function(element)

        return Later(operation_name(dataset), _mapped(on_element, parallel), on_element, parallel)

    def _hoist_zip(self, dataset: Any) -> Hoisted:
        """Zips the bases; the maps of each branch become maps of the zipped element, up to the branch's first other operation."""
        branches = _tensorflow.flatten(dataset._datasets)
        parts = [self._hoist(branch, at_selection=False) for branch in branches]
        base = tf.data.Dataset.zip(_tensorflow.pack_sequence_as(dataset._datasets, [part.base for part in parts]))
        names = tuple(name for part in parts for name in part.base_names)
        later = [
            operation if operation.on_element is None else _on_branch(dataset._datasets, number, operation)
            for number, part in enumerate(parts)
            for operation in part.later
        ]
        return Hoisted(base, tuple(later), (*names, operation_name(dataset)))

    def _zipped(self, dataset: Any) -> Any:
        branches = [self.local_batches(branch) for branch in _tensorflow.flatten(dataset._datasets)]

        def join(*pairs: Any) -> Any:
            counts = [tf.reshape(count, [-1])[0] for count, _ in pairs]
            for count in counts[1:]:
                tf.debugging.assert_equal(count, counts[0], "zip() pairs batches with different numbers of rows")
            return pairs[0][0], _tensorflow.pack_sequence_as(dataset._datasets, [rows for _, rows in pairs])

        return tf.data.Dataset.zip(tuple(branches)).map(join)

    def _cached(self, dataset: Any, own: Any) -> Any:
        file = dataset._filename.numpy().decode()
        # Processes cache different rows, and may share a file system.
        return own.cache(f"{file}.ranks-{self.place.first_rank}-of-{self.place.num_ranks}" if file else "")


def select_own(dataset: Any, size: int, place: Place, *, drop_remainder: bool) -> Any:
    """Returns `(number of rows, element)` for the elements of each window of `size` that the process at `place` feeds.

    Args:
        dataset: Elements in the global order.
        size: Rows of a global batch.
        place: The process's part of the data axis.
        drop_remainder: Whether an incomplete last window is dropped.
    """

    def own(*window: Any) -> Any:
        parts = window if type(dataset.element_spec) is tuple else window[0]
        rows: Any = tf.data.Dataset.zip(parts) if _tensorflow.is_nested(parts) else parts
        count = rows.cardinality()
        micro = -(-count // place.num_ranks)
        first, local = place.first_rank * micro, place.local_ranks * micro
        real = tf.minimum(tf.maximum(count - first, 0), local)
        padding = rows.skip(count - 1).repeat(local - real)
        return rows.skip(first).take(real).concatenate(padding).map(lambda *element: (count, _joined(element, dataset)))

    return dataset.window(size, drop_remainder=drop_remainder).flat_map(own)


def _joined(element: tuple[Any, ...], dataset: Any) -> Any:
    return element if type(dataset.element_spec) is tuple else element[0]


def _mapped(on_element: Callable[[Any], Any], parallel: tuple[Any, ...]) -> Callable[[Any], Any]:
    order = {"deterministic": True} if parallel else {}
    return lambda own: own.map(lambda count, element: (count, on_element(element)), *parallel, **order)


def _on_branch(structure: Any, number: int, operation: Later) -> Later:
    function = operation.on_element
    assert function is not None

    def on_element(element: Any) -> Any:
        branches = _tensorflow.flatten_up_to(structure, element)
        branches[number] = function(branches[number])
        return _tensorflow.pack_sequence_as(structure, branches)

    return Later(operation.name, _mapped(on_element, operation.parallel), on_element, operation.parallel)


def _has_fixed_rows(spec: Any) -> bool:
    return all(part.shape[1:].is_fully_defined() for part in _tensorflow.flatten(spec))


def _has_open_rows(dataset: Any) -> bool:
    return all(spec.shape.rank and spec.shape[0] is None for spec in _tensorflow.flatten(dataset.element_spec))


def _random_reason(dataset: Any, kinds: list[str]) -> str:
    parallel = hasattr(dataset, "_num_parallel_calls")
    effect = (
        "draws in parallel, so that its results differ from run to run"
        if parallel and not any("PyFunc" in kind for kind in kinds)
        else "depends on how often it ran before"
    )
    return (
        f"{operation_name(dataset)} runs for all rows, because {', '.join(kinds)} {effect}; use tf.random.stateless_* with a seed from the "
        "element (Dataset.enumerate), or pass split='before' to accept other random numbers"
    )
