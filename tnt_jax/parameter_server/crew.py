"""The Ray actors of a parameter server: where they run, and how lost ones are replaced."""

import math
from collections.abc import Iterable, Mapping
from typing import Any

from tnt_jax.log import logger
from tnt_jax.on_ray.require import import_ray
from tnt_jax.parameter_server.server import Server
from tnt_jax.parameter_server.worker import Worker

_NEEDED_BY = "tnt_jax.ParameterServer"
# Ray places a group within milliseconds if there is room.
_PLACEMENT_S = 2


class Crew:
    """Servers and workers as actors, in one placement group that spreads them over the nodes.

    Args:
        num_servers: Number of servers.
        num_workers: Number of workers.
        resources_per_server: Ray's resources of each, such as `{"CPU": 1}`.
        resources_per_worker: The same for workers, such as `{"CPU": 4, "GPU": 1}`.
        worker_env: Environment variables of the workers.
        start_timeout_s: Seconds to wait for places and for the start of the processes.

    Attributes:
        servers: Actors of the servers.
        workers: Actors of the workers, by number.
        devices_per_worker: Devices of each worker.
        timeout_s: Seconds to wait for the start of a process.

    Raises:
        ModuleNotFoundError: If Ray is not installed.
        RuntimeError: If the cluster has no place for them, or a process cannot start.
    """

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
        self.ray = import_ray(_NEEDED_BY)
        self._started_ray = not self.ray.is_initialized()
        if self._started_ray:
            self.ray.init(log_to_driver=False)
        self._resources = [dict(resources_per_server)] * num_servers
        self._resources += [dict(resources_per_worker)] * num_workers
        self._num_servers = num_servers
        self.timeout_s = start_timeout_s
        self._worker_env = dict(worker_env)
        if "GPU" not in resources_per_worker and "JAX_PLATFORMS" not in self._worker_env:
            self._worker_env["JAX_PLATFORMS"] = "cpu"
        self._group: Any = None
        self.servers: list[Any] = []
        self.workers: dict[int, Any] = {}
        try:
            self._group = self._places()
            self.servers = [self.start_server(number) for number in range(num_servers)]
            self.workers = {number: self.start_worker(number) for number in range(num_workers)}
            described = self._described()
        except BaseException:
            self.close()
            raise
        counts = {devices for devices, _, _ in described}
        if len(counts) > 1:
            self.close()
            raise RuntimeError(
                f"Workers must have the same number of devices, but have {sorted(counts)}. Give "
                "each the same resources by resources_per_worker."
            )
        self.devices_per_worker = counts.pop()

    def start_server(self, number: int) -> Any:
        """Starts the actor of a server, in its place."""
        actor = self._remote(Server, number, {"JAX_PLATFORMS": "cpu"})
        return actor.remote(number)

    def replace_server(self, number: int) -> None:
        """Starts another server in the place of a lost one, and waits for it.

        Raises:
            RuntimeError: If it does not start in time.
        """
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
        return self._remote(Worker, self._num_servers + number, self._worker_env).remote(number)

    def start_beside(self) -> Any:
        """Starts a worker outside of the placement group, which evaluates beside training."""
        resources = dict(self._resources[-1])
        options = {**_options(resources), "runtime_env": {"env_vars": self._worker_env}}
        return self.ray.remote(max_restarts=0, **options)(Worker).remote(-1)

    def get(self, refs: list[Any]) -> list[Any]:
        """Returns answers without which nothing goes on.

        Raises:
            RuntimeError: If a server or worker was lost, or failed.
        """
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
        if not self.ray.is_initialized():
            return
        for actor in (*self.servers, *self.workers.values()):
            self.kill(actor)
        self.servers, self.workers = [], {}
        if self._group is not None:
            import_ray(_NEEDED_BY, "ray.util.placement_group").remove_placement_group(self._group)
            self._group = None
        if self._started_ray:
            self.ray.shutdown()

    def _places(self) -> Any:
        """Returns a placement group with a bundle for each process, once there is room for it.

        Raises:
            RuntimeError: If there is none in time.
        """
        module = import_ray(_NEEDED_BY, "ray.util.placement_group")
        group = module.placement_group(self._resources, strategy="SPREAD")
        if group.wait(timeout_seconds=_PLACEMENT_S):
            return group
        logger.warning(
            "Waiting up to %.0f s for room on the Ray cluster: %s.", self.timeout_s, self._lack()
        )
        if group.wait(timeout_seconds=max(math.ceil(self.timeout_s) - _PLACEMENT_S, 0)):
            return group
        lack = self._lack()
        module.remove_placement_group(group)
        raise RuntimeError(
            f"The Ray cluster has had no room within {self.timeout_s:.0f} s: {lack}. Start fewer, "
            "give each less (resources_per_worker, resources_per_server), or add nodes."
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

    def _remote(self, kind: type, bundle: int, env: Mapping[str, str]) -> Any:
        strategies = import_ray(_NEEDED_BY, "ray.util.scheduling_strategies")
        strategy = strategies.PlacementGroupSchedulingStrategy(
            self._group, placement_group_bundle_index=bundle
        )
        options: dict[str, Any] = {**_options(self._resources[bundle]), "max_restarts": 0}
        if env:
            options["runtime_env"] = {"env_vars": dict(env)}
        return self.ray.remote(scheduling_strategy=strategy, **options)(kind)

    def _described(self) -> list[tuple[int, str, int]]:
        """Waits until all processes have started; returns what each worker has.

        A process that Ray loses before it has answered, as when its node leaves, is started once
        more.
        """
        answers = self._answers(range(len(self._resources)))
        lost = [number for number, answer in answers.items() if answer is None]
        for number in lost:
            logger.warning(
                "%s was lost before it had started, and is started once more.", self._name(number)
            )
            if number < self._num_servers:
                self.servers[number] = self.start_server(number)
            else:
                worker = number - self._num_servers
                self.workers[worker] = self.start_worker(worker)
        answers.update(self._answers(lost, last_time=True))
        described = [answers[number] for number in range(self._num_servers, len(self._resources))]
        logger.info(
            "%d servers and %d workers with %d device(s) each.",
            self._num_servers, len(described), described[-1][0],
        )  # fmt: skip
        return described

    def _answers(self, bundles: Iterable[int], last_time: bool = False) -> dict[int, Any]:
        """Returns the first answer of the process in each place, and None of those that were lost.

        Raises:
            RuntimeError: If one is late, cannot start, or was lost the last time.
        """
        asked = {
            number: self.servers[number].version.remote()
            if number < self._num_servers
            else self.workers[number - self._num_servers].describe.remote()
            for number in bundles
        }
        if not asked:
            return {}
        refs = list(asked.values())
        _, late = self.ray.wait(refs, num_returns=len(refs), timeout=self.timeout_s)
        if late:
            raise RuntimeError(
                f"{len(late)} of {len(refs)} servers and workers have not started within "
                f"{self.timeout_s:.0f} s. See Ray's logs, or pass a longer start_timeout_s."
            )
        answers = {}
        for number, ref in asked.items():
            try:
                answers[number] = self.ray.get(ref)
            except self.ray.exceptions.RayError as error:
                died = isinstance(error, self.ray.exceptions.ActorDiedError)
                if died and not error.actor_init_failed and not last_time:
                    answers[number] = None
                    continue
                raise RuntimeError(
                    f"{self._name(number)} of the parameter server cannot start on its node: "
                    f"{error}. tnt_jax and what it needs must be installed there, in the same "
                    "versions as here."
                ) from error
        return answers

    def _name(self, bundle: int) -> str:
        if bundle < self._num_servers:
            return f"Server {bundle}"
        return f"Worker {bundle - self._num_servers}"


def _options(resources: Mapping[str, float]) -> dict[str, Any]:
    """Returns resources as the options of an actor."""
    others = {name: x for name, x in resources.items() if name not in ("CPU", "GPU", "memory")}
    options: dict[str, Any] = {"num_cpus": resources.get("CPU", 0)}
    if "GPU" in resources:
        options["num_gpus"] = resources["GPU"]
    if "memory" in resources:
        options["memory"] = resources["memory"]
    return {**options, "resources": others} if others else options


def _listed(resources: Mapping[str, float]) -> str:
    return ", ".join(f"{amount:g} {name}" for name, amount in resources.items()) or "nothing"
