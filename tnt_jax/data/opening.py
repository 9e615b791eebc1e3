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
        sizes = {
            "steps of an epoch": stream.num_steps,
            "number of examples": stream.source.num_examples,
        }
        arguments |= {
            "initial_epoch": epoch,
            "steps": steps,
            **sizes,
            "the first batch": describe(first),
        }
    checksum = None if stream is None else getattr(stream.source, "first_checksum", None)
    _warn_of_other_contents(collectives.agree(call, arguments, error, note=checksum))
    assert stream is not None and first is not None
    return stream, first


def _warn_of_other_contents(checksums: Sequence[int | None]) -> None:
    """Warns if the contents of the first batch differ between processes.

    A generator of unseeded random numbers is an example.
    """
    other = next(
        (process for process, checksum in enumerate(checksums) if checksum != checksums[0]), None
    )
    if other is not None:
        logger.warning(
            "The first batch of process %d differs from that of process 0. Each process feeds its "
            "part of every batch, so rows may occur twice or never: use the same seed for shuffles "
            "and random numbers, or pass tnt_distribute_dataset=False for shards.", other,
        )  # fmt: skip
