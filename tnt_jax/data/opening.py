"""The beginning of a pass over data: every process reads its first batch, and all compare."""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

from tnt_jax.data.feed import start_reader
from tnt_jax.data.sources import HostBatch, Source
from tnt_jax.data.streams import EpochStream, describe
from tnt_jax.distributed.host import collectives
from tnt_jax.distributed.joining import runtime
from tnt_jax.log import logger

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
    read, if the data of all processes says beforehand what it is like, by a method `announce`.
    """
    stream = first = error = None
    is_alone = runtime.get_process_count() == 1
    try:
        stream = EpochStream(make_source(), steps_per_epoch=steps_per_epoch).require_end(steps)
    except Exception as raised:  # Raised below, on every process.
        if is_alone:
            raise
        error = raised
    reading = None
    if meanwhile is not None:
        announced = _announced_everywhere(call, stream, error)
        if stream is not None and announced is not None:
            reading = _read_beside(stream, epoch, announced, meanwhile)
    try:
        if stream is not None:
            first = stream.peek(epoch) if reading is None else reading.result()
    except Exception as raised:
        if is_alone:
            raise
        error = raised
    if stream is not None and first is not None:
        if is_alone:
            return stream, first
        arguments |= {
            "initial_epoch": epoch,
            "steps": steps,
            "steps of an epoch": stream.num_steps,
            **facts_of(stream.source),
            "the first batch": describe(first),
        }
    checksums = None if stream is None else getattr(stream.source, "first_checksums", None)
    _check_contents(collectives.agree(call, arguments, error, note=checksums))
    assert stream is not None and first is not None
    return stream, first


def _announced_everywhere(
    call: str, stream: EpochStream | None, error: Exception | None
) -> HostBatch | None:
    """Returns the batch that the data announces if that of all processes does, else None."""
    announce = getattr(stream and stream.source, "announce", lambda: None)
    announced: HostBatch | None = announce()
    note = None if announced is None else describe(announced)
    notes = collectives.agree(call, {}, error, note=note)
    return announced if len(set(notes)) == 1 else None


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
