"""Which rows of which array each server holds: partitioners, and a plan that balances bytes.

The three partitioners divide arrays as those of `tf.distribute.experimental.partitioners` do: along
the first dimension, into parts that differ by one row at most.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

Rows = tuple[int, int]
"""A range of rows: the first, and the one after the last."""


class Partitioner(Protocol):
    """Chooses into how many parts an array is divided."""

    def __call__(self, shape: tuple[int, ...], dtype: Any) -> int:
        """Returns the number of parts along the first dimension of an array, at least 1."""
        ...


@dataclass(frozen=True)
class FixedShardsPartitioner:
    """Divides every array into the same number of parts, or as many as it has rows.

    Attributes:
        num_shards: Number of parts, at least 1.
    """

    num_shards: int

    def __post_init__(self) -> None:
        _check_at_least_1(num_shards=self.num_shards)

    def __call__(self, shape: tuple[int, ...], dtype: Any) -> int:
        """Returns the number of parts of an array."""
        return _at_most_rows(self.num_shards, shape)


@dataclass(frozen=True)
class MinSizePartitioner:
    """Divides arrays into as many parts as possible that have about a least size.

    Attributes:
        min_shard_bytes: Least size of a part, in bytes.
        max_shards: Largest number of parts.
    """

    min_shard_bytes: int = 256 << 10
    max_shards: int = 1

    def __post_init__(self) -> None:
        _check_at_least_1(min_shard_bytes=self.min_shard_bytes, max_shards=self.max_shards)

    def __call__(self, shape: tuple[int, ...], dtype: Any) -> int:
        """Returns the number of parts of an array."""
        # Rounded up, as in TensorFlow: parts may be somewhat smaller.
        parts = -(-_num_bytes(shape, dtype) // self.min_shard_bytes)
        return _at_most_rows(min(parts, self.max_shards), shape)


@dataclass(frozen=True)
class MaxSizePartitioner:
    """Divides arrays into parts of at most a given size.

    A row is never divided: one that is larger is a part of its own.

    Attributes:
        max_shard_bytes: Largest size of a part, in bytes.
        max_shards: Largest number of parts, which counts more than their size; None for any.
    """

    max_shard_bytes: int
    max_shards: int | None = None

    def __post_init__(self) -> None:
        _check_at_least_1(max_shard_bytes=self.max_shard_bytes, max_shards=self.max_shards or 1)

    def __call__(self, shape: tuple[int, ...], dtype: Any) -> int:
        """Returns the number of parts of an array."""
        if not shape or not shape[0]:
            return 1
        row_bytes = max(1, _num_bytes(shape[1:], dtype))
        parts = -(-shape[0] // max(1, self.max_shard_bytes // row_bytes))
        return _at_most_rows(min(parts, self.max_shards or parts), shape)


@dataclass(frozen=True)
class ShardPlan:
    """Which rows of each array of a model lie on which server.

    On a server every array has its place: those of which it has no row have a first dimension of
    0, so that functions of the whole tree of arrays work on each server.

    Attributes:
        shapes: Shapes of the arrays.
        rows: For each server and array the ranges of rows that the server holds, in order.
    """

    shapes: tuple[tuple[int, ...], ...]
    rows: tuple[tuple[tuple[Rows, ...], ...], ...]

    @property
    def num_servers(self) -> int:
        """Number of servers."""
        return len(self.rows)

    def held(self, server: int) -> list[int]:
        """Returns the numbers of the arrays of which a server holds rows."""
        return [index for index, ranges in enumerate(self.rows[server]) if ranges]

    def is_divided(self, index: int) -> bool:
        """Returns whether several servers hold rows of an array."""
        return sum(bool(of_server[index]) for of_server in self.rows) > 1

    def shape_on(self, server: int, index: int) -> tuple[int, ...]:
        """Returns the shape of an array on a server, `(0, ...)` if it holds no row."""
        shape, ranges = self.shapes[index], self.rows[server][index]
        if not shape:
            return () if ranges else (0,)
        return (sum(stop - start for start, stop in ranges), *shape[1:])

    def part(self, server: int, index: int, array: np.ndarray) -> np.ndarray:
        """Returns the rows of an array `[rows, ...]` that a server holds.

        Args:
            server: Number of the server.
            index: Number of the array whose rows decide; `array` may be another of as many rows.
            array: The whole array.
        """
        ranges = self.rows[server][index]
        if not self.shapes[index]:
            return array if ranges else np.zeros((0,), array.dtype)
        if not ranges:
            return array[:0]
        if len(ranges) == 1:
            return array[slice(*ranges[0])]
        return np.concatenate([array[slice(*each)] for each in ranges])

    def whole(self, index: int, parts: Sequence[np.ndarray]) -> np.ndarray:
        """Returns an array from the parts of all servers, in their order."""
        owners = [server for server, of_server in enumerate(self.rows) if of_server[index]]
        if len(owners) == 1 and len(self.rows[owners[0]][index]) == 1:
            return parts[owners[0]]
        first = parts[owners[0]]
        result = np.empty((self.shapes[index][0], *first.shape[1:]), first.dtype)
        for server in owners:
            begin = 0
            for start, stop in self.rows[server][index]:
                result[start:stop] = parts[server][begin : begin + stop - start]
                begin += stop - start
        return result

    def packed(self, server: int, arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Returns what is sent to a server of whole arrays: its rows of those that it holds."""
        return [self.part(server, index, arrays[index]) for index in self.held(server)]

    def unpacked(self, pieces: Sequence[Sequence[np.ndarray]]) -> list[np.ndarray]:
        """Returns whole arrays from what `packed` gave for each server."""
        by_array: list[list[Any]] = [[None] * self.num_servers for _ in self.shapes]
        for server, sent in enumerate(pieces):
            for index, array in zip(self.held(server), sent, strict=True):
                by_array[index][server] = array
        return [self.whole(index, parts) for index, parts in enumerate(by_array)]


