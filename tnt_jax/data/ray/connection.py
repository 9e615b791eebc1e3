"""The actor that serves all processes of the job: made by the master, found by the others."""

import json
import weakref
from itertools import count
from typing import Any, NamedTuple
from uuid import uuid4

from tnt_jax.data.agreement import Board, CoordinationBoard
from tnt_jax.data.ray.row_stream import RowStreams
from tnt_jax.job import Slot
from tnt_jax.log import logger
from tnt_jax.on_ray.require import import_ray

_NAMESPACE = "tnt_jax"
_names = Slot(count)


class _Actor(NamedTuple):
    """The `RowStreams` of the job, on the master.

    Attributes:
        handle: Its handle.
        name: Its name in the cluster.
        client: Id of the connection to Ray that made it, and with which it ends.
    """

    handle: Any
    name: str
    client: str


def _end(actor: _Actor | None) -> None:
    if actor is not None:
        ray = import_ray("RayData")
        if ray.is_initialized() and ray.get_runtime_context().get_job_id() == actor.client:
            ray.kill(actor.handle)


_actor = Slot[_Actor | None](lambda: None, close=_end)


class Connection:
    """A `RowStream` of the job's actor, which is closed with the last reference of all processes.

    All processes make these objects in the same order.

    Args:
        dataset: A `ray.data.Dataset`, or a function from the epoch to one. That of the master is
            used.
        board: Where processes tell what they found; the coordination service by default.

    Attributes:
        ray: The module.
        actor: Handle of the job's `RowStreams`.
        stream: Name of the stream.
        process: Index of this process.
        num_examples: Rows of the dataset, if the master knows them without reading it.

    Raises:
        RuntimeError: On every process, if one of them is not connected to Ray, or fails otherwise;
            the one that fails raises its own error.
        ValueError: On every process, if they are connected to different clusters.
    """

    def __init__(self, dataset: Any, board: Board | None = None) -> None:
        self._board = CoordinationBoard() if board is None else board
        self._name = f"ray/{next(_names.get())}" if board is None else "ray"
        self.process = self._board.process
        report = self._meet(dataset)[0]
        self.num_examples: int | None = report["num_examples"]
        self.stream: str = report["stream"]
        if self.process:
            self.actor = self.ray.get_actor(report["actor"], namespace=_NAMESPACE)
        weakref.finalize(self, _close, self.ray, self.actor, self.stream, self.process)

    def _meet(self, dataset: Any) -> list[dict[str, Any]]:
        """Opens the stream on the master; returns the reports of all processes."""
        report: dict[str, Any] = {"address": "", "error": ""}
        error = None
        try:
            self.ray = import_ray("RayData")
            report["address"] = self._address()
            if not self.process:
                report |= self._open(dataset)
        except Exception as raised:  # Raised once the others know.
            error = raised
            report["error"] = f"{type(raised).__name__}: {raised}"
        self._board.post(self._name, json.dumps(report))
        reports = [
            json.loads(self._board.read(self._name, process))
            for process in range(self._board.num_processes)
        ]
        if error is not None:
            raise error
        for process, found in enumerate(reports):
            if found["error"]:
                raise RuntimeError(f"The data of process {process} failed: {found['error']}")
        _check_addresses([found["address"] for found in reports])
        return reports

    def _address(self) -> str:
        if not self.ray.is_initialized():
            raise RuntimeError(
                "This process is not connected to a Ray cluster. Call ray.init(address=...) with "
                "the address of the cluster first."
            )
        return self.ray.get_runtime_context().gcs_address

    def _open(self, dataset: Any) -> dict[str, Any]:
        """Opens the stream; returns what the other processes must know of it."""
        stream = uuid4().hex
        for attempt in ("first", "last"):
            actor = self._job_actor()
            try:
                opened = actor.handle.open.remote(stream, dataset, self._board.num_processes)
                self.ray.get(opened)
                break
            except self.ray.exceptions.RayActorError:
                # It has died since the last call that used it.
                _actor.set(None)
                if attempt == "last":
                    raise
        self.actor = actor.handle
        examples = _num_examples(dataset)
        if examples is None and not self.ray.available_resources().get("CPU"):
            logger.warning(
                "No CPU of the Ray cluster is free, and the tasks that prepare the dataset wait "
                "for one. Leave some to them: start fewer processes, or give each fewer CPUs."
            )
        return {"actor": actor.name, "stream": stream, "num_examples": examples}

    def _job_actor(self) -> _Actor:
        """Returns the actor of the job, which is started with the first dataset."""
        context = self.ray.get_runtime_context()
        actor = _actor.get()
        if actor is None or actor.client != context.get_job_id():
            name = f"rows-{uuid4().hex}"
            strategies = import_ray("RayData", "ray.util.scheduling_strategies")
            here = strategies.NodeAffinitySchedulingStrategy(context.get_node_id(), soft=True)
            actor_class = self.ray.remote(num_cpus=0, scheduling_strategy=here)(RowStreams)
            handle = actor_class.options(name=name, namespace=_NAMESPACE).remote()
            actor = _Actor(handle, name, context.get_job_id())
            _actor.set(actor)
        return actor


def _close(ray: Any, actor: Any, stream: str, process: int) -> None:
    if ray.is_initialized():
        actor.close.remote(stream, process)


def _check_addresses(addresses: list[str]) -> None:
    other = next((number for number, text in enumerate(addresses) if text != addresses[0]), None)
    if other is not None:
        raise ValueError(
            f"Process 0 is connected to the Ray cluster at {addresses[0]} and process {other} to "
            f"that at {addresses[other]}, but all must share one. Without an address, ray.init "
            "and ray.data start a cluster for each process: start one with `ray start --head`, "
            "and call ray.init(address=...) first."
        )


def _num_examples(dataset: Any) -> int | None:
    """Returns the number of rows of a dataset that is in Ray's memory, and None for others."""
    is_there = any(cls.__name__ == "MaterializedDataset" for cls in type(dataset).__mro__)
    return dataset.count() if is_there else None
