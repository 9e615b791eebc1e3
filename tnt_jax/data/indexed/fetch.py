"""Fetches examples of a random-access dataset, a bounded number of batches ahead.

The caller fetches them, threads or processes. Examples are trees of tuples, named tuples and
dictionaries with arrays at the leaves. This module needs only NumPy, so that worker processes start
fast; these send arrays through memory that they share with their parent (`Block`).
"""

import mmap
import multiprocessing
import os
import pickle
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np

from tnt_jax.data.elements import OnError, as_tuple

_ALIGNMENT = 64


class Written(NamedTuple):
    """A pickled value without the bytes of its arrays, which begin and end as `spans` say."""

    head: bytes
    spans: list[tuple[int, int]]


class Block:
    """Memory into which a worker writes one value at a time: a file without a name.

    A worker opens it by its path below `/proc`; without that the path is "", and arrays travel
    through pipes.
    """

    def __init__(self) -> None:
        self.path = ""
        self._file: Any = None
        self._memory: mmap.mmap | None = None
        if hasattr(os, "memfd_create"):
            self._file = os.fdopen(os.memfd_create("tnt_jax-fetch"), "r+b", buffering=0)
            self.path = f"/proc/{os.getpid()}/fd/{self._file.fileno()}"

    def read(self, found: Any, *, copy: bool) -> Any:
        """Returns what `write` in a worker stands for; arrays, unless copied, are the block's."""
        if not isinstance(found, Written):
            return found
        size = os.fstat(self._file.fileno()).st_size
        if self._memory is None or len(self._memory) < size:
            # Arrays that are still in use keep the old mapping.
            self._memory = mmap.mmap(self._file.fileno(), size)
        whole = memoryview(self._memory)
        views = [whole[first : first + length] for first, length in found.spans]
        return pickle.loads(found.head, buffers=map(bytearray, views) if copy else views)


