"""The rows of a whole Ray dataset in their order, of which each process asks for its own.

`RowStreams` runs as an actor on the cluster, where it starts the tasks of datasets. Blocks do not
pass through it: it tells each process which rows of which blocks are its part of a global batch,
and Ray brings these blocks from where they were made. So rows are prepared once; and as the actor
counts rows, not blocks, the batches are the same however many processes there are.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from tnt_jax.data.layout import RankSlice, local_rows
from tnt_jax.data.ray.spec import is_function_of_epoch, is_ray_dataset
from tnt_jax.data.tables.columns import Batch, ColumnRoles, dense
from tnt_jax.on_ray.worker import import_ray


class Piece(NamedTuple):
    """Consecutive rows of a block, a `ray.ObjectRef`."""

    block: Any
    start: int
    num_rows: int

    def part(self, first: int, end: int) -> "Piece":
        """Returns the rows from number `first` of this piece up to, but without, `end`."""
        return Piece(self.block, self.start + first, end - first)


def rows_of(pieces: Sequence[Piece], blocks: Sequence[Any]) -> Batch:
    """Returns the rows of several pieces, of whose blocks each is given, by column."""
    accessor = import_ray("Ray Data", "ray.data.block").BlockAccessor
    parts = []
    for piece, block in zip(pieces, blocks, strict=True):
        rows = accessor.for_block(block).slice(piece.start, piece.start + piece.num_rows, False)
        parts.append(dense(accessor.for_block(rows).to_batch_format("numpy")))
    first = parts[0]
    for part in parts[1:]:
        if part.keys() != first.keys():
            raise ValueError(
                f"The rows of a dataset must have the same columns, but some have {sorted(first)} "
                f"and some have {sorted(part)}."
            )
    if len(parts) == 1:
        return first
    return {name: np.concatenate([part[name] for part in parts]) for name in first}


# A checksum of so many rows at the beginning tells one order from another.
_CHECKED_ROWS = 64


class Request(NamedTuple):
    """Request of a process for its part of the global batch at `first_row` of pass `number`."""

    number: int
    epoch: int  # It decides the order of the rows of the pass.
    first_row: int
    num_rows: int
    rank_slice: RankSlice


class Share(NamedTuple):
    """The rows of a batch that a process feeds, none twice; `num_rows` is 0 behind the end."""

    num_rows: int
    pieces: list[Piece]


@dataclass
class _Stream:
    """A dataset or function of the epoch, the processes that read it, and its passes by number."""

    dataset: Any
    num_processes: int
    readers: set[int]
    passes: dict[int, "_Pass"] = field(default_factory=dict)
    checksums: dict[int, tuple[int, int | None]] = field(default_factory=dict)


class RowStreams:
    """The row streams of a job, by name; as an actor it works on one call after the other."""

    def __init__(self) -> None:
        self._streams: dict[str, _Stream] = {}

    def open(self, name: str, dataset: Any, num_processes: int) -> None:
        """Makes a stream."""
        self._streams[name] = _Stream(dataset, num_processes, set(range(num_processes)))

    def close(self, name: str, process: int) -> None:
        """Notes that a process has dropped a stream; the last one ends the tasks of its dataset."""
        if name in self._streams:
            self._streams[name].readers.discard(process)
            if not self._streams[name].readers:
                del self._streams[name]

    def take(self, name: str, process: int, request: Request) -> Share:
        """Returns the rows of a process, which asks in rising order, once they are prepared.

        What a task of the dataset raises is raised at all later requests of the pass as well.
        """
        stream = self._streams[name]
        for number in [number for number in stream.passes if number < request.number]:
            self.leave(name, process, number)
        if request.number not in stream.passes:
            dataset = _in_order(stream.dataset, request.epoch)
            stream.passes[request.number] = _Pass(dataset, request.first_row, stream.num_processes)
        return stream.passes[request.number].take(process, request)

    def leave(self, name: str, process: int, number: int) -> None:
        """Notes that a process does not read a pass any further; all that do so end it."""
        passes = self._streams[name].passes if name in self._streams else {}
        if number in passes and passes[number].leave(process):
            del passes[number]

    def checksums(self, name: str, number: int, roles: ColumnRoles) -> tuple[int, int | None]:
        """Returns checksums of the rows at the beginning of a pass, after its first request."""
        stream = self._streams[name]
        if number not in stream.checksums:
            pieces = stream.passes[number].beginning(_CHECKED_ROWS)
            blocks = import_ray("RayData").get([piece.block for piece in pieces])
            stream.checksums[number] = roles.checksums(rows_of(pieces, blocks))
        return stream.checksums[number]


def _in_order(dataset: Any, epoch: int) -> Any:
    """Returns the dataset of an epoch, which keeps the order of its rows."""
    if is_function_of_epoch(dataset):
        context = import_ray("RayData", "ray.data").DataContext
        context.get_current().execution_options.preserve_order = True
        dataset = dataset(epoch)
        if not is_ray_dataset(dataset):
            raise TypeError(
                "The function of a RayData must return the ray.data.Dataset of the epoch, but "
                f"for epoch {epoch} it returned {type(dataset).__qualname__}."
            )
    dataset.context.execution_options.preserve_order = True
    # Shuffles with `reseed_after_execution` draw from their seed and this number, which Ray
    # would count from the start of this actor.
    dataset.context._execution_idx = epoch
    return dataset


class _Pass:
    """One pass over a dataset, of which no process asks for rows before `first_row`."""

    def __init__(self, dataset: Any, first_row: int, num_processes: int) -> None:
        self._pieces: deque[tuple[int, Piece]] = deque()
        self._num_rows = 0
        self._has_ended = False
        self._error: Exception | None = None
        # First row that each process may still ask for.
        self._positions = dict.fromkeys(range(num_processes), first_row)
        self._blocks = _blocks_of(dataset)

    def take(self, process: int, request: Request) -> Share:
        first = request.first_row
        self._positions[process] = first
        self._read(first + request.num_rows)
        num_rows = max(0, min(request.num_rows, self._num_rows - first))
        if not num_rows:
            return Share(0, [])
        own = np.unique(local_rows(num_rows, request.rank_slice).indices)
        share = Share(num_rows, self._slice(first + int(own[0]), first + int(own[-1]) + 1))
        self._forget()
        return share

    def leave(self, process: int) -> bool:
        """Returns whether all processes have left."""
        self._positions.pop(process, None)
        return not self._positions

    def beginning(self, num_rows: int) -> list[Piece]:
        """Returns up to `num_rows` rows at the beginning."""
        self._read(num_rows)
        return self._slice(0, min(num_rows, self._num_rows))

    def _read(self, num_rows: int) -> None:
        """Waits until there are so many rows, or the pass has ended."""
        while self._num_rows < num_rows and not self._has_ended:
            if self._error is not None:
                # Other processes must not take an interrupted pass for one that has ended.
                raise self._error
            try:
                piece = next(self._blocks, None)
            except Exception as error:
                self._error = error
                raise
            if piece is None:
                self._has_ended = True
                return
            self._pieces.append((self._num_rows, piece))
            self._num_rows += piece.num_rows
            self._forget()

    def _forget(self) -> None:
        """Drops blocks that no process will ask for, so that Ray can free their memory."""
        needed = min(self._positions.values(), default=self._num_rows)
        while self._pieces and self._pieces[0][0] + self._pieces[0][1].num_rows <= needed:
            self._pieces.popleft()

    def _slice(self, first: int, end: int) -> list[Piece]:
        return [
            piece.part(max(first - begin, 0), min(end - begin, piece.num_rows))
            for begin, piece in self._pieces
            if begin < end and first < begin + piece.num_rows
        ]


def _blocks_of(dataset: Any) -> Iterator[Piece]:
    """Yields the blocks of a dataset in their order, as they are made; empty ones are left out."""
    for bundle in dataset.iter_internal_ref_bundles():
        for entry, part in zip(bundle.blocks, bundle.slices, strict=True):
            start = 0 if part is None else part.start_offset
            end = entry.metadata.num_rows if part is None else part.end_offset
            if end > start:
                yield Piece(entry.ref, start, end - start)
