"""Runs `tf.data` pipelines on several processes, each of which prepares its own rows.

Every process rebuilds the user's pipeline; together they see the single-process stream.

    model.fit(dataset.map(decode).shuffle(10_000).batch(256))  # decode runs for own rows only
    model.fit(TfData(dataset, split="after"))  # every process prepares all rows and keeps its own

TensorFlow is imported when a source is made, not before.
"""

import re
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import count, islice
from sys import is_finalizing
from typing import Any, Literal, NamedTuple, get_args

import numpy as np

from tnt_jax.data.arguments import check_choice
from tnt_jax.data.layout import (
    RankSlice,
    ReadOptions,
    describe_sizes,
    local_rows,
    resolve_batch_size,
)
from tnt_jax.data.permutation import RowOrder
from tnt_jax.data.shards import ShardSource
from tnt_jax.data.sources import HostBatch, Source, announced_batch, select_rows, warn_once
from tnt_jax.data.tf.private import Unreadable
from tnt_jax.job import Slot
from tnt_jax.log import logger


class Distribution(NamedTuple):
    """How a pipeline is distributed, and what was changed in it, and why."""

    sizes: str
    before: tuple[str, ...]  # Operations that every process runs for all rows,
    after: tuple[str, ...]  # and for its own.
    notes: tuple[str, ...]

    def __str__(self) -> str:
        before, after = (", ".join(names) or "nothing" for names in (self.before, self.after))
        all_rows = f"Every process runs for all rows: {before}."
        return "\n".join([self.sizes, all_rows, f"It runs for its own rows: {after}.", *self.notes])


class Rebuilt(NamedTuple):
    """A pipeline of one process: `(number of rows, own rows)` if `is_early`, else whole batches."""

    stream: Any
    is_early: bool
    before: list[str]
    after: list[str]
    notes: list[str]


# The interpreter waits for its thread, and afterwards the executor refuses work: a thread that is
# started then would never run.
_endings = Slot(
    lambda: ThreadPoolExecutor(1, thread_name_prefix="tnt_jax-tf-data-end"),
    close=ThreadPoolExecutor.shutdown,
)


def elements_of(stream: Any) -> Iterator[Any]:
    """Yields the elements of a `tf.data.Dataset` as NumPy arrays.

    An iterator whose pipeline has stages with `AUTOTUNE` waits at its end for the tuner, for up to
    seconds on a busy machine. It ends in a thread, beside whatever comes next.
    """
    held = [stream.as_numpy_iterator()]
    try:
        yield from held[0]
    finally:
        _end(held)


def _end(held: list[Any]) -> None:
    if not is_finalizing():
        with suppress(RuntimeError):  # The interpreter is about to end.
            _endings.get().submit(held.clear)
            return
    held.clear()


def warn_of_parts(rank_slice: RankSlice, python_maps: list[str], disordered: list[str]) -> None:
    """Warns, if several processes read, of maps that run for all rows and of unknown orders."""
    if rank_slice.local_ranks == rank_slice.num_ranks:
        return
    if python_maps:
        warn_once(
            f"Every process runs {', '.join(dict.fromkeys(python_maps))} for all rows, not for "
            "its own alone, because Python code (tf.numpy_function, tf.py_function) may depend on "
            "how often it ran before. If it depends on its arguments alone, pass "
            'TfData(dataset, split="before"), or tf.numpy_function(..., stateful=False).'
        )
    if disordered:
        warn_once(
            f"A shuffle without a seed stands before {', '.join(dict.fromkeys(disordered))}, which "
            "is not known, so every process reads in a different order: rows occur twice or never "
            "in an epoch. Give every shuffle a seed."
        )


Split = Literal["auto", "before", "after"]
_INFINITE = -1  # tf.data.INFINITE_CARDINALITY


