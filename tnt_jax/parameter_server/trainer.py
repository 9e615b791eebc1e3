"""A trainer whose state lies on servers, and whose steps are computed by workers."""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

import jax
import numpy as np
import optax

from tnt_jax.data.layout import RankSlice
from tnt_jax.distributed.joining.runtime import Runtime
from tnt_jax.log import logger
from tnt_jax.parameter_server.compression import from_wire, to_wire
from tnt_jax.parameter_server.coordinator import Coordinator, Work
from tnt_jax.parameter_server.partition import Partitioner, plan_shards
from tnt_jax.parameter_server.server import Layout, Snapshot, serve_optimizer
from tnt_jax.parameter_server.server_group import ServerFailure
from tnt_jax.parameter_server.worker import (
    Order,
    Report,
    Share,
    WorkerModel,
    counts_need_params,
    exchanges_rows,
    make_counts,
)
from tnt_jax.train.contracts import Batch, Hooks, Parts, StepParts
from tnt_jax.train.execution import DeviceBatches
from tnt_jax.train.finite import OnNaN
from tnt_jax.train.state import TrainState
from tnt_jax.train.steps.data_parallel import DataParallelSteps
from tnt_jax.train.trainer import Trainer

Counts = Callable[[Batch], list[np.ndarray]]


@dataclass(eq=False)
class GlobalBatch:
    """A global batch of training.

    Attributes:
        batch: All its rows, padding included.
        index: Its number in the epoch.
        num_rows: Real rows.
        step: Its number since the beginning of training, known once it is begun.
    """

    batch: Batch
    index: int
    num_rows: int
    step: int = 0

    @property
    def what(self) -> str:
        """What messages call it."""
        return f"batch {self.index + 1} of the epoch (step {self.step + 1})"

    def work(self) -> Work:
        """Returns the work of one worker on all of the batch."""
        order = Order(self.step, None, True, self.num_rows)
        return Work("compute", (order, self.batch), self.what, self.num_rows)

    def shares(self, num_shares: int, ranks_per_share: int, counts: Counts) -> list[Work]:
        """Returns the work on each share of the batch, of equally many rows with padding.

        Args:
            num_shares: Number of shares.
            ranks_per_share: Ranks of each worker.
            counts: Returns the divisors of the loss of the batch.
        """
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
            what = f"share {number + 1} of {num_shares} of {self.what}"
            works.append(Work("compute", (order, part), what, real))
        return works


class EpochSums:
    """The sums over an epoch that its logs are computed from.

    Args:
        sums: Those of the steps before, or None.
    """

    def __init__(self, sums: Any) -> None:
        self.sums = None if sums is None else jax.tree.map(np.asarray, sums)

    def add(self, reports: Sequence[Report]) -> None:
        """Adds a global batch: the reports of its shares, in order.

        As in Keras, the loss of a batch is weighted by its rows.
        """
        rows = np.float32(sum(report.rows for report in reports))
        loss, losses, increments = (
            jax.tree.map(lambda *parts: sum(parts[1:], start=parts[0]), *each)
            for each in zip(
                *((report.loss, report.losses, report.increments) for report in reports),
                strict=True,
            )
        )
        added = {
            "loss": (np.float32(loss) * rows, rows),
            "losses": [(np.float32(value) * rows, rows) for value in losses],
            "metrics": increments,
        }
        self.add_sums(added)

    def add_sums(self, added: Any) -> None:
        """Adds the sums of other batches."""
        if self.sums is None:
            self.sums = added
        else:
            self.sums = jax.tree.map(lambda x, y: np.asarray(x + y, x.dtype), self.sums, added)

    def on_device(self) -> Any:
        """Returns the sums as JAX arrays, or None before the first batch."""
        return None if self.sums is None else jax.device_put(self.sums)


class ModelOfWorkers(Protocol):
    """Makes what workers need of the user's model."""

    @property
    def optimizer_name(self) -> str:
        """Name of the optimizer, for messages."""
        ...

    def __call__(self, sample: Any, layout: Layout, key: np.ndarray) -> WorkerModel:
        """Returns it for inputs like `sample`, a layout and the words of the run's key."""
        ...


