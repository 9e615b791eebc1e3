"""The global batch of a `fit` on several numbers of ranks, for strong and for weak scaling."""

from dataclasses import replace
from fractions import Fraction

from tnt_jax.data.sources import HostBatch, Source
from tnt_jax.keras_compat.data_intake import DataArguments
from tnt_jax.settings import Settings


def scale_batch(data: DataArguments, num_ranks: int, settings: Settings) -> DataArguments:
    """Returns the data of a `fit` with the global batch for a number of ranks.

    The lowest number of ranks has the script's own batch. With strong scaling all others have it,
    too; with weak scaling it is multiplied.

    Args:
        data: The data, as the script passes it.
        num_ranks: Number of ranks.
        settings: Settings with the lowest number of ranks, and the kind of scaling.

    Raises:
        ValueError: If the batch cannot be kept, or cannot be multiplied.
    """
    factor = Fraction(num_ranks, settings.scale_from)
    return _multiplied(data, factor) if settings.scale_weak else _kept(data, factor)


def check_filled(source: Source, first: HostBatch) -> None:
    """Raises a ValueError if the data has too few rows for one batch of weak scaling."""
    size = source.global_batch_size
    if size is not None and first.num_rows < size:
        raise ValueError(
            f"The data has {first.num_rows} rows, fewer than one global batch ({size}) of this "
            "number of ranks. Measure on fewer ranks or with --strong, or give the script more "
            "data."
        )


def _kept(data: DataArguments, factor: Fraction) -> DataArguments:
    if factor == 1:
        return data
    if not data.distribute:
        raise ValueError(
            "tnt_distribute_dataset=False gives each process batches of its own, so that the "
            "global batch grows with the ranks: measure with --weak."
        )
    if data.micro_batch_size is None:
        return data
    micro = data.micro_batch_size / factor
    if micro.denominator != 1:
        raise ValueError(
            f"With --strong the rows of a rank shrink as ranks are added, but "
            f"tnt_micro_batch_size={data.micro_batch_size} cannot be divided by {factor}. Measure "
            "with --weak, which keeps it, or on other numbers of ranks."
        )
    return replace(data, micro_batch_size=int(micro))


def _multiplied(data: DataArguments, factor: Fraction) -> DataArguments:
    # The rows of a rank, and the batches of a process, stay the same by themselves.
    if factor == 1 or not data.distribute or data.micro_batch_size is not None:
        return data
    from tnt_jax.data.larger_batches import with_larger_batches

    x, batch_size = with_larger_batches(data.x, data.batch_size, factor)
    return replace(data, x=x, batch_size=batch_size)
