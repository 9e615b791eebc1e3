"""Batches with about equally many tokens, in few shapes that are the same on every rank."""

import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from tnt_jax.data.layout import RankSlice, local_rows
from tnt_jax.data.permutation import Permutation, RowOrder
from tnt_jax.data.sources import HostBatch, checksum_of
from tnt_jax.log import logger

PAD_ID = 0


@dataclass(frozen=True)
class TokenPairs:
    """Sources and as many targets, encoded: int32 `[tokens]` each, without padding, token 0."""

    sources: list[np.ndarray]
    targets: list[np.ndarray]

    def __len__(self) -> int:
        return len(self.sources)


def inputs_and_targets(sources: np.ndarray, targets: np.ndarray) -> Any:
    """Returns `((sources, targets), targets)`: a translation model reads both."""
    return (sources, targets), targets


@dataclass(frozen=True)
class TokenBatches:
    """Pairs of sequences, batched by tokens.

    A pair goes to the shortest bucket that holds its longer side. A batch of the bucket of length L
    has `tokens_per_batch // L` pairs, whatever the number of ranks, and every pair of an epoch is
    in exactly one batch. Incomplete batches are padded to the shape of the full ones and masked, so
    that there are as many compiled shapes as buckets.

    Attributes:
        pairs: Encoded pairs.
        tokens_per_batch: Tokens of the global batch per side, padding included.
        buckets: Increasing lengths of the buckets; None for `bucket_lengths` up to the longest
            pair.
        shuffle: Whether each epoch has an order of its own.
        seed: Seed of the order.
        structure: Maps sources and targets, int32 `[rows, L]`, to the model's inputs and targets.
    """

    pairs: TokenPairs
    tokens_per_batch: int
    buckets: tuple[int, ...] | None = None
    shuffle: bool = True
    seed: int = 42
    structure: Callable[[np.ndarray, np.ndarray], Any] = inputs_and_targets


def bucket_lengths(longest: int, *, shortest: int = 8, growth: float = 1.4) -> tuple[int, ...]:
    """Returns increasing multiples of 8 from `shortest` to at least `longest`.

    Each is about `growth` times the previous one. With a growth of 1.4, less than a third of a
    batch is padding, and lengths up to 256 need 11 buckets.
    """
    lengths = [shortest]
    while lengths[-1] < longest:
        lengths.append(max(lengths[-1] + 8, round(lengths[-1] * growth / 8) * 8))
    return tuple(lengths)


class TokenBatchSource:
    """The rows of one process of `TokenBatches`, whose batches differ in rows."""

    in_memory = False

    def __init__(self, spec: TokenBatches, rank_slice: RankSlice) -> None:
        pairs = zip(spec.pairs.sources, spec.pairs.targets, strict=True)
        lengths = np.array([max(map(len, pair)) for pair in pairs], np.int64)
        if not len(lengths):
            raise ValueError("There are no pairs to batch.")
        chosen = bucket_lengths(int(lengths.max())) if spec.buckets is None else spec.buckets
        self.buckets = np.array(chosen)
        if (np.diff(self.buckets) <= 0).any() or self.buckets[-1] < lengths.max():
            raise ValueError(
                f"The buckets must rise and hold the longest pair ({lengths.max()} tokens), but "
                f"are {self.buckets.tolist()}."
            )
        self._rows = spec.tokens_per_batch // self.buckets
        self._bucket_of = np.searchsorted(self.buckets, lengths)
        used = np.unique(self._bucket_of)
        longest, fewest = self.buckets[used[-1]], self._rows[used[-1]]
        if fewest < rank_slice.num_ranks:
            raise ValueError(
                f"tokens_per_batch ({spec.tokens_per_batch}) gives {fewest} pairs of {longest} "
                f"tokens, fewer than the {rank_slice.num_ranks} ranks. Use at least "
                f"{longest * rank_slice.num_ranks} tokens, or shorter pairs."
            )
        self._spec = spec
        self._rank_slice = rank_slice
        parts = {
            "number of pairs": len(lengths),
            "tokens_per_batch": spec.tokens_per_batch,
            "list of buckets": self.buckets.tolist(),
        }
        self.row_order = RowOrder([operator.index(spec.seed)] if spec.shuffle else [], parts)
        counts = np.bincount(self._bucket_of, minlength=len(self.buckets))
        self.global_batch_size: int | None = None
        self.num_examples: int | None = len(lengths)
        self.num_batches: int | None = int(sum(-(-counts[b] // self._rows[b]) for b in used))
        self._report(lengths, used)

    @property
    def order(self) -> dict[str, Any]:
        """Settings that decide the order of pairs, by name; the same on every process."""
        return {
            "seed of the order": self._spec.seed,
            "tokens_per_batch": self._spec.tokens_per_batch,
            "buckets": self.buckets.tolist(),
            "lengths of the pairs (checksum)": f"{checksum_of(self._bucket_of):08x}",
        }

    def batches(self, epoch: int, start_batch: int = 0) -> Iterator[HostBatch]:
        """Yields this process's rows of the batches of `epoch`, from `start_batch` on alone."""
        for bucket, indices in self._plan(epoch)[start_batch:]:
            yield self._host_batch(bucket, indices)

    def _plan(self, epoch: int) -> list[tuple[int, np.ndarray]]:
        """Returns bucket and pairs of each batch, as shuffled pairs complete it; others last."""
        size = len(self._bucket_of)
        order = np.arange(size)
        if self._spec.shuffle:
            order = Permutation(size, seed=self._spec.seed, epoch=epoch)(order)
        buckets = self._bucket_of[order]
        planned = []
        for bucket in np.unique(buckets):
            positions = np.flatnonzero(buckets == bucket)
            rows = int(self._rows[bucket])
            for start in range(0, len(positions), rows):
                part = positions[start : start + rows]
                end = part[-1] if len(part) == rows else size
                planned.append((end, int(bucket), order[part]))
        planned.sort(key=lambda entry: entry[0])
        return [(bucket, indices) for _, bucket, indices in planned]

    def _host_batch(self, bucket: int, indices: np.ndarray) -> HostBatch:
        num_rows = len(indices)
        rows = local_rows(num_rows, self._rank_slice, padded_to=int(self._rows[bucket]))
        own = indices[rows.indices]
        sources, targets = (
            _padded([side[i] for i in own], int(self.buckets[bucket]))
            for side in (self._spec.pairs.sources, self._spec.pairs.targets)
        )
        # Full batches have a mask, too: otherwise each bucket would need two programs.
        return HostBatch(self._spec.structure(sources, targets), rows.mask, num_rows).masked()

    def _report(self, lengths: np.ndarray, used: np.ndarray) -> None:
        padding = 1 - lengths.sum() / self.buckets[self._bucket_of].sum()
        logger.info(
            "Text: %d pairs in %d buckets of %s tokens, %d steps per epoch, at most %d tokens a "
            "side in a global batch, %.0f %% padding.",
            len(lengths),
            len(used),
            self.buckets[used].tolist(),
            self.num_batches,
            self._spec.tokens_per_batch,
            100 * padding,
        )


def _padded(sequences: list[np.ndarray], length: int) -> np.ndarray:
    result = np.full((len(sequences), length), PAD_ID, np.int32)
    for row, tokens in zip(result, sequences, strict=True):
        row[: len(tokens)] = tokens
    return result
