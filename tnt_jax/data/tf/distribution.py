"""Describes how a `tf.data` pipeline is distributed, for the log, and what was built from it."""

from dataclasses import dataclass
from typing import Any, NamedTuple

from tnt_jax.data.layout import RankSlice
from tnt_jax.data.report import describe_sizes


@dataclass(frozen=True)
class Distribution:
    """How a pipeline is distributed.

    Attributes:
        rank_slice: This process's part of the data axis.
        global_batch_size: Rows of a full global batch; None where batches differ.
        num_batches: Batches of an epoch; None when unknown or infinite.
        num_padded_rows: Rows that the ranks together add to the last batch; None when unknown.
        before: Operations that run for all rows on every process, in order.
        after: Operations that run for this process's rows.
        notes: What was changed in the pipeline, and why rows are selected at this point.
    """

    rank_slice: RankSlice
    global_batch_size: int | None
    num_batches: int | None
    num_padded_rows: int | None
    before: tuple[str, ...]
    after: tuple[str, ...]
    notes: tuple[str, ...]

    def __str__(self) -> str:
        sizes = describe_sizes(
            self.rank_slice,
            global_batch_size=self.global_batch_size,
            num_batches=self.num_batches,
            num_padded_rows=self.num_padded_rows,
        )
        before, after = (", ".join(names) or "nothing" for names in (self.before, self.after))
        lines = [
            sizes,
            f"Every process runs for all rows: {before}.",
            f"It runs for its own rows: {after}.",
        ]
        return "\n".join([*lines, *self.notes])


class Rebuilt(NamedTuple):
    """A pipeline for one process.

    Its elements are `(number of rows, own rows)` if `is_early`, otherwise whole batches.
    """

    stream: Any
    is_early: bool
    before: list[str]
    after: list[str]
    notes: list[str]
    slowed: list[str]
