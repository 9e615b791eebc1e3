"""The position in an epoch in rows, and where other batches of the same rows are there.

A checkpoint notes how many rows of its epoch are done, and what their order depends on. A later run
goes on at the same row, also with another global batch, or says why it cannot.
"""

from typing import Any

from tnt_jax.data.permutation import row_order_of
from tnt_jax.data.streams import EpochStream
from tnt_jax.log import logger
from tnt_jax.train.checkpoints.checkpoint import Position

DataPosition = dict[str, Any]
"""Rows of the epoch that are done, and what their order depends on, as JSON values."""


def describe_position(stream: EpochStream, first_epoch: int, rows: int) -> DataPosition:
    """Returns a position in the rows of an epoch, and what their order depends on."""
    source = stream.source
    order = row_order_of(source)
    checksums = getattr(source, "first_checksums", None)
    # Without `steps_per_epoch` every epoch is a pass of its own.
    steps = stream.steps_per_epoch
    passes = {} if steps is None else {"steps_per_epoch": steps, "initial_epoch": first_epoch}
    return {
        "rows": rows,
        "global_batch_size": source.global_batch_size,
        "seed": order.seed,
        "passes": passes,
        "parts": {"batches of an epoch": source.num_batches} | order.parts,
        "first_batch": checksums and checksums[0],
    }


def batches_done(
    position: Position,
    noted: DataPosition,
    stream: EpochStream,
    first_epoch: int,
    *,
    is_accumulating: bool,
) -> int:
    """Returns the batches of the running `fit` that a noted position has behind it in its epoch.

    The position is in the batches of the interrupted run, where `describe_position` returned what
    is noted. `is_accumulating` says whether gradients of steps before it wait for their update. A
    ValueError, which gives both values, says that rows would be lost or seen twice.
    """
    own = describe_position(stream, first_epoch, noted["rows"])
    if noted["rows"] and (reason := row_order_of(stream.source).unrepeatable):
        raise ValueError(
            f"The interrupted run stopped after {noted['rows']} rows of epoch "
            f"{position.epoch + 1}, but it is not known which ones these were. {reason}."
        )
    if own["seed"] != noted["seed"]:
        raise ValueError(
            f"The interrupted run ordered its data by the seed {_listed(noted['seed'])}, but the "
            f"seed is {_listed(own['seed'])}. Use the same seed."
        )
    if own["passes"] != noted["passes"]:
        raise ValueError(
            f"The interrupted run had {_named(noted['passes'])}, but this one has "
            f"{_named(own['passes'])}. Use the same values."
        )
    size, old_size = own["global_batch_size"], noted["global_batch_size"]
    if size != old_size:
        return _rebatched(position, noted, stream, is_accumulating=is_accumulating)
    if position.batch > 0 or own["passes"]:
        _check_parts(position, noted, own)
    return position.batch


def _rebatched(
    position: Position, noted: DataPosition, stream: EpochStream, *, is_accumulating: bool
) -> int:
    """Returns the batches behind a position if batches have another size than they had."""
    size, old_size = stream.source.global_batch_size, noted["global_batch_size"]
    rows, order = noted["rows"], row_order_of(stream.source)
    problem = ""
    if is_accumulating:
        problem = "gradients of the former are accumulated and not applied yet"
    elif stream.steps_per_epoch is not None:
        problem = "with steps_per_epoch, epochs would have other rows"
    elif rows and not (order.is_of_rows and size is not None):
        problem = "the order of this data depends on its batches"
    elif rows and rows != stream.source.num_examples and rows % (size or 1):
        problem = f"{rows} is no multiple of {size}"
    if problem:
        raise ValueError(
            f"The interrupted run had done {rows} rows of epoch {position.epoch + 1} in global "
            f"batches of {old_size} rows, but the global batch has {size} rows, and {problem}. "
            f"Use global batches of {old_size} rows: as batch_size, or as tnt_micro_batch_size "
            "times the number of ranks."
        )
    if rows:
        own = {"parts": order.parts, "first_batch": None}
        _check_parts(position, noted, own, leave_out=("batches of an epoch",))
    logger.warning(
        "The global batch has %s rows, %s before the interruption. No row of an epoch is lost or "
        "seen twice, but learning rate schedules go on counting updates, and results are not "
        "those of a run without interruption.",
        size,
        old_size,
    )
    return -(-rows // size) if rows and size else 0


def _check_parts(
    position: Position, noted: DataPosition, own: DataPosition, *, leave_out: tuple[str, ...] = ()
) -> None:
    """Raises a ValueError if the rows of an epoch are others, or come in another order."""
    for name in sorted((noted["parts"].keys() | own["parts"].keys()) - set(leave_out)):
        before, now = noted["parts"].get(name), own["parts"].get(name)
        if before != now:
            raise ValueError(
                f"The interrupted run stopped within epoch {position.epoch + 1} of data with "
                f"another {name}: {before}, and {now} now. Use the same data."
            )
    checksums = (noted["first_batch"], own["first_batch"])
    if None not in checksums and len(set(checksums)) > 1:
        logger.warning(
            "The first batch of the data is another one than before the interruption, within epoch "
            "%d. Rows of this epoch may be lost or seen twice: give shuffles and random numbers of "
            "the data a seed.",
            position.epoch + 1,
        )


def _listed(seeds: list[int]) -> str:
    return ", ".join(map(str, seeds)) or "of no shuffle"


def _named(values: dict[str, Any]) -> str:
    return ", ".join(f"{name}={value}" for name, value in values.items()) or "no steps_per_epoch"
