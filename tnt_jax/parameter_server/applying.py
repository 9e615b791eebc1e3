"""How the gradients of workers become updates: each by itself, or those of a global batch together.

Asynchronous training gives every worker a batch of its own, and each gradient is an update. With a
bound on staleness, workers that are ahead wait for those that the bound is about to exceed. Custom
steps are called as in `tf.distribute.coordinator.ClusterCoordinator`.

Synchronous training makes one update of each global batch, computed in shares by the workers. With
backup workers there are fewer shares than workers: those that have nothing to do compute shares
again that others have not finished, and the first result of each share counts. So every row counts
once, whoever is slow. Chen et al. 2016, arXiv:1604.00981, leave out the rows of the slow workers.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from tnt_jax.parameter_server.coordinator import Coordinator, Counts, Flight, GlobalBatch, Work
from tnt_jax.parameter_server.server_group import ServerFailure, StalenessBound, despite_failures
from tnt_jax.parameter_server.worker import Report

Begin = Callable[[GlobalBatch], None]
End = Callable[[GlobalBatch, list[Report]], bool]


@dataclass(eq=False)
class Asynchronous:
    """Applies gradients as they come, within a bound of staleness."""

    coordinator: Coordinator
    bound: StalenessBound
    _redo: deque[Work] = field(default_factory=deque, init=False)
    # Gradients that have come and wait for staler ones.
    _ready: list[Flight] = field(default_factory=list, init=False)
    _mine: set[Work] = field(default_factory=set, init=False)

    def train(self, batches: Iterator[GlobalBatch], begin: Begin, end: End) -> None:
        """Trains on all batches; `begin` comes before each, and `end` says if no other is begun."""
        self.forget()
        known: dict[Work, GlobalBatch] = {}
        is_over = False
        while True:
            while not is_over and self.may_start():
                if (batch := next(batches, None)) is None:
                    is_over = True
                    break
                begin(batch)
                work = batch.work()
                known[work] = batch
                self.start(work)
            if is_over and not self._redo and not self.under_way():
                return
            for work, report in self.advance():
                is_over |= end(known.pop(work), [report])

    def in_order(self, works: Iterable[Work], *, ahead: int) -> Iterator[Any]:
        """Does work that changes nothing, at most `ahead` pieces; yields results in order."""
        self.forget()
        source = iter(works)
        waiting: deque[Work] = deque()
        done: dict[Work, Any] = {}
        is_over = False
        while waiting or not is_over:
            while not is_over and len(waiting) < ahead and self.may_start():
                if (work := next(source, None)) is None:
                    is_over = True
                    break
                waiting.append(work)
                self.start(work)
            while waiting and waiting[0] in done:
                yield done.pop(waiting.popleft())
            if waiting or not self.coordinator.free:
                done.update(self.advance())

    def settle(self) -> None:
        """Waits until the servers have made all updates."""
        servers = self.coordinator.servers
        despite_failures(servers.keep_snapshot, servers.go_on)

    def under_way(self) -> list[Flight]:
        """Returns the work that was begun and has not ended."""
        return [f for f in self.coordinator.flights if f.work in self._mine] + self._ready

    def may_start(self) -> bool:
        """Returns whether a worker is free and a gradient may begin."""
        return not self._redo and self._may_dispatch()

    def start(self, work: Work) -> None:
        """Gives work to the free worker that was fastest last."""
        self._mine.add(work)
        self.coordinator.dispatch(work, self.coordinator.by_speed()[0])

    def advance(self) -> list[tuple[Work, Any]]:
        """Waits until something happens; returns work whose updates were ordered, with results."""
        for flight, succeeded in despite_failures(
            self.coordinator.wait, self.coordinator.servers.go_on
        ):
            if flight.work not in self._mine:
                continue
            if succeeded:
                self.coordinator.will_apply(flight)
                self._ready.append(flight)
            else:
                self._redo.append(flight.work)
        while self._redo and self._may_dispatch():
            self.start(self._redo.popleft())
        done = []
        # The oldest first, which is always allowed.
        for flight in sorted(self._ready, key=lambda flight: flight.version):
            others = [other.version for other in self.under_way() if other is not flight]
            version = self.coordinator.servers.version
            if flight.pushes and not self.bound.may_apply(version, others):
                break
            self._ready.remove(flight)
            self._mine.remove(flight.work)
            self._apply(flight)
            done.append((flight.work, flight.result))
        return done

    def _may_dispatch(self) -> bool:
        versions = [flight.version for flight in self.under_way()]
        may_start = self.bound.may_start(self.coordinator.servers.version, versions)
        return bool(self.coordinator.free) and may_start

    def _apply(self, flight: Flight) -> None:
        if not flight.pushes:
            return
        before = self.coordinator.servers.version
        # An update that was ordered is not ordered again: what a lost server misses is lost.
        while self.coordinator.servers.version == before:
            try:
                self.coordinator.apply([flight], num_rows=flight.work.num_rows)
            except ServerFailure:
                self.coordinator.servers.go_on()

    def forget(self) -> None:
        """Forgets work that was begun, such as that of a call that was interrupted."""
        self._redo.clear()
        self._ready.clear()
        self._mine.clear()


@dataclass(eq=False)
class Synchronous:
    """Trains with one update for each global batch; free workers may repeat open shares."""

    coordinator: Coordinator
    num_shares: int
    counts: Counts
    # Batches since the last snapshot, for when a server is lost.
    since: list[GlobalBatch] = field(default_factory=list, init=False)

    def train(self, batches: Iterator[GlobalBatch], begin: Begin, end: End) -> None:
        """Trains on all batches; `begin` comes before each, and `end` says if training ends."""
        for batch in batches:
            begin(batch)
            reports = despite_failures(partial(self._update, batch), self._make_again)
            self.since.append(batch)
            self._forget_kept()
            if end(batch, reports):
                break

    def under_way(self) -> list[Flight]:
        """Returns nothing: a batch is begun when the one before is done."""
        return []

    def settle(self) -> None:
        """Waits until the servers have made all updates; makes those again that were lost."""
        despite_failures(self.coordinator.servers.keep_snapshot, self._make_again)
        self.since.clear()

    def _make_again(self) -> None:
        servers = self.coordinator.servers
        servers.roll_back()
        despite_failures(self._redo, servers.roll_back)

    def _redo(self) -> None:
        self._forget_kept()
        for batch in self.since:
            self._update(batch, counts=False)

    def _forget_kept(self) -> None:
        kept = self.coordinator.servers.kept_version
        self.since = [batch for batch in self.since if batch.step >= kept]

    def _update(self, batch: GlobalBatch, *, counts: bool = True) -> list[Report]:
        """Has all shares of a batch computed and applied; returns their reports in order."""
        ranks_per_share = self.coordinator.actors.devices_per_worker
        works = batch.shares(self.num_shares, ranks_per_share, self.counts)
        found: dict[Work, Flight] = {}
        todo = deque(works)
        while len(found) < len(works):
            self._assign(todo, works, found)
            for flight, succeeded in self.coordinator.wait():
                work = flight.work
                is_open = work in works and work not in found
                if not succeeded:
                    if is_open and work not in todo:
                        todo.append(work)
                elif is_open:
                    found[work] = flight
                else:
                    self.coordinator.statistics.dropped += 1
        flights = [found[work] for work in works]
        self.coordinator.apply(flights, num_rows=batch.num_rows if counts else 0)
        return [flight.result for flight in flights]

    def _assign(self, todo: deque[Work], works: list[Work], found: dict[Work, Flight]) -> None:
        """Gives shares to free workers, those that were fast last first."""
        coordinator = self.coordinator
        for worker in coordinator.by_speed():
            if todo:
                coordinator.dispatch(todo.popleft(), worker)
                continue
            if len(coordinator.actors.workers) == self.num_shares:  # No backup workers.
                return
            runs = [flight.work for flight in coordinator.flights]
            open_works = [w for w in works if w not in found and runs.count(w) == 1]
            if not open_works:
                return
            # That of the worker that is expected to finish last.
            coordinator.dispatch(max(open_works, key=coordinator.expected_s), worker)


class RemoteValue:
    """The value of a scheduled step, which may still run."""

    def __init__(self, scheduler: "Scheduler") -> None:
        self._scheduler = scheduler
        self.future: Future[Any] = Future()

    def fetch(self) -> Any:
        """Waits for the step and returns its value, as NumPy arrays.

        Raises:
            RuntimeError: If this step, or another one before it was done, failed.
        """
        while not self.future.done():
            self._scheduler.advance()
        if (error := self.future.exception()) is not None:
            raise RuntimeError("A scheduled step failed, so this one was ended.") from error
        return self.future.result()


@dataclass(eq=False)
class Scheduler:
    """Gives steps of the user's to free workers, and the state back after the last one."""

    asynchronous: Asynchronous
    note_update: Callable[[], None]
    give_back: Callable[[], None]
    _steps: dict[Callable, tuple[int, Any]] = field(default_factory=dict, init=False)
    _queue: deque[Work] = field(default_factory=deque, init=False)
    _values: dict[Work, RemoteValue] = field(default_factory=dict, init=False)

    @property
    def is_busy(self) -> bool:
        """Whether steps were scheduled that have not ended."""
        return bool(self._values)

    def schedule(self, step: Callable, arguments: tuple[Any, ...]) -> RemoteValue:
        """Schedules a step; it starts at a call of the scheduler when a worker is free."""
        if step not in self._steps:
            put = self.asynchronous.coordinator.actors.ray.put
            self._steps[step] = (len(self._steps), put(step))
        name = getattr(step, "__name__", "step")
        work = Work("run", (*self._steps[step], arguments), f"the scheduled {name}")
        value = self._values[work] = RemoteValue(self)
        self._queue.append(work)
        self._start()
        return value

    def join(self) -> None:
        """Waits for all scheduled steps, and for the updates that they make."""
        while self._values:
            self.advance()

    def advance(self) -> None:
        """Starts what can be started, and waits; an error of one step ends all."""
        self._start()
        try:
            ended = self.asynchronous.advance()
        except BaseException as error:
            for value in self._values.values():
                value.future.set_exception(error)
            self._values.clear()
            self._queue.clear()
            self.asynchronous.forget()
            raise
        else:
            for work, value in ended:
                self._values.pop(work).future.set_result(value)
                self.note_update()
            self._start()
        finally:
            if not self._values:
                self.asynchronous.settle()
                self.give_back()

    def _start(self) -> None:
        while self._queue and self.asynchronous.may_start():
            self.asynchronous.start(self._queue.popleft())
