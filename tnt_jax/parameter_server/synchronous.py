"""Synchronous training: each global batch is one update, computed in shares by the workers.

With backup workers there are fewer shares than workers: those that have nothing to do compute
shares again that others have not finished, and the first result of each share counts. So every row
counts once, whoever is slow. Chen et al. 2016, arXiv:1604.00981, leave out the rows of the slow
workers instead.
"""

from collections import deque
from collections.abc import Callable, Iterator

from tnt_jax.parameter_server.coordinator import Coordinator, Flight, Work
from tnt_jax.parameter_server.server_group import ServerFailure
from tnt_jax.parameter_server.trainer import Counts, GlobalBatch
from tnt_jax.parameter_server.worker import Report


class Synchronous:
    """Trains with one update for each global batch.

    Args:
        coordinator: What gives work to workers.
        num_shares: Shares of a batch.
        ranks_per_share: Devices of a worker.
        backs_up: Whether free workers compute shares that others have not finished.
        counts: Returns the divisors of the loss of a batch.
    """

    def __init__(
        self,
        coordinator: Coordinator,
        *,
        num_shares: int,
        ranks_per_share: int,
        backs_up: bool,
        counts: Counts,
    ) -> None:
        self._coordinator = coordinator
        self._num_shares = num_shares
        self._ranks_per_share = ranks_per_share
        self._backs_up = backs_up
        self._counts = counts
        # Batches since the last snapshot, for when a server is lost.
        self._since: deque[GlobalBatch] = deque()

    def train(
        self,
        batches: Iterator[GlobalBatch],
        begin: Callable[[GlobalBatch], None],
        end: Callable[[GlobalBatch, list[Report]], bool],
    ) -> None:
        """Trains on all batches, until the servers have made the last update.

        Args:
            batches: Global batches, in order.
            begin: Called before a batch.
            end: Called after its update was ordered; returns whether training ends.
        """
        for batch in batches:
            begin(batch)
            reports = self._step(batch)
            if end(batch, reports):
                break

    def under_way(self) -> list[Flight]:
        """Returns nothing: a batch is begun when the one before is done."""
        return []

    def settle(self) -> None:
        """Waits until the servers have made all updates; makes those again that were lost."""
        while True:
            try:
                self._coordinator.servers.keep_snapshot()
                break
            except ServerFailure:
                self._make_again()
        self._since.clear()

    def _step(self, batch: GlobalBatch) -> list[Report]:
        """Makes the update of a batch, also if a server is lost meanwhile."""
        while True:
            try:
                reports = self._update(batch)
                break
            except ServerFailure:
                self._make_again()
        self._since.append(batch)
        self._after_snapshot()
        return reports

    def _make_again(self) -> None:
        """Goes back to the last snapshot and makes the updates since once more."""
        while True:
            self._coordinator.servers.roll_back()
            try:
                for batch in self._after_snapshot():
                    self._update(batch, counts=False)
                return
            except ServerFailure:
                continue

    def _after_snapshot(self) -> list[GlobalBatch]:
        """Returns the batches whose updates the last snapshot lacks."""
        kept = self._coordinator.servers.kept_version
        self._since = deque(batch for batch in self._since if batch.step >= kept)
        return list(self._since)

    def _update(self, batch: GlobalBatch, *, counts: bool = True) -> list[Report]:
        """Has all shares of a batch computed and applied; returns their reports in order."""
        works = batch.shares(self._num_shares, self._ranks_per_share, self._counts)
        place = {work: number for number, work in enumerate(works)}
        found: dict[Work, Flight] = {}
        todo = deque(works)
        while len(found) < len(works):
            self._assign(todo, works, found)
            for flight, succeeded in self._coordinator.wait():
                work = flight.work
                if not succeeded:
                    if work in place and work not in found and work not in todo:
                        todo.append(work)
                elif work in place and work not in found:
                    found[work] = flight
                else:
                    self._coordinator.statistics.dropped += 1
        flights = [found[work] for work in works]
        self._coordinator.apply(flights, num_rows=batch.num_rows if counts else 0)
        return [flight.result for flight in flights]

    def _assign(self, todo: deque[Work], works: list[Work], found: dict[Work, Flight]) -> None:
        """Gives shares to free workers, those that were fast last first."""
        coordinator = self._coordinator
        for worker in coordinator.by_speed():
            if todo:
                coordinator.dispatch(todo.popleft(), worker)
                continue
            if not self._backs_up:
                return
            runs = [flight.work for flight in coordinator.flights]
            open_works = [w for w in works if w not in found and runs.count(w) == 1]
            if not open_works:
                return
            # That of the worker that is expected to finish last.
            expected = coordinator.expected_s
            slowest = max(open_works, key=lambda work: expected(work))
            coordinator.dispatch(slowest, worker)
