"""What the log says, once, about how data is distributed."""

from tnt_jax.data.layout import Place, micro_batch_size, num_batches, num_padded_rows


def last_padded_rows(num_examples: int | None, global_batch_size: int | None, num_ranks: int) -> int | None:
    """Returns the rows that all ranks together add to the last batch of an epoch, or None if a size is not known."""
    if not num_examples or global_batch_size is None:
        return None
    last = num_examples - (num_batches(num_examples, global_batch_size) - 1) * global_batch_size
    return num_padded_rows(last, num_ranks)


def describe_sizes(
    place: Place,
    *,
    global_batch_size: int | None,
    num_batches: int | None,
    num_padded_rows: int | None,
    seed: int | None = None,
) -> str:
    """Returns one sentence with the sizes of the global batch and of an epoch, and the seed of its order if there is one."""
    micro = None if global_batch_size is None else micro_batch_size(global_batch_size, place.num_ranks)
    order = "" if seed is None else f", order from seed {seed}"
    return (
        f"Data: global batch {_known(global_batch_size)}, {_known(micro)} rows on each of {place.num_ranks} {place.kind}, "
        f"{_known(num_batches)} steps per epoch, {_known(num_padded_rows)} padded rows in the last batch{order}."
    )


def _known(value: int | None) -> str:
    return "unknown" if value is None else str(value)
