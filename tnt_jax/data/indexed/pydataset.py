"""Keras `PyDataset`s, which give whole batches by index; Keras itself is not imported."""

from collections.abc import Iterator
from functools import partial
from itertools import count
from typing import Any

import numpy as np

from tnt_jax.data.elements import as_batch, is_of_library
from tnt_jax.data.indexed.fetch import Chunk, Fetcher
from tnt_jax.data.layout import ReadOptions
from tnt_jax.data.permutation import Permutation, RowOrder
from tnt_jax.data.sources import HostBatch, IterableSource


def _whole_batch(dataset: Any, epoch: int, indices: list[int]) -> Chunk:
    """Returns a batch, the item with that index."""
    try:
        batch = dataset[indices[0]]
    except Exception as error:
        error.add_note(f"This happened in batch {indices[0]} of {type(dataset).__name__}.")
        raise
    return Chunk(as_batch(batch), np.ones(1, bool), [])


class PyDatasetSource(IterableSource):
    """The rows of one process of a Keras `PyDataset`, whose items are whole global batches.

    Every process makes every batch of the dataset and keeps its own rows. A dataset that draws
    random numbers must seed them, so that all processes make the same batches. Its `workers`,
    `use_multiprocessing`, `max_queue_size`, `on_epoch_begin` and `on_epoch_end` are followed.
    Shuffled, each epoch visits the batches in an order of its own, drawn from `(seed, epoch)`.
    """

    def __init__(self, dataset: Any, options: ReadOptions) -> None:
        rank_slice, micro_batch_size = options.rank_slice, options.micro_batch_size
        super().__init__(dataset, rank_slice=rank_slice, micro_batch_size=micro_batch_size)
        self._dataset = dataset
        self._seed = options.seed if options.shuffle else None
        self.row_order = RowOrder([options.seed] if options.shuffle else [])
        self.order = {"shuffle": options.shuffle, "seed of the order": self._seed}
        self.num_batches: int | None = dataset.num_batches
        self.is_infinite = self.num_batches is None
        in_processes = dataset.use_multiprocessing
        # As in Keras, one worker without multiprocessing is the caller itself.
        self._fetcher = Fetcher(
            partial(_whole_batch, dataset),
            num_workers=dataset.workers if dataset.workers > 1 or in_processes else 0,
            worker="processes" if in_processes else "threads",
            num_batches_ahead=max(1, dataset.max_queue_size),
        )

    def batches(self, epoch: int, start_batch: int = 0) -> Iterator[HostBatch]:
        """Yields this process's rows of the batches of `epoch` from `start_batch` on alone."""
        self._dataset.on_epoch_begin()
        # As in Keras, each pass has processes of its own: they get the dataset as it is then.
        self._fetcher.end_processes()
        for chunk in self._fetcher.batches(epoch, self._order(epoch, start_batch)):
            yield self.own_rows(chunk.data)
        self._dataset.on_epoch_end()

    def _order(self, epoch: int, start_batch: int) -> Iterator[np.ndarray]:
        size = self.num_batches
        numbers = count(start_batch) if size is None else range(start_batch, size)
        order: Any = np.asarray
        if self._seed is not None and size:
            order = Permutation(size, seed=self._seed, epoch=epoch)
        return (order([number]) for number in numbers)


def is_py_dataset(x: Any) -> bool:
    """Returns whether `x` is a Keras `PyDataset` (or `Sequence`), without importing Keras."""
    return is_of_library(x, "keras", "PyDataset")
