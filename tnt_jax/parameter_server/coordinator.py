"""The coordinator: gives work to workers, takes their gradients to servers, replaces lost workers.

Only references go through the coordinator: variables travel from servers to workers, and gradients
from workers to servers, through Ray's object store.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

from tnt_jax.keras_compat.callbacks import Callback
from tnt_jax.keras_compat.state.core import Core
from tnt_jax.log import logger
from tnt_jax.parameter_server.server import Snapshot
from tnt_jax.parameter_server.server_group import Actors, ServerGroup, Statistics
from tnt_jax.parameter_server.worker import Order, Share, WorkerModel
from tnt_jax.train.contracts import Batch

# Seconds after which a worker that does not answer is named.
_PATIENCE_S = 60.0
_TICK_S = 1.0
# A piece of work that so many workers died of is not given to another.
_MOST_LOSSES = 3


@dataclass(eq=False)
class Work:
    """A call of a worker's method before the variables; `what` names it in messages."""

    method: str
    arguments: tuple[Any, ...]
    what: str
    num_rows: int = 0
    losses: int = 0


Counts = Callable[[Batch], list[np.ndarray]]


@dataclass(eq=False)
class GlobalBatch:
    """A global batch with its number in the epoch, real rows, and `step` once it is begun."""

    batch: Batch
    index: int
    num_rows: int
    step: int = 0

    def work(self) -> Work:
        """Returns the work of one worker on all of the batch."""
        order = Order(self.step, None, True, self.num_rows)
        return Work("compute", (order, self.batch), self._what, self.num_rows)

    def shares(self, num_shares: int, ranks_per_share: int, counts: Counts) -> list[Work]:
        """Returns the work on each share of the batch, of equally many rows with padding."""
        if num_shares == 1:
            return [self.work()]
        divisors = tuple(counts(self.batch))
        size = len(jax.tree.leaves(self.batch.inputs)[0]) // num_shares
        works = []
        for number in range(num_shares):
            rows = slice(number * size, (number + 1) * size)
            part = jax.tree.map(lambda x, rows=rows: x[rows], self.batch)
            share = Share(np.int32(number * ranks_per_share), np.float32(1 / num_shares), divisors)
            real = size if part.mask is None else int(part.mask.sum())
            order = Order(self.step, share, True, self.num_rows)
            what = f"share {number + 1} of {num_shares} of {self._what}"
            works.append(Work("compute", (order, part), what, real))
        return works

    @property
    def _what(self) -> str:
        return f"batch {self.index + 1} of the epoch (step {self.step + 1})"


@dataclass(eq=False)
class Flight:
    """Work that a worker was given; `pushes` refer to what each server gets of it."""

    work: Work
    worker: int
    version: int
    answer: Any
    pushes: list[Any]
    started: float = field(default_factory=time.perf_counter)
    is_named: bool = False
    result: Any = None


