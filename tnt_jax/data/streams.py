"""Epochs of a source, one pass each or some steps, with the same batches on all processes.

A program that sums over ranks completes only if every process runs it. The threads that read
therefore report, ahead of the steps, which batches they have; a step runs once all processes have
its batch. If the data of one process ends or fails sooner, or if its batches differ, all processes
raise the same error after the same step.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from itertools import chain, count, islice, takewhile
from typing import Any

import jax
import numpy as np

from tnt_jax.data.agreement import CoordinationBoard, Exchange, ReadAhead, Report, unique_name
from tnt_jax.data.feed import start_reader
from tnt_jax.data.sources import HostBatch, Source
from tnt_jax.distributed.host import collectives
from tnt_jax.distributed.joining import runtime
from tnt_jax.distributed.leaving import PeerError
from tnt_jax.log import logger

# At most so many batches wait until all processes have reported them.
_MOST_BATCHES, _MOST_BYTES = 32, 32 * 2**20
# Of the time between two messages; more batches for each message make it smaller.
_MESSAGE_SHARE = 0.05


def read_in_lockstep(
    items: Iterator[HostBatch], source: Source, *, where: str, first_step: int = 1
) -> Iterator[HostBatch]:
    """Returns batches checked by `in_lockstep`, where processes may differ; all call it alike."""
    if jax.process_count() == 1 or source.in_memory or getattr(source, "is_in_lockstep", False):
        return items
    exchange = Exchange(CoordinationBoard(), unique_name("batches"))
    return in_lockstep(items, exchange, where=where, first_step=first_step)


def in_lockstep(
    items: Iterator[HostBatch], exchange: Exchange, *, where: str, first_step: int = 1
) -> Iterator[HostBatch]:
    """Yields batches as long as all processes have the same ones; else raises an error on all."""
    reader = ReadAhead(items, lambda item: (item.num_rows, describe(item)), 0)
    size, step = 1, first_step
    posted_at = time.perf_counter()
    while True:
        reader.read(1, at_most=1)
        start = time.perf_counter()
        exchange.post(reader.report())
        reports = exchange.read_all()
        end = time.perf_counter()
        if end - start > _MESSAGE_SHARE * (end - posted_at):
            size = min(2 * size, _MOST_BATCHES)
        posted_at = start
        num_alike = _num_alike(reports)
        for _ in range(num_alike):
            yield from reader.take(1)
            step += 1
            reader.read(2, at_most=size, most_bytes=_MOST_BYTES)
        _check_next(reports, num_alike, where, step, reader.error)
        if all(report.has_ended and len(report.batches) == num_alike for report in reports):
            return


def describe(item: HostBatch) -> str:
    """Describes what must be the same in a batch on all processes: rows, shapes and dtypes."""
    shapes = [f"{np.asarray(x).dtype}{list(np.shape(x)[1:])}" for x in jax.tree.leaves(item.data)]
    return f"{item.num_rows} rows of {', '.join(shapes)}"


def _num_alike(reports: list[Report]) -> int:
    """Returns how many of the next batches agree on all processes."""
    columns = zip(*(report.batches for report in reports), strict=False)
    return len(list(takewhile(lambda column: len(set(column)) == 1, columns)))


def _check_next(
    reports: list[Report], num_alike: int, where: str, step: int, error: Exception | None
) -> None:
    """Raises on all processes unless all can continue after the batches that agree."""
    # A process that has reported neither a further batch nor the end is not known yet.
    next_of: dict[int, Any] = {
        p: r.batches[num_alike] for p, r in enumerate(reports) if len(r.batches) > num_alike
    }
    ended = [p for p, report in enumerate(reports) if report.has_ended and p not in next_of]
    failed = [process for process in ended if reports[process].error]
    if failed and error is not None:
        raise error
    if failed:
        raise PeerError(
            failed[0], f"The data of process {failed[0]} failed: {reports[failed[0]].error}"
        )
    advice = (
        "Every process must read the same batches, of which each trains on its rows. Where each "
        "process reads data of its own, pass tnt_distribute_dataset=False."
    )
    if not next_of:
        return
    one, *others = next_of
    if ended:
        raise RuntimeError(
            f"The data of process {ended[0]} has ended after {step - 1} batch(es) of {where}, but "
            f"process {one} has more. {advice}"
        )
    for other in others:
        if next_of[other] != next_of[one]:
            raise ValueError(
                f"Batch {step} of {where} has {next_of[one]} on process {one}, but "
                f"{next_of[other]} on process {other}. {advice}"
            )


class EpochStream:
    """The batches of successive epochs, each a pass over the source, or `steps_per_epoch` steps.

    Then the next epoch continues where this one stopped; a pass that ends early ends the epoch,
    with a warning, as in Keras.
    """

    def __init__(self, source: Source, *, steps_per_epoch: int | None = None) -> None:
        if steps_per_epoch is not None and steps_per_epoch < 1:
            raise ValueError(f"steps_per_epoch must be at least 1, but is {steps_per_epoch}.")
        self.source = source
        self.steps_per_epoch = steps_per_epoch
        self._pass: Iterator[HostBatch] | None = None
        self._num_passes = 0
        self._steps_in_pass = 0
        self._peeked: tuple[int, HostBatch, Iterator[HostBatch]] | None = None
        self._resumed: tuple[int, Iterator[HostBatch]] | None = None

    def require_end(self, steps: int | None = None) -> "EpochStream":
        """Returns itself if its epochs end, or the caller stops after some steps."""
        is_infinite = getattr(self.source, "is_infinite", False)
        if is_infinite and steps is None and self.steps_per_epoch is None:
            raise ValueError(
                "The dataset is infinite, so an epoch would never end. Pass steps_per_epoch to "
                "fit, or steps to evaluate or predict."
            )
        return self

    @property
    def num_steps(self) -> int | None:
        """Steps of an epoch, None when unknown."""
        return self.steps_per_epoch if self.steps_per_epoch is not None else self.source.num_batches

    def peek(self, epoch: int) -> HostBatch:
        """Returns the first batch of `epoch`, which `epoch(epoch)` yields again."""
        if self._peeked is None or self._peeked[0] != epoch:
            batches = self._begin(epoch)
            first = next(batches, None)
            if first is None:
                raise ValueError(
                    "The dataset is empty: it gave no batch. At least one example is needed."
                )
            self._peeked = (epoch, first, batches)
        return self._peeked[1]

    def epoch(self, epoch: int) -> Iterator[HostBatch]:
        """Returns the batches of `epoch`."""
        resumed, self._resumed = self._resumed, None
        if resumed is not None and resumed[0] == epoch:
            return resumed[1]
        peeked, self._peeked = self._peeked, None
        if peeked is not None and peeked[0] == epoch:
            return chain([peeked[1]], peeked[2])
        return self._begin(epoch)

    def seek(self, epoch: int, batch: int, *, first_epoch: int) -> None:
        """Continues the next `epoch(epoch)` after `batch` batches, as if the others were read."""
        if (epoch, batch) != (first_epoch, 0):
            self._resumed = (epoch, self._from(epoch, batch, first_epoch))

    def _from(self, epoch: int, batch: int, first_epoch: int) -> Iterator[HostBatch]:
        steps = self.steps_per_epoch
        size = self.source.num_batches
        if steps is None and (size is not None or self._peeked is None or self._peeked[0] != epoch):
            self._peeked = None
            return self.source.batches(epoch, batch)
        if steps is not None and size is not None:
            # A pass that ends early ends its last epoch, so a pass is a whole number of epochs.
            passes, epochs_in_pass = divmod(epoch - first_epoch, -(-size // steps))
            self._peeked = None
            self._num_passes = passes
            self._steps_in_pass = epochs_in_pass * steps + batch
            self._pass = self.source.batches(passes, self._steps_in_pass)
            return self._next_steps(steps - batch)
        # The end of a pass is known only once it is read, and a generator can be read only once.
        if steps is not None:
            for number in range(first_epoch, epoch):
                deque(self.epoch(number), maxlen=0)
        return islice(self.epoch(epoch), batch, None)

    def _begin(self, epoch: int) -> Iterator[HostBatch]:
        steps = self.steps_per_epoch
        return self.source.batches(epoch) if steps is None else self._next_steps(steps)

    def _next_steps(self, steps: int) -> Iterator[HostBatch]:
        for step in range(steps):
            if self._pass is None:
                self._pass = self.source.batches(self._num_passes)
                self._steps_in_pass = 0
            batch = next(self._pass, None)
            if batch is None:
                logger.warning(
                    "The dataset ended after %d of %d steps of the epoch. Repeat the dataset or "
                    "give fewer steps_per_epoch.",
                    step,
                    steps,
                )
                self._end_pass()
                return
            self._steps_in_pass += 1
            yield batch
        if self._pass is not None and self._steps_in_pass == self.source.num_batches:
            next(self._pass, None)  # What a source does at the end of a pass.
            self._end_pass()

    def _end_pass(self) -> None:
        self._pass = None
        self._num_passes += 1


def only_full(items: Iterator[HostBatch], source: Source) -> Iterator[HostBatch]:
    """Yields the batches that have the rows of the first one, where batches have one size."""
    num_rows = None
    for item in items:
        num_rows = num_rows or item.num_rows
        if source.global_batch_size is None or item.num_rows == num_rows:
            yield item


def full_batches(stream: EpochStream, *, first_epoch: int = 0) -> Iterator[HostBatch]:
    """Yields the full batches of epoch after epoch; a ValueError says that the data have ended."""
    for epoch in count(first_epoch):
        is_empty = True
        for item in only_full(stream.epoch(epoch), stream.source):
            is_empty = False
            yield item
        if is_empty:
            raise ValueError(
                f"The data has ended after {epoch} epoch(s), before all steps were timed: a "
                "generator is read once. Pass data that can be read again, or name fewer --steps."
            )


# What is done with the data that was opened and the batch that it announces.
Meanwhile = Callable[[EpochStream, HostBatch], None]


def open_stream(
    call: str,
    make_source: Callable[[], Source],
    *,
    epoch: int = 0,
    steps: int | None = None,
    steps_per_epoch: int | None = None,
    meanwhile: Meanwhile | None = None,
    **arguments: Any,
) -> tuple[EpochStream, HostBatch]:
    """Returns the data of a call and its first batch, that of `epoch`.

    It waits until all processes have made the same call with the same kind of data and arguments,
    and fails on all if the data of one cannot be read. `meanwhile` is done while the first batch is
    read, if the data of all announces what it is like.
    """
    stream = first = error = reading = None
    is_alone = runtime.get_process_count() == 1
    try:
        stream = EpochStream(make_source(), steps_per_epoch=steps_per_epoch).require_end(steps)
    except Exception as raised:  # Raised below, on every process.
        if is_alone:
            raise
        error = raised
    announced = _compare(call, stream and stream.source, error)
    assert stream is not None
    if meanwhile is not None and announced is not None:
        reading = _read_beside(stream, epoch, announced, meanwhile)
    try:
        first = stream.peek(epoch) if reading is None else reading.result()
    except Exception as raised:  # Raised below, on every process.
        if is_alone:
            raise
        error = raised
    if first is not None:
        if is_alone:
            return stream, first
        arguments |= {
            "initial_epoch": epoch,
            "steps": steps,
            "steps of an epoch": stream.num_steps,
            **facts_of(stream.source),
            "the first batch": describe(first),
        }
    checksums = getattr(stream.source, "first_checksums", None)
    _check_contents(collectives.agree(call, arguments, error, note=checksums))
    assert first is not None
    return stream, first


def open_source(call: str, make_source: Callable[[], Source]) -> Source:
    """Returns the data of a call once all processes have made theirs; else all raise an error."""
    source = error = None
    try:
        source = make_source()
    except Exception as raised:  # Raised below, on every process.
        if runtime.get_process_count() == 1:
            raise
        error = raised
    _compare(call, source, error)
    assert source is not None
    return source


def _compare(call: str, source: Source | None, error: Exception | None) -> HostBatch | None:
    """Compares the data of all processes; returns the batch that it announces on all, or None."""
    announced: HostBatch | None = getattr(source, "announce", lambda: None)()
    note = [None if announced is None else describe(announced), getattr(source, "note", None)]
    forms, notes = zip(*collectives.agree(call, {}, error, note=note), strict=True)
    getattr(source, "compare", lambda _: None)(notes)
    return announced if len(set(forms)) == 1 else None


def _read_beside(
    stream: EpochStream, epoch: int, announced: HostBatch, meanwhile: Meanwhile
) -> Future[HostBatch]:
    """Returns the first batch, which a thread reads while something else is done."""
    reading: Future[HostBatch] = Future()

    def read() -> None:
        try:
            reading.set_result(stream.peek(epoch))
        except BaseException as error:  # Raised again by the caller.
            reading.set_exception(error)

    start_reader(read, "first-batch", threading.Event())
    meanwhile(stream, announced)
    return reading


def facts_of(source: Source) -> dict[str, Any]:
    """Returns what must be the same in a source on every process, as far as it tells, by name."""
    return {
        "kind of source": type(source).__name__,
        "rows of a batch": source.global_batch_size,
        "number of examples": source.num_examples,
        **getattr(source, "order", {}),
    }


def _check_contents(checksums: Sequence[Sequence[Any] | None]) -> None:
    """Compares the first batch of data of which each process reads all rows."""
    other = next((process for process, sums in enumerate(checksums) if sums != checksums[0]), None)
    if other is None:
        return
    text = (
        f"The first batch of process {other} differs from that of process 0. Each process feeds "
        "its part of every batch, so rows may occur twice or never: use the same files, and the "
        "same seed for shuffles and random numbers, or pass tnt_distribute_dataset=False for "
        "shards."
    )
    first, found = checksums[0], checksums[other]
    if first and found and first[1] == found[1] and first[1] is not None:
        # Random augmentation, which leaves the targets as they are, does no harm to the sum.
        logger.warning("%s Targets are the same.", text)
        return
    raise ValueError(text)