class Training(Protocol):
    """One way to train: synchronous or asynchronous."""

    def under_way(self) -> Sequence[Any]:
        """Returns the gradients that were begun and not applied."""
        ...

    def train(self, batches: Iterator[GlobalBatch], begin: Any, end: Any) -> None:
        """Trains on all batches and waits for the last."""
        ...

    def settle(self) -> None:
        """Waits until the servers have made all updates."""
        ...


class ServedSteps(DataParallelSteps):
    """The programs of the coordinator's own device, for batches that are cut for workers.

    Args:
        runtime: One device.
        reduction: How gradients are summed; not used.
        rank_slice: The ranks of all workers that share a batch.
    """

    def __init__(self, runtime: Runtime, reduction: Any, rank_slice: RankSlice) -> None:
        super().__init__(runtime, reduction)
        self.rank_slice = rank_slice
        # Workers get their batches one by one.
        self.fused = None


class ServedTrainer(Trainer):
    """Trains, evaluates and predicts on the workers of a parameter server.

    Args:
        base: The trainer of the model, whose state is taken over and given back.
        steps: Programs of the coordinator's own device.
        seed: Seed of fresh variables and of the random streams of the step.
        coordinator: What gives work to workers.
        model: Makes what workers need of the model.
        partitioner: Into how many parts an array is divided, or None.

    Attributes:
        training: How it trains; set before the first step.
    """

    def __init__(
        self,
        base: Trainer,
        runtime: Runtime,
        steps: ServedSteps,
        *,
        seed: int,
        coordinator: Coordinator,
        model: ModelOfWorkers,
        partitioner: Partitioner | None,
    ) -> None:
        self._servers_are_newer = False
        self._servers_are_older = True
        super().__init__(base.adapter, runtime, steps, seed=seed)
        self.put = self.put_stacked = _unchanged
        self.training: Training | None = None
        self._base = base
        self._coordinator = coordinator
        self._model = model
        self._partitioner = partitioner
        self._layout: Layout | None = None
        self._has_loaded = False
        self._sample: Any = None
        self._counts: Any = None

    @property
    def state(self) -> TrainState | None:
        """Everything that training changes, as the servers have it; None before `build`."""
        if self._servers_are_newer and not self._servers_are_older:
            self._fetch()
        return self._state

    @state.setter
    def state(self, state: TrainState | None) -> None:
        """Replaces everything that training changes; the servers get it before the next step."""
        self._state = state
        self._servers_are_newer, self._servers_are_older = False, True

    def adopt(self) -> None:
        """Takes over the state of the model's own trainer."""
        if self._base.state is not None:
            self.set_state(_host(self._base.gathered_state()))

    def give_back(self) -> None:
        """Gives the state to the model's own trainer."""
        if self.state is not None:
            self._base.set_state(_host(self.state))

    def build(self, inputs: Any) -> None:
        """Creates the variables for inputs like `inputs`, if there are none."""
        super().build(inputs)
        self._sample = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct((1, *x.shape[1:]), jax.numpy.result_type(x)), inputs
        )

    def compile(
        self,
        parts: Parts,
        optimizer: optax.GradientTransformation,
        *,
        accumulation_steps: int = 1,
        on_nan: OnNaN | None = None,
    ) -> None:
        """Chooses what the steps compute, here and for the model's own trainer."""
        options: Any = {"accumulation_steps": accumulation_steps, "on_nan": on_nan}
        super().compile(parts, optimizer, **options)
        self._base.compile(parts, optimizer, **options)
        self._has_loaded = False
        self._counts = None

    def use_optimizer(
        self, optimizer: optax.GradientTransformation, *, accumulation_steps: int = 1
    ) -> None:
        """Starts an optimizer afresh, unless it is the one that the state belongs to."""
        if optimizer is not self._optimizer:
            self._layout, self._has_loaded = None, False
        super().use_optimizer(optimizer, accumulation_steps=accumulation_steps)

    def counts(self, batch: Batch) -> list[np.ndarray]:
        """Returns the divisors of the loss of a batch.

        Raises:
            ValueError: If they depend on the parameters, or if rows of a batch depend on others.
        """
        state = self._state
        assert state is not None
        arguments = (state.params, state.model_state, batch)
        if self._counts is None:
            parts = self.programs.parts
            mesh = self.runtime.mesh
            self._counts = make_counts(parts, mesh)
            if isinstance(parts, StepParts) and exchanges_rows(
                parts.apply, mesh, state, batch.inputs
            ):
                raise ValueError(
                    f"The model {self.adapter.name!r} communicates over the axis 'data' in "
                    "training, but workers of a parameter server do not exchange rows. Leave out "
                    "axis_name='data' or synchronize_batch_norm, or train with one worker."
                )
            if counts_need_params(self._counts, *arguments):
                raise ValueError(
                    "The loss is divided by a number that depends on the parameters, which shares "
                    "of a batch cannot know. Train asynchronously (max_staleness=None), or with "
                    "one worker."
                )
        return [np.asarray(x) for x in self._counts(*arguments)]

    def train_epoch(
        self,
        batches: Iterable[DeviceBatches],
        hooks: Hooks,
        *,
        first_index: int = 0,
        sums: Any = None,
    ) -> Any:
        """Trains on batches; returns the sums of the epoch, or None without a batch."""
        assert self.training is not None
        epoch = _Epoch(self, hooks, first_index, EpochSums(sums))
        start = time.perf_counter()
        self.load()
        try:
            self.training.train(epoch.batches(iter(batches)), epoch.begin, epoch.end)
            self.training.settle()
        finally:
            statistics = self._coordinator.statistics
            statistics.training_s += time.perf_counter() - start
        logger.info("Parameter server: %s.", statistics.summary())
        return epoch.sums.on_device()

    def evaluate(self, batches: Iterable[DeviceBatches], hooks: Hooks) -> Any:
        """Evaluates batches on the workers; returns their sums, or None if there was no batch."""
        sums = EpochSums(None)
        take = partial(self._take_sums, hooks, sums)
        self._on_workers("evaluate", batches, hooks, lambda batch: [batch], take)
        return sums.on_device()

    def predict(self, batches: Iterable[DeviceBatches], hooks: Hooks) -> Any:
        """Returns the outputs of all batches as host arrays `[examples, ...]`."""
        parts: list[Any] = []

        def take(index: int, group: DeviceBatches, outputs: Any) -> None:
            rows = group.real_rows[0]
            parts.append(jax.tree.map(lambda x: x[rows], outputs))
            hooks.on_batch_end(index, None, group.num_rows)

        self._on_workers("predict", batches, hooks, lambda batch: batch.inputs, take)
        if not parts:
            raise ValueError("The dataset is empty: at least one example is needed.")
        return jax.tree.map(lambda *pieces: np.concatenate(pieces), *parts)

    def load(self) -> None:
        """Gives the model to the workers and the variables to the servers, where they changed."""
        if self._has_loaded and not self._servers_are_older:
            return
        state, optimizer = self._built(), self._optimizer or optax.identity()
        arrays = jax.tree.leaves((state.params, state.model_state))
        if self._layout is None:
            self._layout = self._make_layout(state, optimizer)
        snapshots = self._snapshots(self._layout, state, arrays)
        if self._has_loaded:
            self._coordinator.servers.give(snapshots)
        else:
            key = np.asarray(state.key)
            self._coordinator.load(self._model(self._sample, self._layout, key), snapshots)
            self._has_loaded = True
        self._servers_are_older = False

    def next_step(self) -> int:
        """Returns the number of the batch that is begun next, since the start of training."""
        assert self.training is not None
        return self._coordinator.servers.version + len(self.training.under_way())

    def note_update(self) -> None:
        """Notes that the servers have made an update."""
        self._servers_are_newer = True

    def _make_layout(self, state: TrainState, optimizer: optax.GradientTransformation) -> Layout:
        """Returns which rows of which variables lie on which server."""
        params, structure = jax.tree.flatten(state.params)
        others, other_structure = jax.tree.flatten(state.model_state)
        shapes = [x.shape for x in (*params, *others)]
        dtypes = tuple(np.dtype(x.dtype) for x in (*params, *others))
        # Model state is changed by whole arrays.
        plan = plan_shards(
            shapes,
            dtypes,
            num_servers=len(self._coordinator.actors.servers),
            partitioner=self._partitioner,
            num_divided=len(params),
        )
        served = serve_optimizer(optimizer, state.params, plan, name=self._model.optimizer_name)
        return Layout(served, structure, other_structure, dtypes)

    def _snapshots(self, layout: Layout, state: TrainState, arrays: list[Any]) -> list[Snapshot]:
        """Returns what each server is to hold."""
        opt_state = jax.tree.map(np.asarray, state.opt_state)
        host = [np.asarray(x) for x in arrays]
        plan = layout.optimizer.plan
        snapshots = []
        for server in range(plan.num_servers):
            held = to_wire(plan.packed(server, host))
            part = layout.optimizer.state_on(server, opt_state)
            snapshots.append(Snapshot(int(state.step), held, part))
        return snapshots

    def _fetch(self) -> None:
        """Reads the state from the servers."""
        assert self._layout is not None and self._state is not None and self.training is not None
        while True:
            try:
                snapshots = self._coordinator.servers.snapshots()
                break
            except ServerFailure:
                self.training.settle()
        layout, plan = self._layout, self._layout.optimizer.plan
        dtypes = [[layout.dtypes[index] for index in plan.held(s)] for s in range(plan.num_servers)]
        parts = [from_wire(x.arrays, d) for x, d in zip(snapshots, dtypes, strict=True)]
        arrays = plan.unpacked(parts)
        opt_state = layout.optimizer.whole_state([x.opt_state for x in snapshots])
        state = replace(
            self._state,
            step=np.int32(self._coordinator.servers.version),
            params=layout.params.unflatten(arrays[: layout.num_params]),
            model_state=layout.model_state.unflatten(arrays[layout.num_params :]),
            opt_state=jax.tree.structure(self._state.opt_state).unflatten(opt_state),
        )
        self._state = self.steps.put_state(state)
        self._servers_are_newer = False

    def _on_workers(
        self, method: str, batches: Iterable[DeviceBatches], hooks: Hooks, part: Any, take: Any
    ) -> None:
        """Has batches evaluated or predicted by the workers; takes the results in order."""
        self.load()
        groups: list[DeviceBatches] = []
        taken = iter(range(1 << 62))

        def works() -> Iterator[Work]:
            first_row = 0
            for index, group in enumerate(batches):
                hooks.on_batch_begin(index)
                groups.append(group)
                arguments = (_host(part(group.batch)), first_row)
                yield Work(method, arguments, f"batch {index + 1} to {method}", group.num_rows)
                first_row += group.num_rows

        def take_next(result: Any) -> None:
            index = next(taken)
            take(index, groups[index], result)

        ahead = 2 * len(self._coordinator.actors.workers)
        self._coordinator.run_all(works(), ahead=ahead, take=take_next)

    def _take_sums(
        self, hooks: Hooks, sums: EpochSums, index: int, group: DeviceBatches, added: Any
    ) -> None:
        sums.add_sums(added)
        hooks.on_batch_end(index, sums.on_device(), group.num_rows)


