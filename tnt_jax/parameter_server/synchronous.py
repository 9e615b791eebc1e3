"""Synchronous training: each global batch is one update, computed in shares by the workers.

With backup workers there are fewer shares than workers: those that have nothing to do compute
shares again that others have not finished, and the first result of each share counts. So every row
counts once, whoever is slow. Chen et al. 2016, arXiv:1604.00981, leave out the rows of the slow
workers instead.
"""

from collections import deque
from collections.abc import Callable, Iterator
from functools import partial

from tnt_jax.parameter_server.coordinator import Coordinator, Counts, Flight, GlobalBatch, Work
from tnt_jax.parameter_server.server_group import despite_failures
from tnt_jax.parameter_server.worker import Report


class Synchronous:
    """Trains with one update for each global batch; free workers may repeat open shares."""

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
        self._since: list[GlobalBatch] = []

    def train(
        self,
        batches: Iterator[GlobalBatch],
        begin: Callable[[GlobalBatch], None],
        end: Callable[[GlobalBatch, list[Report]], bool],
    ) -> None:
        """Trains on all batches; `begin` comes before each, and `end` says if training ends."""
        for batch in batches:
            begin(batch)
            reports = despite_failures(partial(self._update, batch), self._make_again)
            self._since.append(batch)
            self._forget_kept()
            if end(batch, reports):
                break

    def under_way(self) -> list[Flight]:
        """Returns nothing: a batch is begun when the one before is done."""
        return []

    def settle(self) -> None:
        """Waits until the servers have made all updates; makes those again that were lost."""
        despite_failures(self._coordinator.servers.keep_snapshot, self._make_again)
        self._since.clear()

    def _make_again(self) -> None:
        servers = self._coordinator.servers
        servers.roll_back()
        despite_failures(self._redo, servers.roll_back)

    def _redo(self) -> None:
        self._forget_kept()
        for batch in self._since:
            self._update(batch, counts=False)

    def _forget_kept(self) -> None:
        kept = self._coordinator.servers.kept_version
        self._since = [batch for batch in self._since if batch.step >= kept]

    def _update(self, batch: GlobalBatch, *, counts: bool = True) -> list[Report]:
        """Has all shares of a batch computed and applied; returns their reports in order."""
        works = batch.shares(self._num_shares, self._ranks_per_share, self._counts)
        found: dict[Work, Flight] = {}
        todo = deque(works)
        while len(found) < len(works):
            self._assign(todo, works, found)
            for flight, succeeded in self._coordinator.wait():
                work = flight.work
                is_open = work in works and work not in found
                if not succeeded:
                    if is_open and work not in todo:
                        todo.append(work)
                elif is_open:
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
            coordinator.dispatch(max(open_works, key=coordinator.expected_s), worker)
