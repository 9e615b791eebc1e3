"""Data that each process brings itself (`tnt_distribute_dataset=False`).

Each process passes its own shard, batched for its own ranks. Shards may differ in length, and no
process needs to know its length: processes report a few batches ahead how many rows they have. The
epoch ends with the longest shard; a process without rows feeds masked ones, so that every row
counts once and no process waits in vain.
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice, zip_longest
from typing import Any

import jax
import numpy as np

from tnt_jax.data import agreement
from tnt_jax.data.agreement import CoordinationBoard, Exchange, ReadAhead, Report
from tnt_jax.data.elements import as_batch
from tnt_jax.data.layout import RankSlice
from tnt_jax.data.permutation import RowOrder
from tnt_jax.data.sources import HostBatch, batch_length, form_of, length_of, passes_of

# Batches per report; as many are held in memory. More batches mean fewer messages, each of which
# takes well under a millisecond.
_BATCHES_PER_REPORT = 4


class ShardSource:
    """Batches of this process's own data, in step with the other processes.

    All processes must iterate their sources equally often and, before that, `compare` them. Batches
    have at most `micro_batch_size` times the local ranks rows each; by default what the largest
    first batch of all processes needs. An iterator is read on from epoch to epoch.
    """

    in_memory = False
    is_in_lockstep = True

    def __init__(
        self,
        batches: Iterable[Any],
        *,
        rank_slice: RankSlice,
        micro_batch_size: int | None = None,
        board: CoordinationBoard | None = None,
    ) -> None:
        self._rank_slice, self._micro = rank_slice, micro_batch_size
        self._board = CoordinationBoard() if board is None else board
        self._name = "shards"
        self._pass_of = passes_of(batches)
        self.row_order = RowOrder(
            parts={"number of shards": self._board.num_processes},
            can_go_back=not isinstance(batches, Iterator),
        )
        self._num_passes = 0
        self._template: Any = None
        self._first_forms: list[str] = []
        self.global_batch_size = micro_batch_size and micro_batch_size * rank_slice.num_ranks
        self.num_examples: int | None = None
        self.note = length_of(batches)
        self.num_batches: int | None = None

    def compare(self, notes: Sequence[int | None]) -> None:
        """Takes the lengths of all shards, and names the reports of this source and its peers."""
        self._name = agreement.unique_name("shards")
        lengths = [length for length in notes if length is not None]
        self.num_batches = max(lengths) if len(lengths) == len(notes) else None

    def batches(self, epoch: int, start_batch: int = 0) -> Iterator[HostBatch]:
        """Yields this process's rows, one batch a step, until the data of all has ended."""
        exchange = Exchange(self._board, f"{self._name}/{self._num_passes}")
        self._num_passes += 1
        reader = ReadAhead(
            map(as_batch, self._pass_of(epoch)),
            lambda batch: (batch_length(batch), form_of(batch)),
            self._rank_slice.local_ranks,
        )
        yield from islice(self._steps(reader, exchange), start_batch, None)

    def _steps(self, reader: ReadAhead, exchange: Exchange) -> Iterator[HostBatch]:
        most = _BATCHES_PER_REPORT
        reader.read(most, at_most=most)
        exchange.post(reader.report())
        while True:
            own = reader.take()
            if reader.error is not None:
                # The steps of earlier reports, which all processes take together, have run.
                raise reader.error
            reports = exchange.read()
            self._check(reports)
            num_steps = max(len(report.num_rows) for report in reports)
            for step in range(num_steps):
                # The next report is on its way before this step's batch is handed over.
                reader.read(1, at_most=most)
                if step == num_steps - 1 and not all(report.has_ended for report in reports):
                    reader.read(most, at_most=most)
                    exchange.post(reader.report())
                yield self._host_batch(own[step] if step < len(own) else None, reports, step)
            if all(report.has_ended for report in reports):
                return

    def _check(self, reports: list[Report]) -> None:
        """Sets the rows per rank from the first reports, and refuses on all what does not fit."""
        empty = [process for process, report in enumerate(reports) if not report.num_rows]
        if empty and self._template is None:
            raise ValueError(
                f"The dataset of process {empty[0]} is empty. Give every process at least one "
                "batch, or let tnt_jax split the dataset (tnt_distribute_dataset=True)."
            )
        if self._micro is None:
            self._micro = max(-(-report.num_rows[0] // report.local_ranks) for report in reports)
            self.global_batch_size = self._micro * self._rank_slice.num_ranks
        self._check_forms(reports)
        for process, report in enumerate(reports):
            full = self._micro * report.local_ranks
            if any(rows > full for rows in report.num_rows):
                raise ValueError(
                    f"A batch of process {process} has {max(report.num_rows)} rows, but with "
                    f"{self._micro} rows a rank its {report.local_ranks} rank(s) take {full}. "
                    "Batch each shard with that size, or pass tnt_micro_batch_size."
                )

    def _check_forms(self, reports: list[Report]) -> None:
        """Refuses batches with different structures in one step; ended shards have their first."""
        self._first_forms = self._first_forms or [report.batches[0] for report in reports]
        for found in zip_longest(*(report.batches for report in reports)):
            forms = [form or first for form, first in zip(found, self._first_forms, strict=True)]
            other = next((process for process, form in enumerate(forms) if form != forms[0]), None)
            if other is not None:
                raise ValueError(
                    "The batches of a step must have the same structure, row shapes and dtypes in "
                    f"all shards, but there are {forms[0]} on process 0 and {forms[other]} on "
                    f"process {other}. Pad or crop rows to one shape."
                )

    def _host_batch(self, batch: Any, reports: list[Report], step: int) -> HostBatch:
        assert self._micro is not None
        full = self._micro * self._rank_slice.local_ranks
        full_of = [self._micro * report.local_ranks for report in reports]
        rows_of = [
            report.num_rows[step] if step < len(report.num_rows) else 0 for report in reports
        ]
        if batch is not None and self._template is None:
            self._template = jax.tree.map(lambda x: x[:1], batch)
        num_rows = 0 if batch is None else batch_length(batch)
        data = self._template if batch is None else batch
        if num_rows != full:
            indices = np.minimum(np.arange(full), max(num_rows - 1, 0))
            data = jax.tree.map(lambda x: x[indices], data)
        mask = None if rows_of == full_of else (np.arange(full) < num_rows).astype(np.float32)
        firsts = np.cumsum([0, *full_of]).tolist()
        real = tuple(slice(first, first + n) for first, n in zip(firsts, rows_of, strict=False))
        return HostBatch(data, mask, sum(rows_of), real)
