"""Sources of global batches: arrays, and any iterable of batches, seen by one process.

A source is a pure function of its `RankSlice` on the data axis: every process makes its own, and
together they feed each global batch exactly once.
"""

import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple, Protocol, runtime_checkable
from weakref import WeakValueDictionary

import jax
import numpy as np

from tnt_jax.data.elements import (
    as_batch,
    checksum,
    checksums_of,
    is_torch_tensor,
    torch_to_numpy,
    unpack,
)
from tnt_jax.data.layout import RankSlice, ReadOptions, local_rows, num_batches, resolve_batch_size
from tnt_jax.data.permutation import RowOrder
from tnt_jax.job import Slot, once_per_job
from tnt_jax.log import logger

DEFAULT_BATCH_SIZE = 32


def stages_of(dataset: Any) -> Iterator[Any]:
    """Yields a Grain dataset and those that it is made of."""
    stages = [dataset]
    while stages:
        yield (stage := stages.pop())
        stages.extend(getattr(stage, "parents", ()))


def length_of(batches: Any) -> int | None:
    """Returns the length of a dataset; None if it does not tell."""
    try:
        return len(batches)
    except TypeError:
        return None


def is_endless(dataset: Any) -> bool:
    """Returns whether a dataset's length says that it never ends, as in a repeated Grain one."""
    return (length_of(dataset) or 0) >= sys.maxsize


def num_shards(loader: Any) -> int:
    """Returns the number of shards of which a PyTorch or Grain `DataLoader` reads one, or 1."""
    batch_sampler = getattr(loader, "batch_sampler", None)
    sampler = getattr(batch_sampler, "sampler", getattr(loader, "sampler", None))
    # PyTorch's DistributedSampler; Grain's samplers and loaders.
    counts = [getattr(sampler, "num_replicas", 1)]
    for part in (loader, getattr(loader, "_sampler", None)):
        counts.append(getattr(getattr(part, "_shard_options", None), "shard_count", 1))
    return max((count for count in counts if isinstance(count, int)), default=1)


# So many rows of arrays, and values of each, are compared between processes.
_CHECKED_ROWS, _CHECKED_VALUES = 64, 4096
_NAMED_LENGTHS = 6


@once_per_job
def warn_once(text: str) -> None:
    """Warns once per job: an evaluation after every epoch reads the same data again."""
    logger.warning("%s", text)


class HostBatch(NamedTuple):
    """One process's part of a global batch, on the host.

    Attributes:
        data: Pytree of arrays `[local_rows, ...]`; padded rows repeat the batch's last row.
        mask: float32 `[local_rows]`, 0 for padded rows; None when no process pads this batch.
        num_rows: Real rows of the whole global batch.
        shards: Real rows of each process among all rows, padding included, where each process
            brings its own; None where the first `num_rows` rows are the real ones.
    """

    data: Any
    mask: np.ndarray | None
    num_rows: int
    shards: tuple[slice, ...] | None = None

    def masked(self, is_good: np.ndarray | bool = True) -> "HostBatch":
        """Returns the batch with a mask in any case, for one program on all; 0 for bad rows."""
        rows = len(jax.tree.leaves(self.data)[0])
        mask = np.ones(rows, np.float32) if self.mask is None else self.mask
        return self._replace(mask=mask * is_good)


@runtime_checkable
class Source(Protocol):
    """A stream of global batches that can be read once per epoch.

    It may also say that it `is_infinite` or `is_in_lockstep` (all processes have the same number of
    batches), what its `row_order` depends on, by name in `order` what must be the same on every
    process, its `first_checksums`, and by `announce()` what its first batch should be like. Once
    all processes have made theirs, the `note` of each, a JSON value, is given to `compare(notes)`.

    Attributes:
        global_batch_size: Rows of a full global batch; None where batches differ.
        num_batches: Batches of an epoch; None when unknown or infinite.
        num_examples: Rows of an epoch; None when unknown or infinite.
        in_memory: Whether a batch costs so little that a thread of its own would cost more.
    """

    global_batch_size: int | None
    num_batches: int | None
    num_examples: int | None
    in_memory: bool

    def batches(self, epoch: int, start_batch: int = 0) -> Iterator[HostBatch]:
        """Yields this process's rows of each global batch of `epoch`, from `start_batch` on."""
        ...