def plan_shards(
    shapes: Sequence[tuple[int, ...]],
    dtypes: Sequence[Any],
    *,
    num_servers: int,
    partitioner: Partitioner | None = None,
    num_divided: int | None = None,
) -> ShardPlan:
    """Returns which rows of each array each server holds.

    The parts of all arrays are placed from the largest to the smallest, each on the server that has
    the fewest bytes so far.

    Args:
        shapes: Shapes of the arrays.
        dtypes: Their dtypes.
        num_servers: Number of servers, at least 1.
        partitioner: Into how many parts an array is divided; by default none is.
        num_divided: How many of the first arrays may be divided; all by default.

    Raises:
        ValueError: If the partitioner returns no positive number.
    """
    parts: list[tuple[int, int, Rows]] = []
    for index, (shape, dtype) in enumerate(zip(shapes, dtypes, strict=True)):
        num_parts = 1
        if partitioner is not None and (num_divided is None or index < num_divided):
            num_parts = partitioner(tuple(shape), dtype)
        if not isinstance(num_parts, int) or num_parts < 1:
            raise ValueError(
                f"A partitioner returns the number of parts of an array, at least 1, but "
                f"{partitioner!r} returned {num_parts!r} for the shape {tuple(shape)}."
            )
        for rows in _divided(shape[0] if shape else 1, num_parts):
            part_shape = (rows[1] - rows[0], *shape[1:])
            parts.append((_num_bytes(part_shape, dtype), index, rows))
    loads = [0] * num_servers
    placed: list[list[list[Rows]]] = [[[] for _ in shapes] for _ in range(num_servers)]
    for num_bytes, index, rows in sorted(parts, key=lambda part: (-part[0], part[1], part[2])):
        server = loads.index(min(loads))
        # An empty array costs nothing, and would come to rest on the first server always.
        loads[server] += max(num_bytes, 1)
        placed[server][index].append(rows)
    ranges = tuple(tuple(tuple(sorted(each)) for each in of_server) for of_server in placed)
    return ShardPlan(tuple(tuple(shape) for shape in shapes), ranges)


def _divided(num_rows: int, num_parts: int) -> list[Rows]:
    """Returns ranges of rows, of which the first ones have one row more if need be."""
    num_parts = max(1, min(num_parts, num_rows))
    size, longer = divmod(num_rows, num_parts)
    starts = [part * size + min(part, longer) for part in range(num_parts + 1)]
    return list(itertools.pairwise(starts))


def _at_most_rows(num_parts: int, shape: tuple[int, ...]) -> int:
    return max(1, min(num_parts, shape[0] if shape else 1))


def _num_bytes(shape: Sequence[int], dtype: Any) -> int:
    return math.prod(shape) * np.dtype(dtype).itemsize


def _check_at_least_1(**values: int) -> None:
    for name, value in values.items():
        if not isinstance(value, int) or value < 1:
            raise ValueError(f"{name} must be an integer of at least 1, but is {value!r}.")
