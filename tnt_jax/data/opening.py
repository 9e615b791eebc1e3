"""The beginning of a pass over data: every process reads its first batch, and all compare."""

from collections.abc import Callable, Sequence
from typing import Any

from tnt_jax.data.lockstep import describe
from tnt_jax.data.sources import HostBatch, Source
from tnt_jax.data.stream import EpochStream
from tnt_jax.distributed import collectives, runtime
from tnt_jax.log import logger


def open_stream(
    call: str,
    make_source: Callable[[], Source],
    *,
    epoch: int = 0,
    steps: int | None = None,
    steps_per_epoch: int | None = None,
    **arguments: Any,
) -> tuple[EpochStream, HostBatch]:
    """Returns the data of a call and its first batch.

    It waits until all processes have made the same call with the same kind of data.

    Args:
        call: Name of the call.
        make_source: Returns the source of the batches.
        epoch: Epoch that is read first.
        steps: Batches that are read; all by default.
        steps_per_epoch: Batches of an epoch; all by default.
        **arguments: Other values that must be the same on every process.

    Raises:
        Exception: On every process, if the data of one cannot be read, or calls or arguments
            differ.
    """
    stream = first = error = None
    try:
        source = make_source()
        stream = EpochStream(source, steps_per_epoch=steps_per_epoch).require_end(steps)
        first = stream.peek(epoch)
    except Exception as raised:  # Raised below, on every process.
        if runtime.get_process_count() == 1:
            raise
        error = raised
    else:
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


def facts_of(source: Source) -> dict[str, Any]:
    """Returns what must be the same in a source on every process, as far as it tells, by name."""
    return {
        "kind of source": type(source).__name__,
        "rows of a batch": source.global_batch_size,
        "number of examples": source.num_examples,
        **getattr(source, "order", {}),
    }


def _check_contents(checksums: Sequence[Sequence[Any] | None]) -> None:
    """Compares the first batch of data of which each process reads all rows.

    Args:
        checksums: For each process, the result of `checksums_of` for its first batch, or None.

    Raises:
        ValueError: On every process, if the rows are others: an iterable that is shuffled without
            a seed is an example.
    """
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
