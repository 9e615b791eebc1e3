"""Which rows of a global batch go to which rank.

These are pure integer functions that give the same result on every process, without communication.

With R ranks, a global batch of n rows is split into contiguous blocks of m = ceil(n / R) rows. Rank
r owns rows r*m to (r+1)*m - 1; rows from n on are padding: they repeat the last row and are masked.
With G groups of ranks, each group has ceil(n / G) of the rows, which its ranks split likewise.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class RankSlice:
    """The ranks of the data axis that one process feeds.

    Attributes:
        num_ranks: Number of ranks in the job, R.
        first_rank: Rank of the process's first device.
        local_ranks: Number of ranks of the process, which are neighbours.
        are_virtual: Whether they are virtual ranks, several of which run on one device.
        num_groups: Groups of equally many neighbouring ranks that take equal parts of a batch, so
            that the ranks of a group do not change which rows it has.
    """

    num_ranks: int
    first_rank: int = 0
    local_ranks: int = 1
    are_virtual: bool = False
    num_groups: int = 1

    def __post_init__(self) -> None:
        assert self.first_rank >= 0 and self.local_ranks >= 1
        assert self.first_rank + self.local_ranks <= self.num_ranks
        assert self.num_ranks % self.num_groups == 0

    def rows_of(self, num_rows: Any, *, padded_to: Any = None) -> tuple[Any, Any]:
        """Returns the first row of this process, and the end of its group's rows or beyond.

        The numbers may be TensorFlow's. Ranks have as many rows as of `padded_to` rows.
        """
        group, rank = divmod(self.first_rank, self.num_ranks // self.num_groups)
        part = -(-num_rows // self.num_groups)
        micro = micro_batch_size(num_rows if padded_to is None else padded_to, self.num_ranks)
        return group * part + rank * micro, (group + 1) * part

    @property
    def kind(self) -> str:
        """Name of the ranks in messages."""
        return "virtual ranks" if self.are_virtual else "ranks"


@dataclass(frozen=True)
class LocalRows:
    """The rows of one global batch that a process feeds.

    Attributes:
        indices: Row of the global batch for each local row, int64 `[local_rows]`; padding repeats
            the batch's last row.
        mask: 1.0 for real rows and 0.0 for padding, float32; None when no process pads this batch.
        first_row: Index of the first local row, which may be beyond the last real row.
    """

    indices: np.ndarray
    mask: np.ndarray | None
    first_row: int

    def selection(self, start: int = 0) -> slice | np.ndarray:
        """Returns an index of these rows in arrays in which the batch begins at a row `start`."""
        if self.mask is None:
            return slice(start + self.first_row, start + self.first_row + len(self.indices))
        return start + self.indices


def micro_batch_size(num_rows: int, num_ranks: int) -> int:
    """Returns the rows per rank, padding included: `num_rows / num_ranks` rounded up."""
    return -(-num_rows // num_ranks)


def local_rows(num_rows: int, rank_slice: RankSlice, *, padded_to: int | None = None) -> LocalRows:
    """Returns the rows of a process of a global batch; ranks have as many as of `padded_to`."""
    assert num_rows >= 1
    micro = micro_batch_size(padded_to or num_rows, rank_slice.num_ranks)
    first, end = rank_slice.rows_of(num_rows, padded_to=padded_to)
    rows = np.arange(first, first + rank_slice.local_ranks * micro)
    is_real = rows < min(num_rows, end)
    mask = None if micro * rank_slice.num_ranks == num_rows else is_real.astype(np.float32)
    return LocalRows(np.minimum(rows, num_rows - 1), mask, first)


def num_padded_rows(num_rows: int, num_ranks: int) -> int:
    """Returns how many rows all ranks together add to a global batch of `num_rows` rows."""
    return micro_batch_size(num_rows, num_ranks) * num_ranks - num_rows


def num_batches(num_examples: int, global_batch_size: int, *, drop_remainder: bool = False) -> int:
    """Returns the steps of an epoch, of which an incomplete last batch is one unless dropped."""
    full, rest = divmod(num_examples, global_batch_size)
    return full if drop_remainder or not rest else full + 1


def resolve_batch_size(
    rank_slice: RankSlice,
    *,
    batch_size: int | None,
    micro: int | None,
    drop_remainder: bool = False,
    num_examples: int | None = None,
) -> int:
    """Returns the global batch size: that of the dataset, or by `micro` that of a rank.

    It is a ValueError if they contradict one another or the data, or if both are None.
    """
    for name, size in (("batch size", batch_size), ("tnt_micro_batch_size", micro)):
        if isinstance(size, str):
            raise ValueError(f"The {name} must be a number of rows, but is {size!r}.")
        if size is not None and size < 1:
            raise ValueError(f"The {name} must be at least 1, but is {size}.")
    if batch_size is None and micro is None:
        raise ValueError(
            "The dataset is not batched and no tnt_micro_batch_size was given, so the global batch "
            "is unknown. Batch the dataset with the global batch size, or pass "
            "tnt_micro_batch_size (rows of one rank). See docs/ranks.md#batch-sizes."
        )
    num_ranks = rank_slice.num_ranks
    if batch_size is not None and micro is not None and micro * num_ranks != batch_size:
        raise ValueError(
            f"tnt_micro_batch_size ({micro}) * {rank_slice.kind} ({num_ranks}) must equal the "
            f"dataset's batch size ({batch_size}). Leave it unset to split the batch evenly, or "
            f"batch the dataset with {micro * num_ranks}. See docs/ranks.md#batch-sizes."
        )
    size = batch_size if batch_size is not None else (micro or 0) * num_ranks
    if size < num_ranks:
        raise ValueError(
            f"The global batch size ({size}) must be at least the number of {rank_slice.kind} "
            f"({num_ranks}): {_ADVICE_VIRTUAL if rank_slice.are_virtual else _ADVICE}"
        )
    if num_examples == 0:
        raise ValueError("The dataset is empty: at least one example is needed.")
    if num_examples is not None and drop_remainder and num_examples < size:
        raise ValueError(
            f"The dataset has {num_examples} examples, fewer than one global batch ({size}), and "
            "drop_remainder=True drops them all. Use a smaller batch or keep the remainder."
        )
    return size


_ADVICE = (
    "some ranks would never see a row. Use a larger batch, or fewer devices with "
    "tnt_jax.init(devices=...)."
)
_ADVICE_VIRTUAL = (
    "with reproducible=True every global batch is cut into that many chunks, on any number of "
    "devices. Use a larger batch, or pass a smaller power of two as virtual_ranks (which changes "
    "the results)."
)


def describe_sizes(rank_slice: RankSlice, source: Any, *, seed: int | None = None) -> str:
    """Returns one sentence on the global batch and the epochs of a source, and the seed."""
    size, examples, num_ranks = source.global_batch_size, source.num_examples, rank_slice.num_ranks
    micro = None if size is None else micro_batch_size(size, num_ranks)
    padded = num_padded_rows(examples % size or size, num_ranks) if size and examples else None
    order = "" if seed is None else f", order from seed {seed}"
    return (
        f"Data: global batch {_known(size)}, {_known(micro)} rows on each of {num_ranks} "
        f"{rank_slice.kind}, {_known(source.num_batches)} steps per epoch, {_known(padded)} padded "
        f"rows in the last batch{order}."
    )


def _known(value: int | None) -> str:
    return "unknown" if value is None else str(value)


@dataclass(frozen=True)
class ReadOptions:
    """Options for reading data.

    Attributes:
        rank_slice: This process's part of the data axis.
        batch_size: Global batch for arrays and other unbatched data, as the user gave it.
        micro_batch_size: `tnt_micro_batch_size`: rows of one rank.
        shuffle: Whether unordered data (arrays) gets a new order every epoch.
        seed: Seed of that order and of shuffles without a seed.
        distribute: Whether the data is the same on every process and is to be split; otherwise each
            process passes its own shard.
        reproducible: Whether a `tf.data` pipeline must give the same elements in every run.
        drop_remainder: Whether an incomplete last batch is left out, of data that has no batches
            of its own.
    """

    rank_slice: RankSlice
    batch_size: int | None = None
    micro_batch_size: int | None = None
    shuffle: bool = False
    seed: int = 42
    distribute: bool = True
    reproducible: bool = False
    drop_remainder: bool = False