class ArraySource:
    """Batches of arrays `[examples, ...]`; a shuffled order follows from `(seed, epoch)`."""

    in_memory = True

    def __init__(
        self,
        arrays: Any,
        *,
        global_batch_size: int,
        rank_slice: RankSlice,
        shuffle: bool = False,
        seed: int = 42,
        drop_remainder: bool = False,
    ) -> None:
        self._arrays = jax.tree.map(np.asarray, arrays)
        # Flattened once: to do so costs a tiny step more than its rows.
        self._leaves, self._structure = jax.tree.flatten(self._arrays)
        self._num_rows, self._size = common_length(self._arrays), global_batch_size
        self.global_batch_size: int | None = global_batch_size
        length = num_batches(self._num_rows, self._size, drop_remainder=drop_remainder)
        self.num_batches: int | None = length
        self.num_examples: int | None = min(self._num_rows, length * self._size)
        self._rank_slice = rank_slice
        self._shuffle = shuffle
        self._seed = seed
        self._whole = local_rows(global_batch_size, rank_slice)
        parts = {"number of examples": self._num_rows}
        self.row_order = RowOrder([seed] if shuffle else [], parts, is_of_rows=True)

    @property
    def order(self) -> dict[str, Any]:
        """Settings that decide the order of rows, by name; the same on every process."""
        return {
            "shuffle": self._shuffle,
            "seed of the order": self._seed if self._shuffle else None,
            "contents of the arrays (checksum)": f"{checksum_of_some(self._arrays):08x}",
        }

    def batches(self, epoch: int, start_batch: int = 0) -> Iterator[HostBatch]:
        """Yields this process's rows of each global batch, from batch `start_batch` on."""
        assert self.num_batches is not None
        order = None
        if self._shuffle:
            order = np.random.default_rng((self._seed, epoch)).permutation(self._num_rows)
        for start in range(start_batch * self._size, self.num_batches * self._size, self._size):
            num_rows = min(self._size, self._num_rows - start)
            rows = self._whole if num_rows == self._size else local_rows(num_rows, self._rank_slice)
            chosen = rows.selection(start) if order is None else order[start + rows.indices]
            data = self._structure.unflatten([x[chosen] for x in self._leaves])
            yield HostBatch(data, rows.mask, num_rows)


class IterableSource:
    """Batches of any iterable whose elements are whole global batches, the same on every process.

    An iterator is read on from epoch to epoch. `first_checksums` are None before the first batch.
    """

    in_memory = False

    def __init__(
        self, batches: Iterable[Any], *, rank_slice: RankSlice, micro_batch_size: int | None = None
    ) -> None:
        self._pass_of = passes_of(batches)
        self._rank_slice = rank_slice
        self._micro = micro_batch_size
        self.row_order = RowOrder(can_go_back=not isinstance(batches, Iterator))
        self.first_checksums: tuple[int, int | None] | None = None
        self.global_batch_size: int | None = None
        self.num_examples: int | None = None
        self.is_infinite = is_endless(batches)
        self.num_batches: int | None = None if self.is_infinite else length_of(batches)

    def batches(self, epoch: int, start_batch: int = 0) -> Iterator[HostBatch]:
        """Yields this process's rows of each batch, after dropping `start_batch` batches."""
        for index, element in enumerate(self._pass_of(epoch)):
            own = self.own_rows(as_batch(element))
            if index >= start_batch:
                yield own

    def own_rows(self, batch: Any) -> HostBatch:
        """Returns this process's rows of a whole batch, of which the first is noted."""
        num_rows = batch_length(batch)
        if self.first_checksums is None:
            targets = map(np.asarray, jax.tree.leaves(unpack(batch)[1]))
            self.first_checksums = checksums_of(jax.tree.leaves(batch), [*targets])
        if self.global_batch_size is None:
            self.global_batch_size = resolve_batch_size(
                self._rank_slice, batch_size=num_rows, micro=self._micro
            )
        return select_rows(batch, self._rank_slice)


# By the identity of an iterator that is read, for all of its readers.
_locks = Slot[WeakValueDictionary[int, threading.Lock]](WeakValueDictionary, lasts=True)


def passes_of(batches: Iterable[Any]) -> Callable[[int], Iterator[Any]]:
    """Returns a function from an epoch to its batches; an iterator is read on."""
    if isinstance(batches, Iterator):
        lock = _locks.get().setdefault(id(batches), threading.Lock())

        def read_on(_: int) -> Iterator[Any]:
            end = object()
            while True:
                with lock:  # The thread of a call that has stopped may wait for its last batch.
                    batch = next(batches, end)
                if batch is end:
                    return
                yield batch

        return read_on
    return getattr(batches, "batches_of_epoch", lambda epoch: iter(batches))


def select_rows(batch: Any, rank_slice: RankSlice) -> HostBatch:
    """Returns the rows of a whole global batch that a process feeds."""
    num_rows = batch_length(batch)
    rows = local_rows(num_rows, rank_slice)
    own = rows.selection()
    return HostBatch(jax.tree.map(lambda x: np.asarray(x)[own], batch), rows.mask, num_rows)