@dataclass(eq=False)
class Coordinator:
    """Gives work to workers that are `free`, and the gradients of `flights` to the servers."""

    actors: Actors
    servers: ServerGroup
    statistics: Statistics
    worker_timeout_s: float | None
    free: set[int] = field(default_factory=set, init=False)
    flights: list[Flight] = field(default_factory=list, init=False)
    model: Any = field(default=None, init=False)
    # Workers that start in the place of lost ones.
    _starting: dict[Any, tuple[int, float]] = field(default_factory=dict, init=False)
    # What became of the last gradients of each worker, and how long it took last.
    _was_applied: dict[int, bool] = field(default_factory=dict, init=False)
    _seconds: dict[int, float] = field(default_factory=dict, init=False)

    def load(self, model: WorkerModel, snapshots: Sequence[Snapshot]) -> None:
        """Gives a model to the workers, and variables to the servers."""
        # Nobody waits for these any more, such as after an interrupt.
        while self.flights or self._starting:
            self.wait()
        self.model = self.actors.ray.put(model)
        workers = self.actors.workers
        self.actors.answers(len(self.actors.servers) + number for number in workers)
        asked = [worker.load.remote(self.model) for worker in workers.values()]
        self.servers.load(model.layout, snapshots)
        self.actors.get(asked)
        self.free = set(workers)
        self._was_applied = {}

    def dispatch(self, work: Work, worker: int) -> None:
        """Gives work to a free worker, with the variables of this version."""
        self.free.remove(worker)
        arguments = work.arguments
        if work.method == "compute":
            was_applied = self._was_applied.get(worker, True)
            arguments = (arguments[0]._replace(was_applied=was_applied), *arguments[1:])
            self._was_applied[worker] = False
        pushes = work.method in ("compute", "run")
        method = getattr(self.actors.workers[worker], work.method)
        num_returns = 1 + len(self.actors.servers) if pushes else 1
        refs = method.options(num_returns=num_returns).remote(*arguments, *self.servers.pull())
        refs = refs if pushes else [refs]
        self.flights.append(Flight(work, worker, self.servers.version, refs[0], list(refs[1:])))

    def wait(self) -> list[tuple[Flight, bool]]:
        """Waits; returns flights that ended, and whether they succeeded; replaces lost workers."""
        self.servers.check()
        refs = [*(flight.answer for flight in self.flights), *self._starting]
        if not refs:
            raise RuntimeError(
                "All workers of the parameter server were lost and none could be started again. "
                "See the warnings above."
            )
        ready, _ = self.actors.ray.wait(refs, num_returns=1, timeout=_TICK_S)
        for ref in ready:
            if ref in self._starting:
                self._adopt(ref)
        ended = [flight for flight in self.flights if flight.answer in ready]
        if not ready:
            self._look_for_absent_workers()
        return [(flight, self._finish(flight)) for flight in ended]

    def apply(self, flights: Sequence[Flight], *, num_rows: int) -> None:
        """Orders one update with the gradients of some flights; counts it if it was ordered."""
        version, statistics = self.servers.version, self.statistics
        is_latest = all(flight.version == version for flight in flights)
        try:
            self.servers.update([flight.pushes for flight in flights], is_latest=is_latest)
        finally:
            if self.servers.version > version:
                statistics.examples += num_rows
                for flight in flights:
                    self.will_apply(flight)
                    statistics.staleness[max(0, version - flight.version)] += 1
                    statistics.examples_by_worker[flight.worker] += flight.work.num_rows

    def will_apply(self, flight: Flight) -> None:
        """Notes that the gradients of a flight will be applied."""
        self._was_applied[flight.worker] = True

    def by_speed(self) -> list[int]:
        """Returns the free workers, those first that were fastest last."""
        return sorted(self.free, key=lambda worker: (self._seconds.get(worker, 0.0), worker))

    def expected_s(self, work: Work) -> float:
        """Returns how long the worker that has some work took last."""
        workers = (flight.worker for flight in self.flights if flight.work is work)
        return max((self._seconds.get(worker, 0.0) for worker in workers), default=0.0)

    def _finish(self, flight: Flight) -> bool:
        """Reads the answer of a flight that ended; returns whether there is one."""
        self.flights.remove(flight)
        errors = self.actors.ray.exceptions
        seconds = time.perf_counter() - flight.started
        try:
            flight.result = self.actors.ray.get(flight.answer)
        except errors.RayError as error:
            cause = getattr(error, "cause", error)
            # What a worker cannot read, no other one can.
            is_unreadable = cause is not error and isinstance(cause, errors.RaySystemError)
            if is_unreadable or not isinstance(cause, errors.RayError):
                self.free.add(flight.worker)
                raise RuntimeError(
                    f"Worker {flight.worker} failed at {flight.work.what}: {cause!r}"
                ) from error
            self._after_loss(flight)
            return False
        if flight.work.method == "run":
            flight.result, changes = flight.result
            flight.pushes = flight.pushes if changes else []
        worker, busy_s = flight.worker, self.statistics.busy_s
        self.free.add(worker)
        self._seconds[worker] = seconds
        busy_s[worker] = busy_s.get(worker, 0.0) + seconds
        return True

    def _after_loss(self, flight: Flight) -> None:
        """Replaces the worker of a flight, if it was lost; otherwise a server was."""
        self.statistics.repeated_batches += 1
        try:
            self.actors.ray.get(self.actors.workers[flight.worker].num_devices.remote())
        except self.actors.ray.exceptions.RayActorError:
            flight.work.losses += 1
        else:
            self.free.add(flight.worker)
            self.servers.suspect()
            return
        if flight.work.losses >= _MOST_LOSSES:
            raise RuntimeError(
                f"{flight.work.losses} workers were lost at {flight.work.what}; it is not given to "
                "another one. The data or the model may end the process, for instance by its "
                "memory: see Ray's logs."
            )
        worker = flight.worker
        logger.warning(
            "Worker %d of the parameter server was lost at %s. Another one takes its place, and "
            "the work is done again.",
            worker,
            flight.work.what,
        )
        self.statistics.lost_workers += 1
        self.free.discard(worker)
        actor = self.actors.start_worker(worker)
        self.actors.workers[worker] = actor
        self._starting[actor.load.remote(self.model)] = (worker, time.perf_counter())

    def _adopt(self, ref: Any) -> None:
        worker, _ = self._starting.pop(ref)
        try:
            self.actors.ray.get(ref)
        except self.actors.ray.exceptions.RayError as error:
            logger.warning("Worker %d cannot start again: %s", worker, error)
        else:
            self._was_applied.pop(worker, None)
            self.free.add(worker)

    def _look_for_absent_workers(self) -> None:
        """Gives up workers that do not start again, and names or replaces those that are silent."""
        for ref, (worker, started) in list(self._starting.items()):
            if time.perf_counter() - started > self.actors.timeout_s:
                del self._starting[ref]
                logger.warning(
                    "Worker %d has not started again within %.0f s: the Ray cluster has no place "
                    "for it. Training goes on without it.",
                    worker,
                    self.actors.timeout_s,
                )
        for flight in self.flights:
            waited_s = time.perf_counter() - flight.started
            if self.worker_timeout_s is not None and waited_s > self.worker_timeout_s:
                self.actors.kill(self.actors.workers[flight.worker])
            elif waited_s > _PATIENCE_S and not flight.is_named:
                flight.is_named = True
                logger.warning(
                    "Worker %d has not answered for %.0f s at %s. worker_timeout_s=... replaces "
                    "such workers.",
                    flight.worker,
                    waited_s,
                    flight.work.what,
                )


