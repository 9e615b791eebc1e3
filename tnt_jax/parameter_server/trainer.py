"""A trainer whose state lies on servers, and whose steps are computed by workers."""

import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import count
from typing import Any

import jax
import numpy as np
import optax

from tnt_jax.distributed.joining.runtime import Runtime
from tnt_jax.keras_compat.state.core import Core
from tnt_jax.log import logger
from tnt_jax.parameter_server.applying import Asynchronous, Synchronous
from tnt_jax.parameter_server.coordinator import Coordinator, GlobalBatch, Work
from tnt_jax.parameter_server.partition import Partitioner, plan_shards
from tnt_jax.parameter_server.server import Layout, Snapshot, serve_optimizer, to_wire
from tnt_jax.parameter_server.server_group import StalenessBound, despite_failures
from tnt_jax.parameter_server.worker import (
    Report,
    WorkerModel,
    counts_need_params,
    exchanges_rows,
    make_counts,
)
from tnt_jax.train.contracts import Batch, Hooks, Parts, StepParts, Steps
from tnt_jax.train.execution import DeviceBatches, RowsInOrder
from tnt_jax.train.state import TrainState, descriptions
from tnt_jax.train.trainer import Trainer


class EpochSums:
    """The sums over an epoch that its logs are computed from, None before its first step."""

    def __init__(self, sums: Any) -> None:
        self.sums = _host(sums)

    def add(self, reports: Sequence[Report]) -> None:
        """Adds the reports of shares of a batch, in order; its rows weigh its loss."""
        total: Report = jax.tree.map(lambda *parts: sum(parts[1:], start=parts[0]), *reports)
        rows = np.float32(total.rows)
        self.add_sums(
            {
                "loss": (np.float32(total.loss) * rows, rows),
                "losses": [(np.float32(value) * rows, rows) for value in total.losses],
                "metrics": total.increments,
            }
        )

    def add_sums(self, added: Any) -> None:
        """Adds the sums of other batches."""
        if self.sums is None:
            self.sums = added
        else:
            self.sums = jax.tree.map(lambda x, y: np.asarray(x + y, x.dtype), self.sums, added)

    def on_device(self) -> Any:
        """Returns the sums as JAX arrays, or None before the first batch."""
        return jax.device_put(self.sums)