@dataclass(frozen=True)
class TfData:
    """A `tf.data.Dataset` with the choice where the rows of a process are selected.

    Attributes:
        dataset: The dataset.
        split: `"auto"` selects as early as the stream stays exactly that of one process. `"before"`
            trusts besides that maps with random operations, and maps on whole batches, may run on
            own rows alone. `"after"` prepares all rows on every process.
        has_flags: Whether the elements are `(is_good, element)`: rows whose `is_good` is False are
            masked and counted.
        named: The same pipeline, slower, in which a record that cannot be read raises an error that
            names it. It is iterated after a failure, from the failing batch on.
    """

    dataset: Any
    split: Split = "auto"
    has_flags: bool = False
    named: Any = None

    def __post_init__(self) -> None:
        check_choice("split", self.split, get_args(Split))


class TfDataSource:
    """The rows of one process of a `tf.data` pipeline, batched or to be batched for each rank.

    Where its elements must be `reproducible`, parallel operations that draw random numbers run for
    one element at a time, and a warning names what still differs. `num_skipped` rows could not be
    read, and were masked. `distribution` says where the pipeline was split, and why.
    """

    in_memory = False

    def __init__(
        self,
        data: TfData,
        rank_slice: RankSlice,
        *,
        micro_batch_size: int | None = None,
        reproducible: bool = False,
    ) -> None:
        from tnt_jax.data.tf import inspection, records

        dataset = data.dataset
        inspection.check_tensors(dataset)
        self.note = records.sizes_if_skipped(dataset)
        self.compare = records.require_same_sizes
        batching = inspection.batching_of(dataset)
        size: int | None = None
        if batching is None or batching.size is not None:
            known = batching or inspection.Batching(None, False, _known(dataset.cardinality()))
            size = resolve_batch_size(
                rank_slice,
                batch_size=known.size,
                micro=micro_batch_size,
                drop_remainder=known.drop_remainder,
                num_examples=known.num_examples,
            )
        self.row_order = RowOrder(inspection.seeds_of_order(dataset), is_of_rows=batching is None)
        if batching is None:
            dataset = dataset.batch(size)
            batching = inspection.batching_of(dataset) or inspection.Batching(size)
        self.global_batch_size: int | None = size
        self.num_batches: int | None = _known(dataset.cardinality())
        self.is_infinite = int(dataset.cardinality()) == _INFINITE
        self.num_examples: int | None = batching.num_examples
        self.num_skipped = 0
        rows = None if data.has_flags else inspection.empty_rows(dataset)
        self.announce = partial(announced_batch, rows, rank_slice, size, batching.num_examples)
        self._dataset = dataset
        self._rank_slice = rank_slice
        self._data = data
        self._micro = micro_batch_size
        self._reproducible = reproducible
        self._build()
        self.order = {"split": data.split, "rows are selected early": self._is_early}
        logger.info("%s", self.distribution)

    def batches(self, epoch: int, start_batch: int = 0) -> Iterator[HostBatch]:
        """Yields this process's rows of the batches of `epoch`, from `start_batch` on.

        Those before are prepared and dropped. A dataset that reshuffles gives the order of its pass
        number `epoch`: earlier passes that were not made are started, or read where that matters.
        An earlier epoch than the last one builds the pipeline anew, and so does one after a pass
        that should have been read to its end and was not.
        """
        self._go_to(epoch)
        self._num_passes += 1
        self._was_left = self._needs_whole_passes
        make = _from_own_rows if self._is_early else select_rows
        elements = elements_of(self._stream.skip(start_batch) if start_batch else self._stream)
        for number in count(start_batch):
            try:
                element = next(elements)
            except StopIteration:
                self._was_left = False
                return
            except Exception as error:
                error.add_note(f"This happened in batch {number} of epoch {epoch}, or soon after.")
                self._name_record(epoch, number, error)
                raise
            batch = make(element, self._rank_slice)
            yield self._without_bad_rows(batch) if self._data.has_flags else batch

    def _name_record(self, epoch: int, batch: int, error: Exception) -> None:
        """Raises an error that names the record which cannot be read, if it can be found."""
        if type(error).__name__ == "DataLossError":
            from tnt_jax.data.tf.records import check_records, files_of

            try:
                files = files_of(self._dataset)
            except Unreadable as missing:
                logger.warning(
                    "Which record cannot be read is not known: this version of TensorFlow differs "
                    "(%s).",
                    missing,
                )
                return
            check_records(files)
        if self._data.named is not None:
            named_data = TfData(self._data.named, self._data.split)
            source = TfDataSource(named_data, self._rank_slice, micro_batch_size=self._micro)
            try:
                list(islice(source.batches(epoch, batch), 2))
            except Exception as named:
                # What an operation said, without the names of TensorFlow's nodes around it.
                found = re.search(r"[^\[\]\n'\"]*cannot be read[^\[\]\n'\"]*", str(named))
                raise ValueError(found.group().strip() if found else str(named)) from error

    def _without_bad_rows(self, batch: HostBatch) -> HostBatch:
        is_good, data = batch.data
        bad = ~is_good if batch.mask is None else ~is_good & (batch.mask > 0)
        if num_bad := int(bad.sum()):
            self.num_skipped += num_bad
            logger.warning(
                "Skipped %d records that cannot be read (%d on this process so far).",
                num_bad,
                self.num_skipped,
            )
        return HostBatch(data, batch.mask, batch.num_rows).masked(is_good)

    def _build(self) -> None:
        """Makes the pipeline of this process; its shuffles stand at their first order."""
        from tnt_jax.data.tf.inspection import needs_whole_passes, reshuffles
        from tnt_jax.data.tf.replay import with_fixed_order

        self._num_passes = 0
        self._reshuffles = self._needs_whole_passes = self._was_left = False
        try:
            rebuilt = self._rebuilt()
            self._reshuffles = reshuffles(self._dataset)
            self._needs_whole_passes = needs_whole_passes(self._dataset)
        except Unreadable as error:
            rebuilt = self._untouched(error)
        self._is_early = rebuilt.is_early
        self._stream, order_notes = with_fixed_order(rebuilt.stream, self._dataset)
        self.distribution = Distribution(
            describe_sizes(self._rank_slice, self),
            tuple(rebuilt.before),
            tuple(rebuilt.after),
            tuple(dict.fromkeys([*rebuilt.notes, *order_notes])),
        )

    def _rebuilt(self) -> Rebuilt:
        """Returns the pipeline with early row selection, seeded shuffles and a fixed order."""
        from tnt_jax.data.tf.replay import Repairs, operation_names
        from tnt_jax.data.tf.split import CannotSplitEarly, Splitter

        repairs = Repairs(self._rank_slice, one_by_one=self._reproducible)
        splitter = Splitter(self._rank_slice, self._data.split, repairs)
        try:
            if self._data.split == "after":
                raise CannotSplitEarly("split='after' asks for it")
            feeds_all = self._rank_slice.local_ranks == self._rank_slice.num_ranks
            if feeds_all and self._data.split == "auto":
                raise CannotSplitEarly("this process feeds all ranks")
            stream = splitter.local_batches(self._dataset)
        except CannotSplitEarly as reason:
            if self._data.split == "before":
                raise ValueError(
                    f"split='before' is impossible: {reason}. Use 'auto', or change the pipeline."
                ) from None
            stream = repairs.repaired(self._dataset)
            is_early, before, after = False, operation_names(self._dataset), []
            notes = [f"Rows are selected last: {reason}."]
        else:
            is_early, before, after, notes = True, splitter.before, splitter.after, splitter.notes
        warn_of_parts(self._rank_slice, splitter.python_maps, repairs.disordered)
        if self._reproducible:
            self._warn_of_differences(stream, repairs.slowed)
        return Rebuilt(stream, is_early, before, after, [*notes, *repairs.notes])

    def _untouched(self, error: Unreadable) -> Rebuilt:
        """Returns the pipeline unchanged, for versions of TensorFlow that hide its structure."""
        reason = f"this version of TensorFlow does not let the pipeline be inspected ({error})"
        if self._data.split == "before":
            raise ValueError(
                f"split='before' is impossible: {reason}. Use 'after', or install TensorFlow 2.21."
            ) from error
        warn_once(
            f"Every process runs the whole pipeline, because {reason}. A shuffle or random "
            "operation without a seed gives each process rows of its own: give all of them seeds, "
            "or install TensorFlow 2.21."
        )
        notes = [f"Rows are selected last: {reason}."]
        return Rebuilt(self._dataset, False, ["the whole pipeline"], [], notes)

    def _warn_of_differences(self, stream: Any, slowed: list[str]) -> None:
        """Warns of what breaks the promise of equal elements in every run, and what was slowed."""
        from tnt_jax.data.tf.inspection import draws_for_own_rows, run_to_run_differences

        differences = run_to_run_differences(stream)
        if self._data.split == "before":
            differences += draws_for_own_rows(self._dataset)
        if differences:
            warn_once(
                "Training is not reproducible, because its data may differ from run to run: "
                f"{'; '.join(differences)}. Give every operation a seed and deterministic=True, "
                "draw with tf.random.stateless_* and a seed from the element (Dataset.enumerate), "
                "and leave TfData's split as it is."
            )
        if slowed:
            warn_once(
                f"To be reproducible, {'; '.join(slowed)}, because in parallel the order "
                "of random draws is not fixed. To run it in parallel, draw with "
                "tf.random.stateless_* and a seed from the element (Dataset.enumerate)."
            )

    def _go_to(self, epoch: int) -> None:
        """Brings the shuffles of the pipeline to their order of pass `epoch`."""
        if not self._reshuffles:
            return
        if epoch < self._num_passes or self._was_left:
            self._build()
        while self._num_passes < epoch:
            # A pass draws its seeds as it starts, but a shuffle before a repeat draws them again.
            deque(islice(self._stream, None if self._needs_whole_passes else 1), maxlen=0)
            self._num_passes += 1


