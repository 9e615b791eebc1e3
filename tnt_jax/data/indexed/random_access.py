"""Random access: each process computes the global order and fetches only its own rows.

source = builder.as_data_source("train")
train = RandomAccess(source, batch_size=256, shuffle=True, num_workers=8, worker="processes")
model.fit(train, epochs=90)
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from tnt_jax.data.arguments import check_choice
from tnt_jax.data.elements import OnError
from tnt_jax.data.indexed.fetch import Chunk, Dataset, Fetcher, Recipe, Worker, take_rows
from tnt_jax.data.layout import (
    LocalRows,
    RankSlice,
    describe_sizes,
    local_rows,
    num_batches,
    resolve_batch_size,
)
from tnt_jax.data.permutation import Permutation, RowOrder
from tnt_jax.data.sources import HostBatch
from tnt_jax.log import logger
from tnt_jax.seeding import seed_or_default


@dataclass(frozen=True)
class RandomAccess:
    """A random-access dataset and the options for training on it.

    Attributes:
        dataset: Anything with `__len__` and `__getitem__` whose examples are trees (tuples,
            dictionaries) of arrays. With `__getitems__`, several examples are fetched by one call.
        batch_size: Rows of the global batch; None to derive it from `tnt_micro_batch_size`.
        shuffle: Whether each epoch visits the examples in an order of its own, computed from
            `(seed, epoch)`.
        seed: Seed of the order and of the generators given to `transform`; by default that of the
            last `tnt_jax.set_seed`, or 42.
        drop_remainder: Whether an incomplete last batch is dropped.
        transform: Called as `transform(example, generator)` in the workers. The NumPy generator
            depends on `(seed, epoch, index)` alone, so that random augmentation gives the same
            pixels on any number of processes.
        num_workers: Workers of this process that fetch examples; 0 fetches in the thread that feeds
            the devices.
        worker: `"threads"` (for datasets that read files or decode in C), or `"processes"` (for
            Python code; dataset and transform must be picklable).
        on_error: `"raise"` ends the run at an example that fails, naming it; `"skip"` gives its row
            the weight 0, warns and counts.
    """

    dataset: Dataset
    batch_size: int | None = None
    shuffle: bool = False
    seed: int | None = None
    drop_remainder: bool = False
    transform: Callable[[Any, np.random.Generator], Any] | None = None
    num_workers: int = 0
    worker: Worker = "threads"
    on_error: OnError = "raise"

    def __post_init__(self) -> None:
        for name in ("__len__", "__getitem__"):
            if not hasattr(self.dataset, name):
                raise TypeError(
                    "A random-access dataset needs __len__ and __getitem__, but "
                    f"{type(self.dataset).__name__} has no {name}. Pass an iterable or generator "
                    "of batches to fit directly."
                )
        check_choice("worker", self.worker, ("threads", "processes"))
        check_choice("on_error", self.on_error, ("raise", "skip"))
        if self.num_workers < 0:
            raise ValueError(f"num_workers must be at least 0, but is {self.num_workers}.")


class RandomAccessSource:
    """The rows of one process of a `RandomAccess` dataset, of which `num_skipped` failed so far."""

    in_memory = False

    def __init__(
        self, spec: RandomAccess, rank_slice: RankSlice, *, micro_batch_size: int | None = None
    ) -> None:
        num_examples = len(spec.dataset)
        self._size = resolve_batch_size(
            rank_slice,
            batch_size=spec.batch_size,
            micro=micro_batch_size,
            drop_remainder=spec.drop_remainder,
            num_examples=num_examples,
        )
        self._length = num_batches(num_examples, self._size, drop_remainder=spec.drop_remainder)
        self._num_examples = min(num_examples, self._length * self._size)
        self.global_batch_size: int | None = self._size
        self.num_batches: int | None = self._length
        self.num_examples: int | None = self._num_examples
        self.num_skipped = 0
        self._spec = spec
        self._rank_slice = rank_slice
        self._seed = seed_or_default(spec.seed, default=42)
        parts = {"number of examples": num_examples}
        self.row_order = RowOrder([self._seed] if spec.shuffle else [], parts, is_of_rows=True)
        self.order = {
            "shuffle of the RandomAccess": spec.shuffle,
            "seed of the order": self._seed,
            "drop_remainder": spec.drop_remainder,
            "on_error": spec.on_error,
        }
        recipe = Recipe(spec.dataset, spec.transform, self._seed, spec.on_error)
        self._fetcher = Fetcher(recipe, num_workers=spec.num_workers, worker=spec.worker)
        sizes = describe_sizes(rank_slice, self, seed=self._seed if spec.shuffle else None)
        logger.info("%s Each process fetches its own rows only.", sizes)

    def batches(self, epoch: int, start_batch: int = 0) -> Iterator[HostBatch]:
        """Yields this process's rows of the batches of `epoch` from `start_batch` on alone."""
        chunks = self._fetcher.batches(epoch, self._index_batches(epoch, start_batch))
        for batch, chunk in enumerate(chunks, start_batch):
            yield self._host_batch(batch, chunk)

    def _index_batches(self, epoch: int, start_batch: int) -> Iterator[np.ndarray]:
        size, shuffles = len(self._spec.dataset), self._spec.shuffle
        order = Permutation(size, seed=self._seed, epoch=epoch) if shuffles else np.asarray
        for batch in range(start_batch, self._length):
            rows = np.unique(self._local_rows(batch).indices)
            yield order(rows + batch * self._size)

    def _host_batch(self, batch: int, chunk: Chunk) -> HostBatch:
        rows = self._local_rows(batch)
        self.num_skipped += len(chunk.failures)
        for text in chunk.failures:
            logger.warning(
                "Skipped %s (%d skipped on this process so far).", text, self.num_skipped
            )
        if chunk.data is None:
            raise ValueError(
                f"All {len(chunk.is_good)} examples of this process in batch {batch} failed; the "
                f"first: {chunk.failures[0]}. Check that the data can be read at all."
            )
        unique, own = np.unique(rows.indices, return_inverse=True)
        data = chunk.data if len(unique) == len(own) else take_rows(chunk.data, own)
        found = HostBatch(data, rows.mask, self._num_rows(batch))
        return found.masked(chunk.is_good[own]) if self._spec.on_error == "skip" else found

    def _local_rows(self, batch: int) -> LocalRows:
        return local_rows(self._num_rows(batch), self._rank_slice)

    def _num_rows(self, batch: int) -> int:
        return min(self._size, self._num_examples - batch * self._size)