class SidecarEvaluation(Callback):
    """Evaluates the variables of the servers while they are trained.

    `ParameterServer.sidecar` makes it; pass it to `fit` among the callbacks. It begins an
    evaluation after every so many updates, once the one before has ended, and one at the end.

    Attributes:
        results: For each evaluation the `version` of the variables, `loss` and metrics.
    """

    def __init__(
        self, core: Core, coordinator: Coordinator, batches: Sequence[Batch], *, every: int
    ) -> None:
        super().__init__()
        self.results: list[dict[str, float]] = []
        self._core = core
        self._coordinator = coordinator
        self._batches = list(batches)
        self._every = every
        self._actor: Any = None
        self._asked: tuple[int, Any] | None = None
        self._last = 0

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Forgets the results of earlier training, which may have ended with an error."""
        self._end()
        self.results = []
        self._last = self._coordinator.servers.version

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Begins an evaluation if it is time, and none runs."""
        self._collect(waits=False)
        if self._asked is None and self._coordinator.servers.version - self._last >= self._every:
            self._begin()

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        """Evaluates the last variables, and ends the process."""
        self._collect(waits=True)
        if not self.results or self.results[-1]["version"] != self._coordinator.servers.version:
            self._begin()
            self._collect(waits=True)
        self._end()

    def _end(self) -> None:
        if self._actor is not None:
            self._coordinator.actors.kill(self._actor)
        self._actor = self._asked = None

    def _begin(self) -> None:
        actors = self._coordinator.actors
        if self._actor is None:
            self._actor = actors.start_beside()
            self._actor.load.remote(self._coordinator.model)
        self._last = self._coordinator.servers.version
        arguments = (actors.ray.put(self._batches), 0, *self._coordinator.servers.pull())
        self._asked = (self._last, self._actor.evaluate.remote(*arguments))

    def _collect(self, *, waits: bool) -> None:
        """Takes the result of the evaluation that runs, if it has ended or this waits for it."""
        if self._asked is None:
            return
        ray = self._coordinator.actors.ray
        version, ref = self._asked
        if not waits and not ray.wait([ref], timeout=0)[0]:
            return
        self._asked = None
        try:
            sums = ray.get(ref)
        except ray.exceptions.RayActorError as error:
            logger.warning("The evaluation of version %d was lost: %s", version, error)
            self._actor = None
            return
        found = {"version": version, **self._core.logs(sums)}
        self.results.append(found)
        logger.info("Evaluated beside training: %s.", found)
