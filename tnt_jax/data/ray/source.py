"""A whole Ray dataset as a source of global batches, of which each process fetches its rows."""

from collections import deque
from collections.abc import Generator, Iterator
from contextlib import closing, suppress
from typing import Any

import jax
import numpy as np

from tnt_jax.data.agreement import Board, reader_stopped
from tnt_jax.data.elements import as_batch
from tnt_jax.data.layout import RankSlice, local_rows, num_batches, resolve_batch_size
from tnt_jax.data.permutation import RowOrder
from tnt_jax.data.ray.blocks import rows_of
from tnt_jax.data.ray.columns import ColumnRoles
from tnt_jax.data.ray.connection import Connection
from tnt_jax.data.ray.kinds import is_ray_iterator
from tnt_jax.data.ray.row_stream import Request, Share
from tnt_jax.data.ray.spec import RayData
from tnt_jax.data.sources import HostBatch

# Batches that are asked for, or on their way to this node, while one is used.
_BATCHES_AHEAD = 4
_TICK_S = 0.5


class RaySource:
    """The rows of one process of a Ray dataset.

    The rows of a global batch follow one another in the order of the dataset, which its tasks keep
    (`ExecutionOptions.preserve_order`), however many processes and nodes there are. One actor for
    all processes counts them; blocks come from where they were made.

    Args:
        spec: The dataset, the same on every process; that of the master is read.
        rank_slice: This process's part of the data axis.
        micro_batch_size: Rows of one rank, if given.
        board: Where the processes meet; the coordination service of the job by default.

    Attributes:
        global_batch_size: Rows of a full global batch.
        num_batches: Batches of an epoch, None unless the dataset is in Ray's memory.
        num_examples: Rows of an epoch, None unless the dataset is in Ray's memory.
        in_memory: False: a thread reads ahead.
        first_checksums: Of the contents of the first batch; None before it was read.
    """

    in_memory = False

    def __init__(
        self,
        spec: RayData,
        rank_slice: RankSlice,
        *,
        micro_batch_size: int | None = None,
        board: Board | None = None,
    ) -> None:
        self._connection = Connection(whole_dataset(spec.dataset), board)
        examples = self._connection.num_examples
        self._size = resolve_batch_size(
            rank_slice,
            batch_size=spec.batch_size,
            micro=micro_batch_size,
            drop_remainder=spec.drop_remainder,
            num_examples=examples,
        )
        self.global_batch_size: int | None = self._size
        self.num_batches: int | None = None
        self.num_examples: int | None = examples
        if examples is not None:
            self.num_batches = num_batches(examples, self._size, drop_remainder=spec.drop_remainder)
            self.num_examples = min(examples, self.num_batches * self._size)
        self.first_checksums: tuple[int, int | None] | None = None
        self._roles = ColumnRoles(spec.inputs, spec.targets, spec.sample_weight)
        self._drops_remainder = spec.drop_remainder
        self._rank_slice = rank_slice
        self._num_passes = 0

    @property
    def row_order(self) -> RowOrder:
        """What the order of the rows depends on: of the first ones it is known by a checksum."""
        targets = None if self.first_checksums is None else self.first_checksums[1]
        return RowOrder(
            parts={} if targets is None else {"order of the first rows (checksum)": targets},
            is_of_rows=True,
        )

    def batches(self, epoch: int, start_batch: int = 0) -> Iterator[HostBatch]:
        """Yields this process's rows of each global batch, from batch `start_batch` on.

        The tasks of the dataset make the rows before it, too, but these do not come to this node.

        Raises:
            Exception: What a task of the dataset raised.
            ValueError: If a column is missing, or holds no numbers.
        """
        number, self._num_passes = self._num_passes, self._num_passes + 1
        with closing(self._shares(number, epoch, start_batch)) as shares:
            for share in shares:
                is_dropped = self._drops_remainder and share.num_rows < self._size
                if is_dropped or not share.num_rows:
                    return
                yield self._host_batch(share)

    def _shares(self, number: int, epoch: int, batch: int) -> Generator[Share, None, None]:
        """Yields what this process feeds of each batch, and asks for a few batches ahead."""
        actor, stream = self._connection.actor, self._connection.stream
        process = self._connection.process

        def ask(batch: int) -> Any:
            first_row = batch * self._size
            request = Request(number, epoch, first_row, self._size, self._rank_slice)
            return actor.take.remote(stream, process, request)

        asked = deque([ask(batch)])
        try:
            if self.first_checksums is None and batch == 0:
                share = self._await(asked[0])
                if share.num_rows:
                    found = actor.checksums.remote(stream, number, self._roles)
                    self.first_checksums = self._await(found)
            while True:
                while len(asked) < _BATCHES_AHEAD:
                    batch += 1
                    asked.append(ask(batch))
                share = self._await(asked.popleft())
                self._fetch(asked)
                yield share
        finally:
            if self._connection.ray.is_initialized():
                actor.leave.remote(stream, process, number)

    def _fetch(self, asked: deque[Any]) -> None:
        """Begins to bring the blocks of batches whose place is known to this node."""
        ray = self._connection.ray
        known, _ = ray.wait([*asked], num_returns=len(asked), timeout=0, fetch_local=True)
        with suppress(ray.exceptions.RayError):  # Raised in the turn of its batch.
            blocks = {piece.block for share in ray.get(known) for piece in share.pieces}
            if blocks:
                ray.wait([*blocks], num_returns=len(blocks), timeout=0, fetch_local=True)

    def _await(self, reference: Any) -> Any:
        """Returns a value, or the values of a list of references, once they are on this node."""
        ray, stopped = self._connection.ray, reader_stopped.get()
        references = [*dict.fromkeys(reference if isinstance(reference, list) else [reference])]
        while True:
            ready, _ = ray.wait(references, num_returns=len(references), timeout=_TICK_S)
            if len(ready) == len(references):
                return ray.get(reference)
            if stopped is not None and stopped.is_set():
                raise InterruptedError("The batches of this thread are no longer used.")

    def _host_batch(self, share: Share) -> HostBatch:
        rows = local_rows(share.num_rows, self._rank_slice)
        columns = rows_of(share.pieces, self._await([piece.block for piece in share.pieces]))
        data = as_batch(self._roles.element(columns))
        unique, own = np.unique(rows.indices, return_inverse=True)
        if len(unique) < len(own):
            data = jax.tree.map(lambda column: column[own], data)
        return HostBatch(data, rows.mask, share.num_rows)


def whole_dataset(dataset: Any) -> Any:
    """Returns the dataset of an iterator over all of it, and anything else as it is.

    Raises:
        TypeError: If the iterator does not tell.
    """
    if not is_ray_iterator(dataset):
        return dataset
    found = getattr(dataset, "_base_dataset", None)
    if found is None:
        raise TypeError(
            f"The dataset of a {type(dataset).__name__} is not known in this version of Ray. Pass "
            "the ray.data.Dataset itself to tnt_jax.data.RayData."
        )
    return found