def batch_length(batch: Any) -> int:
    """Returns the rows of a batch, of which there must be one at least; see `common_length`."""
    num_rows = common_length(batch)
    if num_rows == 0:
        raise ValueError(
            f"A batch must have at least one row, but one of {form_of(batch)} has none. Leave "
            "empty batches out."
        )
    return num_rows


def form_of(batch: Any) -> str:
    """Returns structure, shapes and dtypes of a row of a batch, in words."""
    leaves = ((jax.tree_util.keystr(path), x) for path, x in jax.tree.leaves_with_path(batch))
    return ", ".join(f"{path} {x.dtype}{list(x.shape[1:])}".strip() for path, x in leaves)


def checksum_of(arrays: Any) -> int:
    """Returns a number that tells the contents of two pytrees of arrays apart."""
    return checksum(map(np.asarray, jax.tree.leaves(arrays)))


def checksum_of_some(arrays: Any) -> int:
    """Returns a checksum of a few rows of arrays `[examples, ...]`, of the beginning of each."""
    num_rows = common_length(arrays)
    rows = np.unique(np.linspace(0, num_rows - 1, min(num_rows, _CHECKED_ROWS)).astype(np.int64))
    return checksum_of(
        [np.ravel(leaf[row])[:_CHECKED_VALUES] for leaf in jax.tree.leaves(arrays) for row in rows]
    )


def common_length(arrays: Any) -> int:
    """Returns the first dimension that all arrays of a pytree, at least one, must share."""
    firsts: dict[tuple[int, ...], str] = {}  # The first array of each length.
    for path, leaf in jax.tree.leaves_with_path(arrays):
        firsts.setdefault(np.shape(leaf)[:1], jax.tree_util.keystr(path) or "data")
    if len(firsts) == 1 and () not in firsts:
        return next(iter(firsts))[0]
    parts = [f"{path}: {n[0] if n else 'a scalar'}" for n, path in firsts.items()]
    raise ValueError(
        "All arrays must have the same number of rows, but got "
        f"{', '.join(parts[:_NAMED_LENGTHS]) or 'no array at all'}."
    )


def announced_batch(
    rows: Any, rank_slice: RankSlice, global_batch_size: int | None, num_examples: int | None
) -> HostBatch | None:
    """Returns zeros like the first batch, from arrays `[0, ...]` like its rows; None if unknown."""
    if rows is None or global_batch_size is None:
        return None
    num_rows = global_batch_size if num_examples is None else min(global_batch_size, num_examples)
    own = local_rows(num_rows, rank_slice)
    zeros = jax.tree.map(lambda x: np.zeros((len(own.indices), *x.shape[1:]), x.dtype), rows)
    return HostBatch(zeros, own.mask, num_rows)


def array_source(x: Any, y: Any, sample_weight: Any, options: ReadOptions) -> ArraySource:
    """Returns a source of global batches of arrays; see `tnt_jax.data.dispatch.as_source`."""
    arrays = (_as_arrays(x), _as_arrays(y), _as_arrays(sample_weight))
    size = resolve_batch_size(
        options.rank_slice,
        batch_size=given_batch_size(options),
        micro=options.micro_batch_size,
        drop_remainder=options.drop_remainder,
        num_examples=common_length(arrays),
    )
    if not options.distribute:
        raise ValueError(
            "Arrays are split over all processes; tnt_distribute_dataset=False is for datasets "
            "that each process shards itself. Pass the same arrays on every process, or a dataset."
        )
    return ArraySource(
        arrays,
        global_batch_size=size,
        rank_slice=options.rank_slice,
        shuffle=options.shuffle,
        seed=options.seed,
        drop_remainder=options.drop_remainder,
    )


def given_batch_size(options: ReadOptions) -> int | None:
    """Returns the batch size for rows: the given one, else 32; None if it is that of a rank."""
    if options.batch_size is not None or options.micro_batch_size is not None:
        return options.batch_size
    return max(DEFAULT_BATCH_SIZE, options.rank_slice.num_ranks)


def _as_arrays(x: Any) -> Any:
    """Converts lists of numbers to arrays and keeps all other structure."""
    if isinstance(x, Mapping):
        return {key: _as_arrays(value) for key, value in x.items()}
    if isinstance(x, (tuple, list)):
        if x and all(isinstance(value, (int, float, np.generic)) for value in x):
            return np.asarray(x)
        parts = map(_as_arrays, x)
        return type(x)(*parts) if hasattr(x, "_fields") else type(x)(parts)
    return torch_to_numpy(x) if is_torch_tensor(x) else x
