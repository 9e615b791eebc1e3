"""Ray datasets as sources: a whole one, of which each process fetches its rows, and its shards."""

import weakref
from collections import deque
from collections.abc import Generator, Iterator
from contextlib import closing, suppress
from dataclasses import replace
from typing import Any, NamedTuple
from uuid import uuid4

import jax
import numpy as np

from tnt_jax.data.agreement import CoordinationBoard, gather, reader_stopped, unique_name
from tnt_jax.data.elements import as_batch, is_of_library
from tnt_jax.data.layout import RankSlice, local_rows, num_batches, resolve_batch_size
from tnt_jax.data.permutation import RowOrder
from tnt_jax.data.ray.row_stream import Request, RowStreams, Share, rows_of
from tnt_jax.data.ray.spec import RayData, is_ray_iterator, is_ray_shard
from tnt_jax.data.shards import ShardSource
from tnt_jax.data.sources import HostBatch, warn_once
from tnt_jax.data.tables.columns import ColumnRoles, dense
from tnt_jax.job import Slot
from tnt_jax.log import logger
from tnt_jax.on_ray.worker import import_ray, role

_NAMESPACE = "tnt_jax"


class _Actor(NamedTuple):
    """The `RowStreams` of the job, on the master."""

    handle: Any
    name: str
    client: str


def _end(actor: _Actor) -> None:
    ray = import_ray("RayData")
    if ray.is_initialized() and ray.get_runtime_context().get_job_id() == actor.client:
        ray.kill(actor.handle)


_actor = Slot[_Actor | None](lambda: None, close=_end)


class Connection:
    """A stream of the job's `RowStreams`, which is closed with the last reference of all processes.

    All make these objects in the same order; the dataset of the master is used. If one of them is
    not connected to Ray, or to another cluster, or fails otherwise, all raise an error.
    """

    def __init__(self, dataset: Any, board: CoordinationBoard | None = None) -> None:
        self._board = CoordinationBoard() if board is None else board
        self._name = unique_name("ray") if board is None else "ray"
        self.process = self._board.process
        report = self._meet(dataset)
        self.num_examples: int | None = report["num_examples"]
        self.stream: str = report["stream"]
        if self.process:
            self.actor = self.ray.get_actor(report["actor"], namespace=_NAMESPACE)
        weakref.finalize(self, _close, self.ray, self.actor, self.stream, self.process)

    def _meet(self, dataset: Any) -> dict[str, Any]:
        """Opens the stream on the master, and returns the report of that."""
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
        reports = gather(self._board, self._name, report)
        if error is not None:
            raise error
        for process, found in enumerate(reports):
            if found["error"]:
                raise RuntimeError(f"The data of process {process} failed: {found['error']}")
        for process, found in enumerate(reports):
            if found["address"] != reports[0]["address"]:
                raise ValueError(
                    f"Process 0 is connected to the Ray cluster at {reports[0]['address']} and "
                    f"process {process} to that at {found['address']}, but all must share one. "
                    "Without an address, ray.init and ray.data start a cluster for each process: "
                    "start one with `ray start --head`, and call ray.init(address=...) first."
                )
        return reports[0]

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
        context = self.ray.get_runtime_context()
        actor = _actor.get()
        if actor is None or actor.client != context.get_job_id():
            name = f"rows-{uuid4().hex}"
            strategy = self.ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy
            here = strategy(context.get_node_id(), soft=True)
            actor_class = self.ray.remote(num_cpus=0, scheduling_strategy=here)(RowStreams)
            handle = actor_class.options(name=name, namespace=_NAMESPACE).remote()
            actor = _Actor(handle, name, context.get_job_id())
            _actor.set(actor)
        return actor


def _close(ray: Any, actor: Any, stream: str, process: int) -> None:
    if ray.is_initialized():
        actor.close.remote(stream, process)


def _num_examples(dataset: Any) -> int | None:
    """Returns the number of rows of a dataset that is in Ray's memory, and None for others."""
    return dataset.count() if is_of_library(dataset, "ray.data", "MaterializedDataset") else None


# Batches that are asked for, or on their way to this node, while one is used.
_BATCHES_AHEAD = 4
_TICK_S = 0.5