class ServedTrainer(Trainer):
    """Trains, evaluates and predicts on the workers of a parameter server.

    The state of the model's own trainer is taken over and given back. Runtime and steps are those
    of the coordinator's own device. `training`, how it trains, is set before the first step.
    """

    training: Asynchronous | Synchronous

    def __init__(
        self,
        core: Core,
        runtime: Runtime,
        steps: Steps,
        *,
        coordinator: Coordinator,
        partitioner: Partitioner | None,
        compresses: bool,
    ) -> None:
        self._servers_are_newer = False
        self._servers_are_older = True
        self._core, self._base = core, core.trainer
        super().__init__(self._base.adapter, runtime, steps, seed=core.options.seed)
        self.put = self.put_stacked = lambda tree: tree
        self._coordinator = coordinator
        self._partitioner = partitioner
        self._compresses = compresses
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
        self._sample = descriptions(inputs, rows=1)

    def compile(
        self, parts: Parts, optimizer: optax.GradientTransformation, **options: Any
    ) -> None:
        """Chooses what the steps compute, here and for the model's own trainer."""
        super().compile(parts, optimizer, **options)
        self._base.compile(parts, optimizer, **options)
        self._has_loaded = False
        self._counts = None

    def use_optimizer(self, optimizer: optax.GradientTransformation, **options: Any) -> None:
        """Starts an optimizer afresh, unless it is the one that the state belongs to."""
        if optimizer is not self._optimizer:
            self._layout, self._has_loaded = None, False
        super().use_optimizer(optimizer, **options)

    def counts(self, batch: Batch) -> list[np.ndarray]:
        """Returns the divisors of the loss of a batch, which must not depend on parameters."""
        state = self._state
        assert state is not None
        arguments = (state.params, state.model_state, batch)
        if self._counts is None:
            parts, mesh = self.programs.parts, self.runtime.mesh
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
        epoch_sums, ended = EpochSums(sums), count(first_index)
        global_batches = (
            GlobalBatch(_host(group.batch), index, group.num_rows)
            for index, group in enumerate(batches, first_index)
        )

        def begin(batch: GlobalBatch) -> None:
            hooks.on_batch_begin(batch.index)
            # A callback may have changed the state.
            self.load()
            batch.step = self._coordinator.servers.version + len(self.training.under_way())

        def end(batch: GlobalBatch, reports: list[Report]) -> bool:
            epoch_sums.add(reports)
            self.note_update()
            # Batches may end in another order than they began.
            return hooks.on_batch_end(next(ended), epoch_sums.on_device(), batch.num_rows)

        start = time.perf_counter()
        self.load()
        try:
            self.training.train(global_batches, begin, end)
            self.training.settle()
        finally:
            statistics = self._coordinator.statistics
            statistics.training_s += time.perf_counter() - start
        logger.info("Parameter server: %s.", statistics.summary())
        return epoch_sums.on_device()

    def evaluate(self, batches: Iterable[DeviceBatches], hooks: Hooks) -> Any:
        """Evaluates batches on the workers; returns their sums, or None if there was no batch."""
        sums = EpochSums(None)
        for index, group, added in self._on_workers("evaluate", batches, hooks):
            sums.add_sums(added)
            if hooks.on_batch_end(index, sums.on_device(), group.num_rows):
                break
        return sums.on_device()

    def predict(self, batches: Iterable[DeviceBatches], hooks: Hooks) -> Any:
        """Returns the outputs of all batches as host arrays `[examples, ...]`."""
        rows = RowsInOrder()
        for index, group, outputs in self._on_workers("predict", batches, hooks):
            rows.add(jax.tree.map(lambda x: x[None], outputs), group)
            if hooks.on_batch_end(index, None, group.num_rows):
                break
        return rows.joined()

    def load(self) -> None:
        """Gives the model to the workers and the variables to the servers, where they changed."""
        if self._has_loaded and not self._servers_are_older:
            return
        state, optimizer = self.require_state(), self._optimizer or optax.identity()
        if self._layout is None:
            self._layout = self._make_layout(state, optimizer)
        snapshots = self._snapshots(self._layout, state)
        if self._has_loaded:
            self._coordinator.servers.load(self._layout, snapshots)
        else:
            model = WorkerModel(
                self._core.module,
                self._core.options.for_adapter(),
                self._sample,
                self._core.functions,
                self._layout,
                np.asarray(state.key),
                self._compresses,
            )
            self._coordinator.load(model, snapshots)
            self._has_loaded = True
        self._servers_are_older = False

    def note_update(self) -> None:
        """Notes that the servers have made an update."""
        self._servers_are_newer = True

    def _make_layout(self, state: TrainState, optimizer: optax.GradientTransformation) -> Layout:
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
        compilation = self._core.compilation
        name = "identity" if compilation is None else compilation.optimizer.name
        served = serve_optimizer(optimizer, state.params, plan, name=name)
        return Layout(served, structure, other_structure, dtypes)

    def _snapshots(self, layout: Layout, state: TrainState) -> list[Snapshot]:
        arrays, opt_state = _host((state.params, state.model_state)), _host(state.opt_state)
        served, leaves, step = layout.optimizer, jax.tree.leaves(arrays), int(state.step)
        plan = served.plan
        return [
            Snapshot(step, to_wire(plan.packed(server, leaves)), served.state_on(server, opt_state))
            for server in range(plan.num_servers)
        ]

    def _fetch(self) -> None:
        assert self._layout is not None and self._state is not None
        servers, layout = self._coordinator.servers, self._layout
        snapshots = despite_failures(servers.snapshots, self.training.settle)
        params, model_state = layout.variables([x.arrays for x in snapshots])
        opt_state = layout.optimizer.whole_state([x.opt_state for x in snapshots])
        state = replace(
            self._state,
            step=np.int32(servers.version),
            params=params,
            model_state=model_state,
            opt_state=jax.tree.structure(self._state.opt_state).unflatten(opt_state),
        )
        self._state = self.steps.put_state(state)
        self._servers_are_newer = False

    def _on_workers(
        self, method: str, batches: Iterable[DeviceBatches], hooks: Hooks
    ) -> Iterator[tuple[int, DeviceBatches, Any]]:
        self.load()
        begun: deque[tuple[int, DeviceBatches]] = deque()

        def works() -> Iterator[Work]:
            first_row = 0
            for index, group in enumerate(batches):
                hooks.on_batch_begin(index)
                begun.append((index, group))
                batch = _host(group.batch)
                rows = [batch] if method == "evaluate" else batch.inputs
                what = f"batch {index + 1} to {method}"
                yield Work(method, (rows, first_row), what, group.num_rows)
                first_row += group.num_rows

        ahead = 2 * len(self._coordinator.actors.workers)
        on_workers = Asynchronous(self._coordinator, StalenessBound(None))
        for result in on_workers.in_order(works(), ahead=ahead):
            yield *begun.popleft(), result


def _host(tree: Any) -> Any:
    return jax.tree.map(np.asarray, tree)
