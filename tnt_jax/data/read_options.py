"""Options for reading the data of a call."""

from dataclasses import dataclass

from tnt_jax.data.layout import RankSlice


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
