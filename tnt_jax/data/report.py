"""Describes, once, in the log how data is distributed."""

from tnt_jax.data.layout import RankSlice, micro_batch_size, num_batches, num_padded_rows


def last_padded_rows(
    num_examples: int | None, global_batch_size: int | None, num_ranks: int
) -> int | None:
    """Returns the padded rows in the last batch of an epoch, or None if a size is unknown."""
    if not num_examples or global_batch_size is None:
        return None
    last = num_examples - (num_batches(num_examples, global_batch_size) - 1) * global_batch_size
    return num_padded_rows(last, num_ranks)


def describe_sizes(
    rank_slice: RankSlice,
    *,
    global_batch_size: int | None,
    num_batches: int | None,
    num_padded_rows: int | None,
    seed: int | None = None,
) -> str:
    """Returns one sentence on the sizes of the global batch and of an epoch, and the seed."""
    micro = (
        None
        if global_batch_size is None
        else micro_batch_size(global_batch_size, rank_slice.num_ranks)
    )
    order = "" if seed is None else f", order from seed {seed}"
    return (
        f"Data: global batch {_known(global_batch_size)}, {_known(micro)} rows on each of "
        f"{rank_slice.num_ranks} {rank_slice.kind}, {_known(num_batches)} steps per epoch, "
        f"{_known(num_padded_rows)} padded rows in the last batch{order}."
    )


def _known(value: int | None) -> str:
    return "unknown" if value is None else str(value)