def _from_own_rows(element: tuple[np.ndarray, Any], rank_slice: RankSlice) -> HostBatch:
    count = int(element[0].flat[0])
    return HostBatch(element[1], local_rows(count, rank_slice).mask, count)


def tf_source(dataset: Any, options: ReadOptions) -> Source:
    """Returns the source of a `tf.data.Dataset` or `TfData`, whole or a process's own shard."""
    choice = dataset if isinstance(dataset, TfData) else TfData(dataset)
    if not options.distribute:
        return _shard_source(choice.dataset, options)
    return TfDataSource(
        choice,
        options.rank_slice,
        micro_batch_size=options.micro_batch_size,
        reproducible=options.reproducible,
    )


def _shard_source(dataset: Any, options: ReadOptions) -> Source:
    from tnt_jax.data.tf.inspection import batching_of, check_tensors

    check_tensors(dataset)
    if batching_of(dataset) is None:
        if options.micro_batch_size is None:
            raise ValueError(
                "The dataset is not batched and no tnt_micro_batch_size was given. Batch each "
                f"process's shard with tnt_micro_batch_size * {options.rank_slice.local_ranks} "
                "(the ranks of this process), or pass tnt_micro_batch_size."
            )
        dataset = dataset.batch(options.micro_batch_size * options.rank_slice.local_ranks)
    logger.info("Automatic dataset distribution is off: every process feeds its own shard.")
    return ShardSource(
        dataset, rank_slice=options.rank_slice, micro_batch_size=options.micro_batch_size
    )


def _known(cardinality: Any) -> int | None:
    return int(cardinality) if int(cardinality) >= 0 else None
