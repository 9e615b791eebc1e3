"""The servers as one: variables in one order of versions, snapshots, and lost servers.

Calls of an actor run in the order in which they were made, so the order of the calls here is that
of the versions on every server. The staleness of a gradient is the number of updates between the
variables that it was computed with and the variables that it changes.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakSet

from tnt_jax.job import Slot
from tnt_jax.log import logger
from tnt_jax.on_ray.worker import import_ray
from tnt_jax.parameter_server.server import Layout, Server, Snapshot, WrongVersion, make_totals
from tnt_jax.parameter_server.worker import Worker


@dataclass(frozen=True)
class StalenessBound:
    """Decides which gradients may start and be applied: within a bound, or any if it is None.

    Gradients under way can all be applied within the bound if it holds when they are applied in the
    order in which they began (the earliest deadline first). Every start and every update keeps this
    true, so that nobody waits for ever.
    """

    bound: int | None

    def may_start(self, version: int, under_way: Sequence[int]) -> bool:
        """Returns whether a gradient may begin at `version`, given those of others under way."""
        return self._can_finish(version, [*under_way, version])

    def may_apply(self, version: int, others: Sequence[int]) -> bool:
        """Returns whether an update may be made, given the versions of others under way."""
        return self._can_finish(version + 1, others)

    def _can_finish(self, version: int, begun: Sequence[int]) -> bool:
        if self.bound is None:
            return True
        return all(
            version + place - start <= self.bound for place, start in enumerate(sorted(begun))
        )


@dataclass
class Statistics:
    """Counts since a parameter server was started.

    Attributes:
        updates: Updates of the variables: the version of the latest gradient.
        examples: Examples whose gradients were applied.
        staleness: How many gradients had which staleness.
        examples_by_worker: Examples whose gradients were applied, by worker.
        busy_s: Seconds in which each worker was given work.
        training_s: Seconds in which training ran.
        dropped: Results of backup workers, or of workers that they were faster than.
        repeated_batches: Batches, or shares of them, done again because a worker was lost.
        lost_workers: Workers that died or did not answer, and were replaced.
        lost_servers: Servers that died and came back from their checkpoint.
        lost_updates: Updates of a server's variables that were lost with it.
        redone_updates: Updates that were made again after a server was lost.
    """

    updates: int = 0
    examples: int = 0
    staleness: Counter[int] = field(default_factory=Counter)
    examples_by_worker: Counter[int] = field(default_factory=Counter)
    busy_s: dict[int, float] = field(default_factory=dict)
    training_s: float = 0.0
    dropped: int = 0
    repeated_batches: int = 0
    lost_workers: int = 0
    lost_servers: int = 0
    lost_updates: int = 0
    redone_updates: int = 0

    @property
    def mean_staleness(self) -> float:
        """Mean staleness of the gradients that were applied; 0 before the first."""
        total = sum(self.staleness.values())
        return sum(size * count for size, count in self.staleness.items()) / total if total else 0.0

    @property
    def examples_per_s(self) -> float:
        """Examples per second of training."""
        return self.examples / self.training_s if self.training_s else 0.0

    @property
    def updates_per_s(self) -> float:
        """Updates per second of training."""
        return self.updates / self.training_s if self.training_s else 0.0

    def summary(self) -> str:
        """Returns the numbers in one line, for a log."""
        histogram = ", ".join(f"{size}: {self.staleness[size]}" for size in sorted(self.staleness))
        rates = ", ".join(
            f"{worker}: {self.examples_by_worker[worker] / self.busy_s[worker]:.0f}"
            for worker in sorted(self.busy_s)
            if self.busy_s[worker]
        )
        return (
            f"version {self.updates}, {self.examples_per_s:.0f} examples/s, "
            f"{self.updates_per_s:.1f} updates/s; gradients by staleness {{{histogram}}}; "
            f"examples/s of workers while busy {{{rates}}}; {self.dropped} dropped, "
            f"{self.repeated_batches} done again, {self.lost_updates} updates lost"
        )


# Ray places a group within milliseconds if there is room.
_PLACEMENT_S = 2
# All that are not closed, the last of which shuts Ray down if the first has started it.
_open = Slot[WeakSet["Actors"]](WeakSet)


class Actors:
    """Servers and workers as actors, in one placement group that spreads them over the nodes."""

    def __init__(
        self,
        *,
        num_servers: int,
        num_workers: int,
        resources_per_server: Mapping[str, float],
        resources_per_worker: Mapping[str, float],
        worker_env: Mapping[str, str],
        start_timeout_s: float,
    ) -> None:
        self.ray = import_ray("tnt_jax.ParameterServer")
        self._started_ray = not self.ray.is_initialized()
        if self._started_ray:
            self.ray.init(log_to_driver=False)
        _open.get().add(self)
        self._resources = [dict(resources_per_server)] * num_servers
        self._resources += [dict(resources_per_worker)] * num_workers
        self._num_servers = num_servers
        self.timeout_s = start_timeout_s
        self._worker_env = dict(worker_env)
        if "GPU" not in resources_per_worker:
            self._worker_env.setdefault("JAX_PLATFORMS", "cpu")
        # Of the process in each place of the group, for messages.
        self._names = [f"Server {number}" for number in range(num_servers)]
        self._names += [f"Worker {number}" for number in range(num_workers)]
        self._group: Any = None
        self.servers: list[Any] = []
        self.workers: dict[int, Any] = {}
        self._beside: list[Any] = []
        try:
            self._take_places()
            self.servers = [self.start_server(number) for number in range(num_servers)]
            self.workers = {number: self.start_worker(number) for number in range(num_workers)}
            counts = set(self._await_processes())
            if len(counts) > 1:
                raise RuntimeError(
                    f"Workers must have the same number of devices, but have {sorted(counts)}. "
                    "Give each the same resources by resources_per_worker."
                )
        except BaseException:
            self.close()
            raise
        self.devices_per_worker = counts.pop()

    def start_server(self, number: int) -> Any:
        """Starts the actor of a server, in its place."""
        return self._remote(Server, {"JAX_PLATFORMS": "cpu"}, bundle=number).remote(number)

    def replace_server(self, number: int) -> None:
        """Starts another server in the place of a lost one, and waits for it."""
        self.kill(self.servers[number])
        self.servers[number] = self.start_server(number)
        try:
            self.ray.get(self.servers[number].version.remote(), timeout=self.timeout_s)
        except self.ray.exceptions.GetTimeoutError as error:
            raise RuntimeError(
                f"Server {number} of the parameter server was lost and has not started again "
                f"within {self.timeout_s:.0f} s: the Ray cluster has no place for it. Add a node, "
                "or go on from your last checkpoint."
            ) from error

    def start_worker(self, number: int) -> Any:
        """Starts the actor of a worker, in its place."""
        bundle = self._num_servers + number
        return self._remote(Worker, self._worker_env, bundle=bundle).remote()

    def start_beside(self) -> Any:
        """Starts a worker outside of the placement group, which evaluates beside training."""
        self._beside.append(self._remote(Worker, self._worker_env).remote())
        return self._beside[-1]

    def get(self, refs: list[Any]) -> list[Any]:
        """Returns answers without which nothing goes on."""
        try:
            return self.ray.get(refs)
        except self.ray.exceptions.RayError as error:
            cause = getattr(error, "cause", None) or error
            raise RuntimeError(
                f"A server or worker of the parameter server failed: {cause!r}"
            ) from error

    def kill(self, actor: Any) -> None:
        """Ends an actor, if it is alive."""
        self.ray.kill(actor, no_restart=True)

    def close(self) -> None:
        """Ends all actors and gives their places back."""
        _open.get().discard(self)
        if not self.ray.is_initialized():
            return
        for actor in (*self.servers, *self.workers.values(), *self._beside):
            self.kill(actor)
        self.servers, self.workers, self._beside = [], {}, []
        if self._group is not None:
            self.ray.util.remove_placement_group(self._group)
            self._group = None
        if self._started_ray and (others := [*_open.get()]):
            others[0]._started_ray = True
        elif self._started_ray:
            self.ray.shutdown()
        self._started_ray = False

    def _take_places(self) -> None:
        """Makes a placement group with a bundle for each process; waits until there is room."""
        self._group = self.ray.util.placement_group(self._resources, strategy="SPREAD")
        if self._group.wait(timeout_seconds=_PLACEMENT_S):
            return
        logger.warning(
            "Waiting up to %.0f s for room on the Ray cluster: %s.", self.timeout_s, self._lack()
        )
        if not self._group.wait(max(math.ceil(self.timeout_s) - _PLACEMENT_S, 0)):
            raise RuntimeError(
                f"The Ray cluster has had no room within {self.timeout_s:.0f} s: {self._lack()}. "
                "Start fewer, give each less (resources_per_worker, resources_per_server), or add "
                "nodes."
            )

    def _lack(self) -> str:
        """Returns what all processes need, and what of it is free and exists in the cluster."""
        wanted = {
            name: sum(each.get(name, 0) for each in self._resources)
            for name in sorted(set().union(*self._resources))
        }
        free, total = self.ray.available_resources(), self.ray.cluster_resources()
        return (
            f"{self._num_servers} server(s) and {len(self._resources) - self._num_servers} "
            f"worker(s) need {_listed(wanted)}; of "
            f"{_listed({name: total.get(name, 0) for name in wanted})} in the cluster "
            f"{_listed({name: free.get(name, 0) for name in wanted})} are free"
        )

    def _remote(self, kind: type, env: Mapping[str, str], *, bundle: int | None = None) -> Any:
        """Returns a kind of actor that runs in a place of the group, or beside it like a worker."""
        resources = self._resources[-1 if bundle is None else bundle]
        options: dict[str, Any] = {**_options(resources), "max_restarts": 0}
        if bundle is not None:
            strategy = self.ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy
            place = strategy(self._group, placement_group_bundle_index=bundle)
            options["scheduling_strategy"] = place
        if env:
            options["runtime_env"] = {"env_vars": dict(env)}
        return self.ray.remote(**options)(kind)

    def _await_processes(self) -> list[int]:
        """Waits for all processes; returns the number of devices of each worker."""
        answers = self.answers(range(len(self._resources)))
        devices = [answers[number] for number in range(self._num_servers, len(self._resources))]
        logger.info(
            "%d servers and %d workers with %d device(s) each.",
            self._num_servers,
            len(devices),
            devices[-1],
        )
        return devices

    def answers(self, bundles: Iterable[int], *, last_time: bool = False) -> dict[int, Any]:
        """Returns an answer of the process in each place; starts those once more that are lost."""
        asked = {
            number: self.servers[number].version.remote()
            if number < self._num_servers
            else self.workers[number - self._num_servers].num_devices.remote()
            for number in bundles
        }
        refs = list(asked.values())
        _, late = self.ray.wait(refs, num_returns=len(refs), timeout=self.timeout_s)
        if late:
            raise RuntimeError(
                f"{len(late)} of {len(refs)} servers and workers have not started within "
                f"{self.timeout_s:.0f} s. See Ray's logs, or pass a longer start_timeout_s."
            )
        answers, lost = {}, []
        for number, ref in asked.items():
            try:
                answers[number] = self.ray.get(ref)
            except self.ray.exceptions.RayError as error:
                died = isinstance(error, self.ray.exceptions.ActorDiedError)
                if not died or error.actor_init_failed or last_time:
                    raise RuntimeError(
                        f"{self._names[number]} of the parameter server cannot start on its node: "
                        f"{error}. tnt_jax and what it needs must be installed there, in the same "
                        "versions as here."
                    ) from error
                lost.append(number)
        for number in lost:
            logger.warning(
                "%s was lost while it had no work, and is started once more.", self._names[number]
            )
            if number < self._num_servers:
                self.servers[number] = self.start_server(number)
            else:
                worker = number - self._num_servers
                self.workers[worker] = self.start_worker(worker)
        return answers | self.answers(lost, last_time=True) if lost else answers


def _options(resources: Mapping[str, float]) -> dict[str, Any]:
    named = {"CPU": "num_cpus", "GPU": "num_gpus", "memory": "memory"}
    options = {named[name]: amount for name, amount in resources.items() if name in named}
    others = {name: amount for name, amount in resources.items() if name not in named}
    return {"num_cpus": 0, **options, **({"resources": others} if others else {})}


def _listed(resources: Mapping[str, float]) -> str:
    return ", ".join(f"{amount:g} {name}" for name, amount in resources.items()) or "nothing"


class ServerFailure(Exception):
    """Updates of a server were lost."""


def despite_failures(attempt: Callable[[], Any], repair: Callable[[], None]) -> Any:
    """Returns what `attempt` does, which is repeated after a `repair` if updates were lost."""
    while True:
        try:
            return attempt()
        except ServerFailure:
            repair()


class ServerGroup:
    """Holds the variables of a model on all servers; `version` counts their updates."""

    def __init__(self, actors: Actors, statistics: Statistics, *, checkpoint_every: int) -> None:
        self.version = 0
        self._actors = actors
        self._ray = actors.ray
        self._statistics = statistics
        self._checkpoint_every = checkpoint_every
        self._layout: Layout | None = None
        self._snapshots: list[Snapshot] = []
        self._updates: list[Any] = []
        self._pulled: tuple[int, list[Any]] | None = None
        self._is_suspect = False

    @property
    def kept_version(self) -> int:
        """The version of the last snapshot."""
        return self._snapshots[0].version

    def load(self, layout: Layout, snapshots: Sequence[Snapshot]) -> None:
        """Gives a layout and variables to the servers, in place of those that they hold."""
        self._layout, self._snapshots = layout, list(snapshots)
        self.version = snapshots[0].version
        self._updates, self._pulled = [], None
        self._actors.answers(range(len(snapshots)))
        shared = self._ray.put(layout)
        asked = [
            server.load.remote(shared, snapshot)
            for server, snapshot in zip(self._actors.servers, snapshots, strict=True)
        ]
        self._actors.get(asked)

    def pull(self) -> list[Any]:
        """Returns references to the variables of this version, one for each server."""
        if self._pulled is None or self._pulled[0] != self.version:
            pulled = [server.pull.remote() for server in self._actors.servers]
            self._pulled = (self.version, pulled)
        return self._pulled[1]

    def update(self, shares: Sequence[Sequence[Any]], *, is_latest: bool) -> None:
        """Orders one update; a ServerFailure without a new version says that it was not."""
        assert self._layout is not None
        pushes = list(zip(self._actors.servers, zip(*shares, strict=True), strict=True))

        def ask(totals: list[Any]) -> list[Any]:
            return self._get([server.partials.remote(totals, *sent) for server, sent in pushes])

        totals = make_totals(self._layout.optimizer, ask)
        self._updates += [
            server.update.remote(self.version, totals, is_latest, *sent) for server, sent in pushes
        ]
        self.version += 1
        self._statistics.updates += 1
        if self.version - self.kept_version >= self._checkpoint_every:
            self.keep_snapshot()

    def suspect(self) -> None:
        """Has the next `check` ask all servers whether they are there."""
        self._is_suspect, self._pulled = True, None

    def check(self) -> None:
        """Raises a ServerFailure if a server was lost, or an update that has ended failed."""
        if self._is_suspect:
            self._is_suspect = False
            self._get([server.version.remote() for server in self._actors.servers])
        if not self._updates:
            return
        done, self._updates = self._ray.wait(
            self._updates, num_returns=len(self._updates), timeout=0
        )
        self._get(done)

    def keep_snapshot(self) -> None:
        """Waits for the servers and keeps what they hold, for when one of them is lost."""
        self._snapshots = self.snapshots()

    def snapshots(self) -> list[Snapshot]:
        """Waits for the servers and returns what they hold, all at this version."""
        snapshots = self._get([server.snapshot.remote() for server in self._actors.servers])
        if any(snapshot.version != self.version for snapshot in snapshots):
            raise ServerFailure
        self._updates = []
        return snapshots

    def roll_back(self) -> None:
        """Starts lost servers again, and takes all servers back to the last snapshot."""
        lost = self._start_lost_servers()
        redone = self.version - self.kept_version
        self._statistics.redone_updates += redone
        logger.warning(
            "Server(s) %s of the parameter server were lost. All go back to version %d; %d "
            "update(s) are made again.",
            lost,
            self.kept_version,
            redone,
        )
        assert self._layout is not None
        self.load(self._layout, self._snapshots)

    def go_on(self) -> None:
        """Starts lost servers again from the last snapshot; warns of updates that are lost."""
        despite_failures(self._bring_back, lambda: None)

    def _bring_back(self) -> None:
        lost = self._start_lost_servers()
        layout = self._ray.put(self._layout)
        for number in lost:
            server = self._actors.servers[number]
            self._get([server.load.remote(layout, self._snapshots[number])])
        for number, server in enumerate(self._actors.servers):
            reached = self._get([server.version.remote(self.version)])[0]
            missed = self.version - reached
            self._statistics.lost_updates += missed
            if missed:
                why = (
                    f"was lost and starts again from its checkpoint of version {reached}"
                    if number in lost
                    else "could not read all gradients, because the node that held them is gone"
                )
                logger.warning(
                    "Server %d of the parameter server %s: %d update(s) of its variables are lost.",
                    number,
                    why,
                    missed,
                )
        self._updates, self._pulled = [], None
        self.keep_snapshot()

    def _get(self, refs: list[Any]) -> list[Any]:
        try:
            return self._ray.get(refs)
        except self._ray.exceptions.RayError as error:
            cause = getattr(error, "cause", None)
            if cause is None or isinstance(cause, (self._ray.exceptions.RayError, WrongVersion)):
                raise ServerFailure from error
            raise RuntimeError(f"A server of the parameter server failed: {cause!r}") from error

    def _start_lost_servers(self) -> list[int]:
        lost = []
        for number, server in enumerate(self._actors.servers):
            try:
                self._ray.get(server.version.remote())
            except self._ray.exceptions.RayActorError:
                self._actors.replace_server(number)
                lost.append(number)
        self._statistics.lost_servers += len(lost)
        return lost
