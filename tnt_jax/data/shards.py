"""Data that each process brings for itself (`tnt_distribute_dataset=False`): its own shard, batched for its own ranks.

Shards may differ in length, and nobody needs to know his: processes report a few batches ahead how many rows they have. The epoch ends
when the last shard has ended; a process without rows feeds masked ones, so that every row counts once and nobody waits in vain.
"""

from collections.abc import Iterable, Iterator
from itertools import count
from typing import Any

import jax
import numpy as np

from tnt_jax.data.agreement import Board, CoordinationBoard, Exchange, Report
from tnt_jax.data.layout import Place
from tnt_jax.data.sources import HostBatch, common_length

# Batches per report; as many are held in memory. More batches mean fewer messages, each of which takes well under a millisecond.
_BATCHES_PER_REPORT = 4
_names = count()


class ShardSource:
    """Batches of this process's own data, in step with the other processes.

    Every process must make its sources in the same order, and iterate them equally often.

    Args:
        batches: Iterable of pytrees of arrays `[rows, ...]`, at most `micro_batch_size` times the local ranks each. An iterator is read
            on from epoch to epoch; anything else is iterated anew each epoch.
        place: This process's part of the data axis.
        micro_batch_size: Rows of one rank; by default what the largest first batch of all processes needs.
        board: Where processes report; the coordination service of the job by default.

    Attributes:
        global_batch_size: Rows of all ranks in a full step; None until known.
        num_batches: Batches of the longest shard; None where a shard does not tell.
        num_examples: None: shards are not counted.
        in_memory: False: a thread reads ahead.
    """

    in_memory = False

    def __init__(
        self, batches: Iterable[Any], *, place: Place, micro_batch_size: int | None = None, board: Board | None = None
    ) -> None:
        self._batches, self._place, self._micro = batches, place, micro_batch_size
        self._board = CoordinationBoard() if board is None else board
        self._name = f"shards/{next(_names)}" if board is None else "shards"
        self._running = iter(batches) if isinstance(batches, Iterator) else None
        self._num_passes = 0
        self._template: Any = None
        self.global_batch_size: int | None = micro_batch_size and micro_batch_size * place.num_ranks
        self.num_examples: int | None = None
        self.num_batches: int | None = self._longest()

    def batches(self, epoch: int, start_batch: int = 0) -> Iterator[HostBatch]:
        """Yields this process's rows, one batch a step, until the data of all processes has ended.

        Raises:
            RuntimeError: If the data of another process failed; the text names the process and its error.
            ValueError: If a batch has more rows than fit, or a shard is empty.
        """
        exchange = Exchange(self._board, f"{self._name}/{self._num_passes}")
        self._num_passes += 1
        reader = _Reader(self._running if self._running is not None else iter(self._batches), exchange, self._place.local_ranks)
        steps = self._steps(reader, exchange)
        for number, batch in enumerate(steps):
            if number >= start_batch:
                yield batch

    def _steps(self, reader: "_Reader", exchange: Exchange) -> Iterator[HostBatch]:
        reader.read(_BATCHES_PER_REPORT)
        reader.post()
        while True:
            own = reader.take()
            reports = exchange.read()
            self._check(reports)
            num_steps = max(len(report.num_rows) for report in reports)
            for step in range(num_steps):
                # The next report is on its way before this step's batch is handed over.
                reader.read(1)
                if step == num_steps - 1 and not all(report.has_ended for report in reports):
                    reader.read(_BATCHES_PER_REPORT)
                    reader.post()
                yield self._host_batch(own[step] if step < len(own) else None, reports, step)
            if all(report.has_ended for report in reports):
                return

    def _check(self, reports: list[Report]) -> None:
        """Fixes the rows of a rank from the first reports, and refuses batches that do not fit on every process alike."""
        empty = [process for process, report in enumerate(reports) if not report.num_rows and self._template is None]
        if self._micro is None and not empty:
            self._micro = max(-(-report.num_rows[0] // report.local_ranks) for report in reports)
            self.global_batch_size = self._micro * self._place.num_ranks
        if empty:
            raise ValueError(
                f"The dataset of process {empty[0]} is empty. Give every process at least one batch, or let tnt_jax split the dataset "
                "(tnt_distribute_dataset=True)."
            )
        assert self._micro is not None
        for process, report in enumerate(reports):
            full = self._micro * report.local_ranks
            if any(rows > full for rows in report.num_rows):
                raise ValueError(
                    f"A batch of process {process} has {max(report.num_rows)} rows, but with {self._micro} rows a rank its "
                    f"{report.local_ranks} rank(s) take {full}. Batch each shard with that size, or pass tnt_micro_batch_size."
                )

    def _host_batch(self, batch: Any, reports: list[Report], step: int) -> HostBatch:
        assert self._micro is not None
        full = self._micro * self._place.local_ranks
        rows_of = [report.num_rows[step] if step < len(report.num_rows) else 0 for report in reports]
        is_full = all(rows == self._micro * report.local_ranks for rows, report in zip(rows_of, reports, strict=True))
        if batch is not None and self._template is None:
            self._template = jax.tree.map(lambda x: np.asarray(x)[:1], batch)
        num_rows = 0 if batch is None else common_length(batch)
        source = self._template if batch is None else batch
        indices = np.minimum(np.arange(full), max(num_rows - 1, 0))
        data = jax.tree.map(np.asarray, batch) if num_rows == full else jax.tree.map(lambda x: np.asarray(x)[indices], source)
        mask = None if is_full else (np.arange(full) < num_rows).astype(np.float32)
        return HostBatch(data, mask, sum(rows_of))

    def _longest(self) -> int | None:
        """Agrees on the number of steps before the epoch, where every shard knows its length."""
        try:
            own = [len(self._batches)]  # type: ignore[arg-type]
        except TypeError:
            own = []
        exchange = Exchange(self._board, f"{self._name}/length")
        exchange.post(Report(own, has_ended=True, local_ranks=self._place.local_ranks))
        lengths = [report.num_rows for report in exchange.read()]
        return max(length[0] for length in lengths) if all(lengths) else None


class _Reader:
    """Reads this process's batches ahead and reports them; an error in the data is reported before it is raised."""

    def __init__(self, batches: Iterator[Any], exchange: Exchange, local_ranks: int) -> None:
        self._batches, self._exchange, self._local_ranks = batches, exchange, local_ranks
        self._ahead: list[Any] = []
        self._has_ended = False

    def read(self, num_batches: int) -> None:
        """Reads up to `num_batches` more, but not more than one report holds."""
        for _ in range(num_batches):
            if self._has_ended or len(self._ahead) == _BATCHES_PER_REPORT:
                return
            try:
                self._ahead.append(next(self._batches))
            except StopIteration:
                self._has_ended = True
            except Exception as error:
                text = f"{type(error).__name__}: {error}"
                self._exchange.post(Report([], has_ended=True, local_ranks=self._local_ranks, error=text))
                raise

    def post(self) -> None:
        """Reports the batches that were read."""
        self._exchange.post(Report([common_length(b) for b in self._ahead], self._has_ended, self._local_ranks))

    def take(self) -> list[Any]:
        """Returns the batches of the last report, to be used."""
        batches, self._ahead = self._ahead, []
        return batches