def write(path: str, value: Any) -> Any:
    """Returns a `Written`, or a value itself without arrays or where the block cannot be used."""
    buffers: list[pickle.PickleBuffer] = []
    head = pickle.dumps(value, protocol=5, buffer_callback=buffers.append)
    if not buffers or not path:
        return value
    spans, end = [], 0
    try:
        with open(os.open(path, os.O_WRONLY), "wb", buffering=0) as file:
            for buffer in buffers:
                with buffer.raw() as raw:
                    done = 0
                    while done < raw.nbytes:  # A call writes 2 GB at most.
                        done += os.pwrite(file.fileno(), raw[done:], end + done)
                    spans.append((end, raw.nbytes))
                    end += -(-raw.nbytes // _ALIGNMENT) * _ALIGNMENT
    except OSError:
        return value
    return Written(head, spans)


def map_arrays(function: Callable[..., Any], tree: Any, *others: Any) -> Any:
    """Applies `function` to leaves at the same positions; lists, such as token ids, are leaves."""
    trees = (tree, *others)
    if isinstance(tree, Mapping):
        return {key: map_arrays(function, *(each[key] for each in trees)) for key in tree}
    if isinstance(tree, tuple):
        parts = [map_arrays(function, *leaves) for leaves in zip(*trees, strict=True)]
        return type(tree)(*parts) if hasattr(tree, "_fields") else tuple(parts)
    return function(*trees)


def stack_examples(examples: Sequence[Any]) -> Any:
    """Returns one batch of arrays `[len(examples), ...]` with the structure of an example.

    As in JAX, a Python float becomes float32 and a Python int int32 where it fits. All examples
    must have the same structure and shapes.
    """
    try:
        return map_arrays(lambda *values: _stack(values), *examples)
    except (KeyError, TypeError, ValueError) as error:
        shapes = dict.fromkeys(str(map_arrays(np.shape, example)) for example in examples)
        raise ValueError(
            "The examples of a batch must have the same structure and shapes, but there are "
            f"{' and '.join(list(shapes)[:3])}. Pad or crop them to one shape in the dataset, or "
            "filter them."
        ) from error


def take_rows(batch: Any, indices: np.ndarray) -> Any:
    """Returns rows of `batch`, which may repeat, in order; consecutive ones without a copy."""
    first = int(indices[0])
    count = len(indices)
    if np.array_equal(indices, np.arange(first, first + count)):
        return map_arrays(lambda array: array[first : first + count], batch)
    return map_arrays(lambda array: np.take(array, indices, axis=0), batch)


def _stack(values: tuple[Any, ...]) -> np.ndarray:
    if all(value is None for value in values):
        raise ValueError("None is not an array")
    array = np.stack([np.asarray(value) for value in values])
    if isinstance(values[0], bool | np.ndarray | np.generic) or hasattr(values[0], "dtype"):
        return array
    if array.dtype == np.float64:
        return array.astype(np.float32)
    if array.dtype == np.int64 and (not array.size or (abs(array) < 1 << 31).all()):
        return array.astype(np.int32)
    return array


Worker = Literal["threads", "processes"]


class Dataset(Protocol):
    """The interface of lists, NumPy arrays, TFDS and Grain data sources and PyTorch datasets."""

    def __len__(self) -> int:
        """Returns the number of examples."""
        ...

    def __getitem__(self, index: Any, /) -> Any:
        """Returns the example at `index`, a tree of arrays."""
        ...


class Chunk(NamedTuple):
    """Some rows of a batch; `data` is None if no example could be fetched."""

    data: Any
    is_good: np.ndarray  # Bool `[rows]`; where it is False, another example stands in.
    failures: list[str]


# How an epoch and indices become rows; it must be picklable, as a worker process receives it once.
AnyRecipe = Callable[[int, list[int]], Chunk]


@dataclass(frozen=True)
class Recipe:
    """How an index becomes an example; see `RandomAccess`, whose attributes these are."""

    dataset: Dataset
    transform: Callable[[Any, np.random.Generator], Any] | None
    seed: int
    on_error: OnError

    def __call__(self, epoch: int, indices: list[int]) -> Chunk:
        """Returns the examples at `indices` as one chunk."""
        fetch_several: Any = getattr(self.dataset, "__getitems__", None)
        if fetch_several is not None and self.on_error == "raise" and self.transform is None:
            examples = [as_tuple(example) for example in fetch_several(indices)]
            return Chunk(stack_examples(examples), np.ones(len(indices), bool), [])
        examples, failures = [], []
        is_good = np.ones(len(indices), bool)
        for row, index in enumerate(indices):
            try:
                example = as_tuple(self.dataset[index])
                if self.transform is not None:
                    example = self.transform(example, example_generator(self.seed, epoch, index))
                examples.append(example)
            except Exception as error:
                name = type(self.dataset).__name__
                error.add_note(f"This happened in example {index} of {name} (epoch {epoch}).")
                if self.on_error == "raise":
                    raise
                is_good[row] = False
                failures.append(f"example {index}: {type(error).__name__}: {error}")
        return Chunk(_fill(examples, is_good), is_good, failures)


def example_generator(seed: int, epoch: int, index: int) -> np.random.Generator:
    """Returns the random generator of one example in one epoch, the same on any process."""
    key = np.array([seed & 0xFFFF_FFFF_FFFF_FFFF, epoch], np.uint64)
    counter = np.array([0, 0, 0, index], np.uint64)
    return np.random.Generator(np.random.Philox(key=key, counter=counter))


class _Part(NamedTuple):
    """Rows that a worker fetches, and the memory through which a process sends them."""

    future: Future[Any]
    block: Block | None

    def result(self, *, copy: bool) -> Chunk:
        found = self.future.result()
        return found if self.block is None else self.block.read(found, copy=copy)


class Fetcher:
    """Runs a recipe over batches of indices, by the caller or so many batches ahead by workers."""

    def __init__(
        self, recipe: AnyRecipe, *, num_workers: int, worker: Worker, num_batches_ahead: int = 2
    ) -> None:
        self.num_workers, self.num_batches_ahead = num_workers, num_batches_ahead
        self._recipe, self._worker = recipe, worker
        self._pool: Executor | None = None
        self._free: list[Block] = []

    def batches(self, epoch: int, index_batches: Iterator[np.ndarray]) -> Iterator[Chunk]:
        """Yields one chunk for each array of distinct indices, in order."""
        if self.num_workers == 0:
            for indices in index_batches:
                yield self._recipe(epoch, indices.tolist())
            return
        waiting: deque[list[_Part]] = deque()
        try:
            for indices in index_batches:
                waiting.append(self._submit(epoch, indices))
                if len(waiting) > self.num_batches_ahead:
                    yield self._receive(waiting.popleft())
            while waiting:
                yield self._receive(waiting.popleft())
        finally:
            for part in (part for parts in waiting for part in parts):
                part.future.cancel()
                self._give_back(part)

    def end_processes(self) -> None:
        """Ends worker processes after what they do, so that the next batches start others."""
        if self._pool is not None and self._worker == "processes":
            self._pool.shutdown(wait=False)
            self._pool = None

    def _submit(self, epoch: int, indices: np.ndarray) -> list[_Part]:
        if self._pool is None:
            self._pool = self._start()
            weakref.finalize(self, self._pool.shutdown, wait=False, cancel_futures=True)
        parts = []
        for rows in np.array_split(indices, min(self.num_workers, len(indices))):
            if self._worker == "threads":
                parts.append(_Part(self._pool.submit(self._recipe, epoch, rows.tolist()), None))
                continue
            block = self._free.pop() if self._free else Block()
            future = self._pool.submit(_fetch_in_worker, epoch, rows.tolist(), block.path)
            parts.append(_Part(future, block))
        return parts

    def _receive(self, parts: list[_Part]) -> Chunk:
        try:
            # Several are copied as they are joined.
            return _join([part.result(copy=len(parts) == 1) for part in parts])
        finally:
            for part in parts:
                self._give_back(part)

    def _give_back(self, part: _Part) -> None:
        """Takes the memory of a part for later ones, once no worker writes into it any more."""
        if (block := part.block) is not None:
            part.future.add_done_callback(lambda _: self._free.append(block))

    def _start(self) -> Executor:
        if self._worker == "threads":
            return ThreadPoolExecutor(self.num_workers, thread_name_prefix="tnt_jax-fetch")
        # A forked copy of a process with JAX's threads can deadlock.
        spawn = multiprocessing.get_context("spawn")
        return ProcessPoolExecutor(
            self.num_workers, mp_context=spawn, initializer=_set_recipe, initargs=(self._recipe,)
        )


# Of a process that does nothing but fetch for one job, and ends with it.
_recipe_of_worker: AnyRecipe | None = None


def _set_recipe(recipe: AnyRecipe) -> None:
    global _recipe_of_worker
    _recipe_of_worker = recipe


def _fetch_in_worker(epoch: int, indices: list[int], path: str) -> Any:
    assert _recipe_of_worker is not None
    return write(path, _recipe_of_worker(epoch, indices))


def _fill(examples: list[Any], is_good: np.ndarray) -> Any:
    """Returns the batch of all rows; a failed row repeats a neighbouring example."""
    if not examples:
        return None
    batch = stack_examples(examples)
    if is_good.all():
        return batch
    return take_rows(batch, np.maximum(np.cumsum(is_good) - 1, 0))


def _join(chunks: list[Chunk]) -> Chunk:
    if len(chunks) == 1:
        return chunks[0]
    is_good = np.concatenate([chunk.is_good for chunk in chunks])
    failures = [text for chunk in chunks for text in chunk.failures]
    stand_in = next((chunk.data for chunk in chunks if chunk.data is not None), None)
    if stand_in is None:
        return Chunk(None, is_good, failures)
    parts = [
        take_rows(stand_in, np.zeros(len(rows), np.int64)) if data is None else data
        for data, rows, _ in chunks
    ]
    return Chunk(map_arrays(lambda *arrays: np.concatenate(arrays), *parts), is_good, failures)
