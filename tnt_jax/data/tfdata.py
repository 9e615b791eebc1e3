"""`tf.data` pipelines: every process rebuilds the user's pipeline for its own rows; together they see the single-process stream.

    model.fit(dataset.map(decode).shuffle(10_000).batch(256))  # decode runs for own rows only
    model.fit(TfData(dataset, split="after"))  # every process prepares all rows and keeps its own

TensorFlow is imported when a source is made, not before.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import count, islice
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from tnt_jax.data.layout import Place, local_rows, resolve_batch_size
from tnt_jax.data.report import describe_sizes, last_padded_rows
from tnt_jax.data.sources import HostBatch, Source, common_length, select_rows
from tnt_jax.log import logger

if TYPE_CHECKING:
    from tnt_jax.data.dispatch import Reading

Split = Literal["auto", "before", "after"]
_INFINITE = -1  # tf.data.INFINITE_CARDINALITY
_SPLITS = ("auto", "before", "after")


@dataclass(frozen=True)
class TfData:
    """A `tf.data.Dataset` with the choice where the rows of a process are selected.

    Attributes:
        dataset: The dataset.
        split: `"auto"` selects as early as the stream stays exactly that of one process. `"before"` trusts besides that maps with random
            operations, and maps on whole batches, may run on own rows alone. `"after"` prepares all rows on every process.
        has_flags: Whether the elements are `(is_good, element)`: rows whose `is_good` is False are masked and counted.
        named: The same pipeline, slower, in which a record that cannot be read raises an error that names it. It is iterated after a
            failure, from the failing batch on.
    """

    dataset: Any
    split: Split = "auto"
    has_flags: bool = False
    named: Any = None

    def __post_init__(self) -> None:
        if self.split not in _SPLITS:
            raise ValueError(f"split must be one of {', '.join(map(repr, _SPLITS))}, but is {self.split!r}.")


@dataclass(frozen=True)
class Distribution:
    """How a pipeline is distributed.

    Attributes:
        place: This process's part of the data axis.
        global_batch_size: Rows of a full global batch; None where batches differ.
        num_batches: Batches of an epoch; None when unknown or infinite.
        num_padded_rows: Rows that the ranks together add to the last batch; None when unknown.
        before: Operations that run for all rows on every process, in order.
        after: Operations that run for this process's rows.
        notes: What was changed in the pipeline, and why the selection stands where it stands.
    """

    place: Place
    global_batch_size: int | None
    num_batches: int | None
    num_padded_rows: int | None
    before: tuple[str, ...]
    after: tuple[str, ...]
    notes: tuple[str, ...]

    def __str__(self) -> str:
        sizes = describe_sizes(
            self.place,
            global_batch_size=self.global_batch_size,
            num_batches=self.num_batches,
            num_padded_rows=self.num_padded_rows,
        )
        before, after = (", ".join(names) or "nothing" for names in (self.before, self.after))
        lines = [sizes, f"Every process runs for all rows: {before}.", f"It runs for its own rows: {after}."]
        return "\n".join([*lines, *self.notes])


class TfDataSource:
    """The rows of one process of a `tf.data` pipeline.

    Args:
        data: A batched dataset, or with `micro_batch_size` an unbatched one.
        place: This process's part of the data axis.
        micro_batch_size: Rows of one rank; where the dataset is batched it must agree with the batch.
        reproducible: Whether the elements must be the same in every run: parallel operations that draw random numbers then run for one
            element at a time, and a warning names what still differs.

    Attributes:
        global_batch_size: Rows of a full global batch; None where batches differ or the pipeline does not tell.
        num_batches: Batches of an epoch; None when unknown or infinite. No pass is made to count them.
        num_examples: Rows of an epoch; None when unknown or infinite.
        is_infinite: Whether an epoch is known to have no end.
        num_skipped: Rows of this process that were masked because they could not be read.
        in_memory: False: a thread reads ahead.
        distribution: Where the pipeline was split, and why.

    Raises:
        TypeError: If the elements hold text, ragged or sparse tensors.
        ValueError: If the dataset is unbatched and no `micro_batch_size` is given, if sizes contradict one another, or if
            `split="before"` is impossible.
    """

    in_memory = False

    def __init__(self, data: TfData, place: Place, *, micro_batch_size: int | None = None, reproducible: bool = False) -> None:
        from tnt_jax.data.tf_inspect import Batching, batching_of, check_tensors

        dataset = data.dataset
        check_tensors(dataset)
        batching = batching_of(dataset)
        size: int | None = None
        if batching is None or batching.size is not None:
            size = resolve_batch_size(
                place,
                batch_size=batching and batching.size,
                micro=micro_batch_size,
                drop_remainder=batching is not None and batching.drop_remainder,
                num_examples=_known(dataset.cardinality()) if batching is None else batching.num_examples,
            )
        if batching is None:
            dataset = dataset.batch(size)
            batching = batching_of(dataset) or Batching(size)
        self.global_batch_size: int | None = size
        self.num_batches: int | None = _known(dataset.cardinality())
        self.is_infinite = int(dataset.cardinality()) == _INFINITE
        self.num_examples: int | None = batching.num_examples
        self.num_skipped = 0
        self._dataset, self._place, self._data, self._micro = dataset, place, data, micro_batch_size
        self._split: Split = data.split
        self._reproducible = reproducible
        self._num_passes = 0
        self._build()
        logger.info("%s", self.distribution)

    def batches(self, epoch: int, start_batch: int = 0) -> Iterator[HostBatch]:
        """Yields this process's rows of the batches of `epoch`, from `start_batch` on; the ones before are prepared and dropped.

        A dataset that reshuffles gives the order of its pass number `epoch`: earlier passes that were not made are started, and
        an earlier epoch than the last one builds the pipeline anew.
        """
        self._go_to(epoch)
        self._num_passes += 1
        stream = self._stream.skip(start_batch) if start_batch else self._stream
        make = self._from_own_rows if self._is_early else self._from_all_rows
        elements = stream.as_numpy_iterator()
        for number in count(start_batch):
            try:
                element = next(elements)
            except StopIteration:
                return
            except Exception as error:
                error.add_note(f"This happened in batch {number} of epoch {epoch}, or soon after.")
                self._name_record(epoch, number, error)
                raise
            batch = make(element)
            yield self._without_bad_rows(batch) if self._data.has_flags else batch

    def _name_record(self, epoch: int, batch: int, error: Exception) -> None:
        """Raises an error that names the record which cannot be read, if it can be found."""
        if type(error).__name__ == "DataLossError":
            from tnt_jax.data.records import check_records, files_of

            check_records(files_of(self._dataset))
        if self._data.named is not None:
            source = TfDataSource(TfData(self._data.named, self._split), self._place, micro_batch_size=self._micro)
            try:
                list(islice(source.batches(epoch, batch), 2))
            except Exception as named:
                raise ValueError(_first_line(named)) from error

    def _without_bad_rows(self, batch: HostBatch) -> HostBatch:
        is_good, data = batch.data
        # Another process may have bad rows in this batch, so that the mask is there always: all run one program.
        mask = np.ones(len(is_good), np.float32) if batch.mask is None else batch.mask
        if num_bad := int(((mask > 0) & ~is_good).sum()):
            self.num_skipped += num_bad
            logger.warning("Skipped %d records that cannot be read (%d on this process so far).", num_bad, self.num_skipped)
        return HostBatch(data, mask * is_good, batch.num_rows)

    def _from_own_rows(self, element: tuple[np.ndarray, Any]) -> HostBatch:
        count = int(element[0].flat[0])
        return HostBatch(element[1], local_rows(count, self._place).mask, count)

    def _from_all_rows(self, element: Any) -> HostBatch:
        count = common_length(element)
        return select_rows(element, local_rows(count, self._place), count)

    def _build(self) -> None:
        """Makes the pipeline of this process; its shuffles stand at their first order."""
        from tnt_jax.data.tf_replay import Repairs, operation_names, with_fixed_order
        from tnt_jax.data.tf_split import CannotSplitEarly, Splitter

        repairs = Repairs(one_by_one=self._reproducible)
        splitter = Splitter(self._place, self._split, repairs)
        self._is_early = False
        try:
            if (reason := self._why_not_early()) is not None:
                raise CannotSplitEarly(reason)
            stream = splitter.local_batches(self._dataset)
            self._is_early, names, notes = True, (splitter.before, splitter.after), splitter.notes
        except CannotSplitEarly as reason:
            if self._split == "before":
                raise ValueError(f"split='before' is impossible: {reason}. Use split='auto', or change the pipeline.") from None
            stream = repairs.repaired(self._dataset)
            names, notes = (operation_names(self._dataset), []), [f"Rows are selected last: {reason}."]
        self._stream, order_notes = with_fixed_order(stream, self._dataset)
        if self._reproducible:
            self._warn_of_differences(repairs.slowed)
        padded = last_padded_rows(self.num_examples, self.global_batch_size, self._place.num_ranks)
        self.distribution = Distribution(
            self._place, self.global_batch_size, self.num_batches, padded, tuple(names[0]), tuple(names[1]),
            tuple(dict.fromkeys([*notes, *repairs.notes, *order_notes])),
        )  # fmt: skip

    def _warn_of_differences(self, slowed: list[str]) -> None:
        from tnt_jax.data.tf_run_to_run import draws_for_own_rows, run_to_run_differences

        differences = run_to_run_differences(self._stream)
        if self._split == "before":
            differences += draws_for_own_rows(self._dataset)
        if differences:
            _warn(
                f"Training is not reproducible, because its data may differ from run to run: {'; '.join(differences)}. Give every "
                "operation a seed and deterministic=True, draw with tf.random.stateless_* and a seed from the element "
                "(Dataset.enumerate), and leave TfData's split as it is."
            )
        if slowed:
            _warn(
                f"To be reproducible, {'; '.join(slowed)}, because in parallel random numbers are drawn in an order of chance. To run it "
                "in parallel, draw with tf.random.stateless_* and a seed from the element (Dataset.enumerate)."
            )

    def _why_not_early(self) -> str | None:
        if self._split == "after":
            return "split='after' asks for it"
        if self._place.local_ranks == self._place.num_ranks:
            return None if self._split == "before" else "this process feeds all ranks"
        return None

    def _go_to(self, epoch: int) -> None:
        """Brings the shuffles of the pipeline to their order of pass `epoch`."""
        from tnt_jax.data.tf_inspect import reshuffles, reshuffles_within_a_pass

        if not reshuffles(self._dataset):
            return
        if epoch < self._num_passes:
            self._build()
            self._num_passes = 0
        while self._num_passes < epoch:
            # A pass draws its seeds when it starts; a shuffle below a repeat draws again on the way.
            stream = iter(self._stream)
            next(stream, None)
            if reshuffles_within_a_pass(self._dataset):
                for _ in stream:
                    pass
            self._num_passes += 1


def tf_source(dataset: Any, reading: "Reading") -> Source:
    """Returns the source of a `tf.data.Dataset`, or of a `TfData`.

    With `reading.distribute` the dataset is the same on every process, and each feeds its rows; otherwise it is the process's own shard,
    batched for its own ranks.
    """
    choice = dataset if isinstance(dataset, TfData) else TfData(dataset)
    if not reading.distribute:
        return _shard_source(choice.dataset, reading)
    return TfDataSource(choice, reading.place, micro_batch_size=reading.micro_batch_size, reproducible=reading.reproducible)


def _shard_source(dataset: Any, reading: "Reading") -> Source:
    from tnt_jax.data.shards import ShardSource
    from tnt_jax.data.tf_inspect import batching_of, check_tensors

    check_tensors(dataset)
    if batching_of(dataset) is None:
        if reading.micro_batch_size is None:
            raise ValueError(
                "The dataset is not batched and no tnt_micro_batch_size was given. Batch each process's shard with "
                f"tnt_micro_batch_size * {reading.place.local_ranks} (the ranks of this process), or pass tnt_micro_batch_size."
            )
        dataset = dataset.batch(reading.micro_batch_size * reading.place.local_ranks)
    logger.info("Automatic dataset distribution is off: every process feeds its own shard.")
    return ShardSource(_NumpyBatches(dataset), place=reading.place, micro_batch_size=reading.micro_batch_size)


class _NumpyBatches:
    """The elements of a `tf.data.Dataset` as NumPy arrays; it has a length where the dataset knows its cardinality."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    def __iter__(self) -> Iterator[Any]:
        return self._dataset.as_numpy_iterator()

    def __len__(self) -> int:
        cardinality = _known(self._dataset.cardinality())
        if cardinality is None:
            raise TypeError("The dataset's length is unknown.")
        return cardinality


@cache
def _warn(text: str) -> None:
    """Warns once: an evaluation after every epoch reads the same data again."""
    logger.warning("%s", text)


def _first_line(error: Exception) -> str:
    """Returns what an operation said, without the names of TensorFlow's nodes around it."""
    found = re.search(r"[^\[\]\n'\"]*cannot be read[^\[\]\n'\"]*", str(error))
    return found.group().strip() if found else str(error)


def _known(cardinality: Any) -> int | None:
    return int(cardinality) if int(cardinality) >= 0 else None