class RaySource:
    """The rows of one process of a Ray dataset.

    The rows of a global batch follow one another in the order of the dataset, which its tasks keep
    (`ExecutionOptions.preserve_order`), however many processes and nodes there are. The numbers of
    batches and examples are known only of a dataset in Ray's memory.
    """

    in_memory = False

    def __init__(
        self,
        spec: RayData,
        rank_slice: RankSlice,
        *,
        micro_batch_size: int | None = None,
        board: CoordinationBoard | None = None,
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
        """Values that decide the order of the rows: of the first ones it is known by a checksum."""
        targets = None if self.first_checksums is None else self.first_checksums[1]
        parts = {} if targets is None else {"order of the first rows (checksum)": targets}
        return RowOrder(parts=parts, is_of_rows=True)

    def batches(self, epoch: int, start_batch: int = 0) -> Iterator[HostBatch]:
        """Yields this process's rows of each global batch, from batch `start_batch` on."""
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
    """Returns the dataset of an iterator over all of it, and anything else as it is."""
    if not is_ray_iterator(dataset):
        return dataset
    found = getattr(dataset, "_base_dataset", None)
    if found is None:
        raise TypeError(
            f"The dataset of a {type(dataset).__name__} is not known in this version of Ray. Pass "
            "the ray.data.Dataset itself to tnt_jax.data.RayData."
        )
    return found


_UNORDERED = (
    "Ray deals the blocks of a dataset out to the processes in the order in which they are ready, "
    "which is another one in every run: set ray.data.DataContext.get_current().execution_options."
    "preserve_order = True before the dataset is made, or pass the whole dataset as "
    "tnt_jax.data.RayData"
)


def shard_source(
    spec: RayData,
    rank_slice: RankSlice,
    num_processes: int,
    *,
    micro_batch_size: int | None = None,
    board: CoordinationBoard | None = None,
) -> ShardSource:
    """Returns the source of the rows that Ray gives this process."""
    shard = spec.dataset
    count = shard.world_size() if hasattr(shard, "world_size") else num_processes
    if count != num_processes:
        raise ValueError(
            f"The dataset was split for {count} processes, but the job has {num_processes}. Split "
            f"it with streaming_split({num_processes}), or pass the whole dataset to "
            "tnt_jax.data.RayData."
        )
    if is_ray_shard(shard) and role() == "worker":
        warn_once(
            "Ray Train gives each worker the same number of rows, and leaves out what remains of "
            "an epoch, fewer rows than there are workers. To train on every row, in the same "
            "global batches on any number of workers, pass "
            "dataset_config=ray.train.DataConfig(datasets_to_split=[]) to the trainer."
        )
    if spec.drop_remainder:
        raise ValueError(
            "drop_remainder=True is for a whole dataset: the shards of processes end in different "
            "steps. Pass the whole dataset to tnt_jax.data.RayData, or leave it out."
        )
    size = resolve_batch_size(rank_slice, batch_size=spec.batch_size, micro=micro_batch_size)
    if size % rank_slice.num_ranks:
        raise ValueError(
            f"Each rank reads as many rows of its shard in a step as any other, but the batch size "
            f"{size} is no multiple of the {rank_slice.num_ranks} ranks. Use such a multiple, or "
            "pass the whole dataset to tnt_jax.data.RayData, which splits every batch."
        )
    micro = size // rank_slice.num_ranks
    roles = ColumnRoles(spec.inputs, spec.targets, spec.sample_weight)
    rows = _Batches(shard, micro * rank_slice.local_ranks, roles)
    source = ShardSource(rows, rank_slice=rank_slice, micro_batch_size=micro, board=board)
    context = shard.get_context() if hasattr(shard, "get_context") else shard.context
    if not context.execution_options.preserve_order:
        source.row_order = replace(source.row_order, unrepeatable=_UNORDERED)
    return source


class _Batches:
    """The batches of a shard, each pass anew."""

    def __init__(self, shard: Any, num_rows: int, roles: ColumnRoles) -> None:
        self._shard = shard
        self._num_rows = num_rows
        self._roles = roles

    def __iter__(self) -> Iterator[Any]:
        options = {"batch_size": self._num_rows, "batch_format": "numpy", "prefetch_batches": 2}
        for batch in self._shard.iter_batches(**options):
            yield self._roles.element(dense(batch))