class _Epoch:
    """The batches of an epoch of training, and what they add up to.

    Args:
        trainer: The trainer.
        hooks: What runs around the steps.
        first_index: Number of the first batch.
        sums: Sums of the batches before.
    """

    def __init__(
        self, trainer: ServedTrainer, hooks: Hooks, first_index: int, sums: EpochSums
    ) -> None:
        self.sums = sums
        self._trainer = trainer
        self._hooks = hooks
        self._index = first_index

    def batches(self, groups: Iterator[DeviceBatches]) -> Iterator[GlobalBatch]:
        """Yields the batches with their numbers."""
        first = self._index
        for place, group in enumerate(groups):
            yield GlobalBatch(_host(group.batch), first + place, group.num_rows)

    def begin(self, batch: GlobalBatch) -> None:
        """Runs before a batch is given to a worker."""
        self._hooks.on_batch_begin(batch.index)
        # A callback may have changed the state.
        self._trainer.load()
        batch.step = self._trainer.next_step()

    def end(self, batch: GlobalBatch, reports: list[Report]) -> bool:
        """Runs after the update of a batch was ordered; returns whether training ends."""
        self.sums.add(reports)
        self._trainer.note_update()
        is_over = self._hooks.on_batch_end(self._index, self.sums.on_device(), batch.num_rows)
        self._index += 1
        return is_over


def _host(tree: Any) -> Any:
    return jax.tree.map(np.asarray, tree)


def _unchanged(tree: Any) -> Any:
    return tree
