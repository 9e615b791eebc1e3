"""The host's side of training: which batch next, which step to start, and what may be read when.

`Trainer` needs no facade: given an adapter, step parts and an optimizer it trains on any iterable
of batches.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from tnt_jax import _jax
from tnt_jax.adapters.base import Adapter, Variables
from tnt_jax.data.feed import Feed, make_put
from tnt_jax.data.layout import micro_batch_size
from tnt_jax.data.sources import HostBatch
from tnt_jax.distributed.elastic import is_complete, link, raise_after_step
from tnt_jax.distributed.host import collectives
from tnt_jax.distributed.joining.runtime import Runtime
from tnt_jax.distributed.liveness import phases
from tnt_jax.train import execution
from tnt_jax.train.coming import ComingState, coming_state
from tnt_jax.train.compiled_steps import Ahead, CompiledSteps, Kept
from tnt_jax.train.contracts import Batch, Hooks, Parts, Start, Steps, TrainingStep
from tnt_jax.train.execution import DeviceBatches, InFlight, in_groups, stack
from tnt_jax.train.finite import OnNaN
from tnt_jax.train.memory_choice import first_run
from tnt_jax.train.state import (
    TrainState,
    descriptions,
    is_spread,
    moved,
    state_arrays,
    with_arrays,
)
from tnt_jax.train.steps.global_step import row_sharding
from tnt_jax.train.steps.step import make_predict_step


class Trainer:
    """A model on the devices, with the compiled steps that change and read it.

    The seed is that of fresh variables and of the random streams of the step. An owner is a trainer
    whose state this one reads, for another model over the same variables.
    """

    def __init__(
        self,
        adapter: Adapter,
        runtime: Runtime,
        steps: Steps,
        *,
        seed: int,
        owner: "Trainer | None" = None,
    ) -> None:
        self.adapter = adapter
        self.owner = owner
        self._state: TrainState | None = None
        self._coming: ComingState | None = None
        self._builds_meanwhile = False
        self._seed = seed
        self._use(runtime, steps)
        self._optimizer: optax.GradientTransformation | None = None
        self._accumulation_steps = 1
        self._compiled: CompiledSteps | None = None
        # Of an elastic job, until `compile` chooses something else.
        self.traced: Kept | None = None if link() is None else Kept()
        self._reopens = False
        # What compiles the step, evaluation, and the step after a loss before their first call.
        self.ahead, self.evaluation_ahead, self.ahead_of_loss = Ahead(), Ahead(), Ahead()
        # Returns the steps of a job of other processes, where training can go on with these.
        self.steps_of: Callable[[Runtime], Steps] | None = None
        # Lets a step, or evaluation and prediction, compute fewer rows at once where a device has
        # no memory for them; returns whether that is possible. None to raise the error.
        self.fewer_rows: Callable[[], bool] | None = None
        self.fewer_evaluated_rows: Callable[[], bool] | None = None
        self.most_in_flight: int | None = None  # Programs that may wait for others; see `InFlight`.
        # Kinds of programs, and rows of their batches, that have found memory.
        self._ran: set[tuple[str, int]] = set()

    def _use(self, runtime: Runtime, steps: Steps) -> None:
        self.runtime, self.steps, self.rank_slice = runtime, steps, steps.rank_slice
        mesh = runtime.mesh
        # From the rows of this process, of one batch or several, to arrays sharded over all ranks.
        self.put, self.put_stacked = make_put(mesh), make_put(mesh, stacked=True)
        self._is_alone = mesh.size == 1
        self._use_prediction()
        self._replicated = jax.jit(lambda x: x, out_shardings=NamedSharding(mesh, PartitionSpec()))

    def _use_prediction(self) -> None:
        fused = self.steps.fused
        self.predict_step = self.steps.predict(self.adapter.apply)
        self._predict_steps = None if fused is None else fused.predict(self.predict_step)

    def renew_evaluation(self) -> None:
        """Traces and compiles evaluation and prediction anew when they are called next."""
        self._ran.clear()
        self._use_prediction()
        if self._compiled is not None:
            self._compiled.renew_evaluation()

    def move(self, runtime: Runtime, steps: Steps, places: TrainState) -> None:
        """Goes on with other steps, on another mesh over the same devices; `compile` follows.

        The places describe the arrays of the state there, with their shardings.
        """
        state = self.require_state()
        # What is compiled for the steps before must not meet those to come.
        self.ahead.wait()
        self.evaluation_ahead.wait()
        self._use(runtime, steps)
        if self.owner is None:
            self.state = moved(state, places)

    def kept(self) -> Any:
        """Returns a host copy of everything that training changes, for `reopen`."""
        return jax.device_get(self.require_state())

    def reopen(self, runtime: Runtime, steps: Steps, kept: Any) -> None:
        """Goes on from what `kept` returned, on other devices; `compile` follows."""
        self._use(runtime, steps)
        self._compiled, self._reopens = None, True
        self.set_state(kept)

    def follow(self, kept: Any, source: int) -> None:
        """Takes what process `source` has kept, after `reopen`; all processes must call it."""
        arrays = collectives.broadcast(state_arrays(kept), root=source)
        self.set_state(with_arrays(kept, arrays))

    def sums_after_loss(
        self, own: Sequence[np.ndarray], newest: Sequence[np.ndarray]
    ) -> Sequence[np.ndarray]:
        """Returns the host sums, own or newest ones, with which an epoch goes on after a loss."""
        return newest

    @property
    def state(self) -> TrainState | None:
        """Everything that training changes; None before `build`."""
        if self._coming is not None:
            coming, self._coming = self._coming, None
            self.build_from(coming.variables())
        return self._state if self.owner is None else self.owner.state

    @state.setter
    def state(self, state: TrainState | None) -> None:
        """Replaces everything that training changes."""
        assert self.owner is None, "The state belongs to the owner."
        self._state, self._coming = state, None

    @property
    def is_built(self) -> bool:
        """Whether there are variables, or they are being computed."""
        return self._coming is not None or self.state is not None

    def described(self) -> TrainState:
        """Returns the state, or descriptions of its arrays while variables are being computed."""
        described = None if self._coming is None else self._coming.described
        return self.require_state() if described is None else described

    def build(self, inputs: Any) -> None:
        """Creates the variables for inputs like `inputs`, if there are none.

        Every process gets the values of process 0, which computes them in a thread. A process that
        is alone, and all within `building_meanwhile`, go on: whoever asks for the state waits for
        the values.
        """
        if self.owner is not None:
            if self.state is None:
                raise RuntimeError(
                    "The model that this view was made from has no variables yet: build or train "
                    "it first."
                )
            self.adapter.attach(inputs)
        elif not self.is_built:
            make = self.adapter.initializer(inputs, seed=self._seed)
            variables = None if make is None else self.steps.make_variables(make)
            if variables is None and self.steps.fused is not None:
                self._coming = coming_state(self.adapter, inputs, seed=self._seed)
            if self._coming is None:
                if variables is None:
                    held = _jax.finished(self.adapter.init(inputs, seed=self._seed))
                    variables = Variables(*collectives.broadcast(tuple(held)))
                self.build_from(variables)
            elif self._builds_meanwhile or jax.process_count() == 1:
                self._describe(self._coming)
            else:
                self.require_state()

    @contextmanager
    def building_meanwhile(self) -> Iterator[None]:
        """Lets `build` return before the variables are there; after the block they are.

        All processes must ask for the state in it at the same place. An error that ends the block
        drops variables that nobody has asked for, so that no process waits for another.
        """
        self._builds_meanwhile = True
        try:
            yield
            _ = self.state
        finally:
            self._coming, self._builds_meanwhile = None, False

    def require_state(self) -> TrainState:
        """Returns the state of a model that is built or builds itself; else a RuntimeError."""
        state = self.state
        if state is None and (inputs := self.adapter.sample_inputs()) is not None:
            self.build(inputs)
            state = self.state
        if state is None:
            raise RuntimeError(
                "The model has no variables yet. Call build(shape_or_sample), or fit, evaluate "
                "or predict first."
            )
        return state

    def build_from(self, variables: Variables) -> None:
        """Creates the state from arrays as of `adapter.init`, the same on every process."""
        self.state = self.steps.create_state(variables, self._start)

    def compile(
        self,
        parts: Parts,
        optimizer: optax.GradientTransformation,
        *,
        accumulation_steps: int = 1,
        on_nan: OnNaN | None = None,
    ) -> None:
        """Chooses what the steps compute, and starts the optimizer unless it runs already.

        Parameters and model state stay. The mean gradient of `accumulation_steps` makes one update;
        `on_nan` says what follows a step that is not finite, None to take it.
        """
        if self.traced is not None and not self._reopens:
            self.traced = Kept()
        self._reopens = False
        step = TrainingStep(parts, optimizer, accumulation_steps, on_nan)
        self.programs = CompiledSteps(self.steps, step, kept=self.traced)
        self.use_optimizer(optimizer, accumulation_steps=accumulation_steps)

    def use_optimizer(
        self, optimizer: optax.GradientTransformation, *, accumulation_steps: int = 1
    ) -> None:
        """Starts an optimizer afresh, unless it is the one that the state belongs to."""
        if optimizer is self._optimizer and accumulation_steps == self._accumulation_steps:
            return
        self._optimizer, self._accumulation_steps = optimizer, accumulation_steps
        if self._coming is not None:
            self._describe(self._coming)
        elif self.state is not None and self.owner is None:
            is_cut = any(not x.is_fully_replicated for x in jax.tree.leaves(self.state.params))
            held = Variables(self.state.params, self.state.model_state)
            self.build_from(held if is_cut else self.variables())

    def host_sums(self, leaves: Sequence[np.ndarray], batch: Batch) -> Any:
        """Returns sums of an epoch with given host leaves, for host batches like `batch`."""
        group = DeviceBatches(self.put(batch), 0)
        return self.programs.host_sums(leaves, group, self.require_state())

    def set_state(self, state: TrainState) -> None:
        """Puts a state of host or device arrays on every device."""
        self.state = self.steps.put_state(state)

    def gathered_state(self, *, alone: bool = False) -> TrainState:
        """Returns the state with what lies in parts replicated, gradients of ranks as their sum.

        All processes must call it, unless `alone` is True: a RuntimeError then refuses what is
        sharded over several.
        """
        state = self.require_state()
        if alone and not all(
            x.is_fully_addressable or x.is_fully_replicated
            for x in jax.tree.leaves((state.params, state.opt_state))
        ):
            raise RuntimeError(
                "With shard_optimizer_state, a mesh or a model that compares rows each process "
                "holds a part of the training state, so that one alone cannot save it. "
                "Save on every process: leave OnMaster out."
            )
        params, opt_state = jax.tree.map(self.gather, (state.params, state.opt_state))
        state = replace(state, params=params, opt_state=opt_state)
        if alone:
            return state
        rows = jax.tree.map(self._gather_rows, (state.accumulated, state.residual))
        return replace(state, accumulated=rows[0], residual=rows[1])

    def _gather_rows(self, x: jax.Array) -> jax.Array:
        """Returns `[ranks, ...]` as it is if this process holds it, else the sum `[1, ...]`."""
        return self.gather(jnp.sum(x, 0, keepdims=True)) if is_spread(x) else x

    def gather(self, x: jax.Array) -> jax.Array:
        """Returns an array replicated; of a sharded one all processes must ask for it."""
        if x.is_fully_replicated:
            return x
        with phases.waiting("parts of an array"):
            return jax.block_until_ready(self._replicated(x))

    def gather_like(self, x: jax.Array, other: jax.Array) -> jax.Array:
        """Returns an array that lies like `other`, whole or cut in the same way."""
        return x if x.sharding.is_equivalent_to(other.sharding, x.ndim) else self.gather(x)

    def variables(self) -> Variables:
        """Returns host copies of parameters and model state; of parts all processes must ask."""
        state = self.require_state()
        return Variables(
            *jax.tree.map(lambda x: np.array(self.gather(x)), (state.params, state.model_state))
        )

    def train_epoch(
        self,
        batches: Iterable[DeviceBatches],
        hooks: Hooks,
        *,
        first_index: int = 0,
        sums: Any = None,
    ) -> Any:
        """Trains on batches on the devices; returns the sums of the epoch, or None without a batch.

        `first_index` is the number of the first step in the epoch, `sums` are those of the steps
        before.
        """
        running = InFlight(is_alone=self._is_alone, most=self.most_in_flight)
        index, watch = first_index, self.programs.watch
        for group in batches:
            raise_after_step()
            hooks.on_batch_begin(index)
            # Read here, because a callback may have changed the steps.
            group, compiled = self._taken(group), self.programs
            self.ahead.wait()
            sums = compiled.zero_sums(group, self.require_state()) if sums is None else sums
            sums = sums if watch is None else watch.before(index, self.require_state(), sums)
            sums = self._run(group, sums)
            running.add(sums["loss"][1])
            index += group.num_steps
            if watch is not None:
                self.state, sums = watch.after(
                    index, self.require_state(), sums, self._with_real_rows(group)
                )
            if hooks.on_batch_end(index - 1, sums, group.num_rows):
                break
        if watch is not None and sums is not None:
            self.state, sums = watch.settle(self.require_state(), sums)
        return sums

    def _run(self, group: DeviceBatches, sums: Any) -> Any:
        def start() -> tuple[TrainState, Any]:
            # Read here, because a callback may have replaced the state.
            state = self.require_state()
            return self.programs.training(group, state, sums)(state, sums, group.batch)

        done = self._started(
            ("fit", group.num_rows),
            start,
            self.fewer_rows,
            partial(self.memory_of, group),
            takes_state=True,
        )
        if link() is not None:
            jax.block_until_ready(done)  # The state stays that of a complete step.
        self.state, sums = done
        # While a process is missing, another one is about to join, and needs the host.
        if self.traced is not None and self.steps_of is not None and is_complete():
            kind = self.runtime.mesh.size, group.num_steps, group.num_rows
            self.traced.runs[kind] += 1
            # Not beside the first step, for which the user waits.
            if self.traced.runs[kind] == _RUNS_BEFORE:
                self.ahead_of_loss.start(partial(self._lowered_for_fewer, self.steps_of, group))
        return sums

    def _lowered_for_fewer(
        self, steps_of: Callable[[Runtime], Steps], group: DeviceBatches
    ) -> jax.stages.Lowered | None:
        """Returns the step that follows the loss of a process; None if this one is alone."""
        job = self.runtime.without_a_process()
        if job is None or self._optimizer is None or group.shards is not None:
            return None
        steps = steps_of(job)
        step = self.programs.step._replace(
            optimizer=self._optimizer, accumulation_steps=self._accumulation_steps
        )
        programs = CompiledSteps(steps, step, kept=self.traced)
        whole = NamedSharding(job.mesh, PartitionSpec())
        state = descriptions(self.require_state(), sharding=whole)
        return programs.staged("lower", _described_on(steps, job.mesh, group), state)

    def _started(
        self,
        kind: tuple[str, int],
        start: Callable[[], Any],
        fewer_rows: Callable[[], bool] | None,
        memory: Callable[[], _jax.ProgramMemory],
        *,
        takes_state: bool = False,
    ) -> Any:
        """Starts a program; the first of a kind by `first_run` if its rows at once may be fewer."""
        if fewer_rows is None or kind in self._ran:
            return start()
        # A program may fail after it has taken the state.
        held = (
            jax.device_get(self.require_state())
            if takes_state and jax.process_count() == 1
            else None
        )
        done = first_run(
            start,
            devices=self.runtime.mesh.local_devices,
            computed_bytes=lambda: memory().computed_bytes,
            fewer_rows=fewer_rows,
            put_back=lambda: None if held is None else self.set_state(held),
        )
        self._ran.add(kind)
        return done

    def settle(self) -> None:
        """Raises the error of a step that was not finite, if one runs or has run, before a save."""
        if self._compiled is not None and self._compiled.watch is not None:
            self._compiled.watch.settle_before_saving(self.require_state())

    def end_epoch(self) -> None:
        """Raises if `on_nan="rollback"` has made no progress."""
        if (watch := self.programs.watch) is not None:
            watch.end_epoch(self.require_state())

    def _with_real_rows(self, group: DeviceBatches) -> DeviceBatches:
        """Returns batches with the real rows of the ranks that make a step together."""
        return group

    @property
    def of_group(self) -> "Trainer":
        """The trainer of the ranks that sum gradients in every step: of all, so this one.

        A trainer whose ranks train in groups has another one, for which the methods below differ.
        """
        return self

    @property
    def most_apart(self) -> int:
        """Steps by which another group may be ahead of this one."""
        return 0

    def alike_state(self) -> TrainState:
        """Returns the parts of the state that all ranks have alike; the others are None."""
        return self.require_state()

    def whole_sums(self, sums: Any) -> Any:
        """Returns the sums of an epoch over the rows of all groups."""
        return sums

    def end_training(self) -> None:
        """Makes the weights of all groups the same, at the end of `fit`."""

    def saved(self, sums: Any) -> tuple[Any, dict[str, Any]]:
        """Returns sums as a checkpoint holds them, and its further arrays by path."""
        return sums, {}

    def restore(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Takes the further arrays of a checkpoint; a ValueError if they are of other groups."""
        if any(path.startswith(OF_GROUPS) for path in arrays):
            raise ValueError(
                "The checkpoint is that of several groups of LocalSteps, and here all ranks train "
                "together. Start as many groups with the same sync=, or load the weights with "
                "load_weights into a new run."
            )

    def own_rows(self, tree: Any) -> Any:
        """Returns what belongs to this group of host arrays that `saved` returned."""
        return tree

    def evaluate(self, batches: Iterable[DeviceBatches], hooks: Hooks) -> Any:
        """Evaluates batches on the devices; returns their sums, or None if there was no batch."""
        compiled, state = self.programs, self.require_state()
        running = InFlight(is_alone=self._is_alone, most=self.most_in_flight)
        sums, index = None, 0
        for group in map(self._taken, batches):
            hooks.on_batch_begin(index)
            self.evaluation_ahead.wait()
            sums = compiled.zero_sums(group, state) if sums is None else sums
            sums = self._started(
                ("evaluate", group.num_rows),
                partial(self._evaluated, group, state, sums),
                self.fewer_evaluated_rows,
                partial(_memory_of, self.trace_evaluation, group),
            )
            running.add(sums["loss"][1])
            index += group.num_steps
            if hooks.on_batch_end(index - 1, sums, group.num_rows):
                break
        return sums

    def predict(self, batches: Iterable[DeviceBatches], hooks: Hooks) -> Any:
        """Returns outputs of all real rows in order, host arrays `[examples, ...]`, everywhere."""
        state, rows, index, first_row = self.require_state(), execution.RowsInOrder(), 0, 0
        for group in map(self._taken, batches):
            hooks.on_batch_begin(index)
            outputs = self._started(
                ("predict", group.num_rows),
                partial(self._predicted, group, state, first_row),
                self.fewer_evaluated_rows,
                partial(_memory_of, self.trace_prediction, group),
            )
            outputs = jax.tree.map(self._fetch, outputs)
            if group.num_steps == 1:
                outputs = jax.tree.map(lambda x: x[None], outputs)
            rows.add(outputs, group)
            index, first_row = index + group.num_steps, first_row + group.num_rows
            if hooks.on_batch_end(index - 1, None, group.num_rows):
                break
        return rows.joined()

    def _evaluated(self, group: DeviceBatches, state: TrainState, sums: Any) -> Any:
        step = self.programs.evaluation(group)
        return step(state.params, state.model_state, sums, group.batch)

    def _predicted(self, group: DeviceBatches, state: TrainState, first_row: int) -> Any:
        program, operands = self._prediction(group, state, first_row)
        return program(*operands)

    def _prediction(
        self, group: DeviceBatches, state: TrainState, first_row: int
    ) -> tuple[Any, tuple[Any, ...]]:
        operands = (state.params, state.model_state, group.batch.inputs)
        if group.num_steps == 1:
            return self.predict_step, (*operands, np.uint32(first_row))
        assert self._predict_steps is not None, "Steps that run one by one get one batch each."
        each = np.arange(group.num_steps) * (group.num_rows // group.num_steps)
        return self._predict_steps, (*operands, (first_row + each).astype(np.uint32))

    def described_batch(self, batch: Batch, num_rows: int) -> DeviceBatches:
        """Returns descriptions of a global batch of `num_rows` rows like those of `batch`."""
        mesh, num_ranks = self.runtime.mesh, self.rank_slice.num_ranks
        rows = micro_batch_size(num_rows, num_ranks) * num_ranks
        sharding = NamedSharding(mesh, PartitionSpec(_jax.rank_axes(mesh)))
        if self.steps.without_padding is not None:
            rows, sharding = num_rows, row_sharding(self.steps.mesh, num_rows)
        elif rows > num_rows:
            batch = batch._replace(mask=np.ones(1, np.float32))
        return DeviceBatches(descriptions(batch, rows=rows, sharding=sharding), num_rows)

    def memory_of(self, group: DeviceBatches) -> _jax.ProgramMemory:
        """Returns the memory of the step for a group of batches, which may be descriptions."""
        lowered = self.lower(group)
        if lowered is None:  # Its steps run one by one.
            one, num_rows = execution.described_batch(group), group.num_rows // group.num_steps
            lowered = self.lower(self.described_batch(one, num_rows))
        return _jax.ProgramMemory.of(lowered.compile())

    def lower_train_step(self, batch: Batch) -> Any:
        """Returns the lowered program, or `Programs`, of a step on batches like `batch`."""
        placed = self.put(batch)
        is_taken = self.steps.without_padding is not None and batch.mask is not None
        rows = int(self._fetch(placed.mask).sum()) if is_taken else 0
        return self.lower(DeviceBatches(placed, rows))

    def lower(self, group: DeviceBatches) -> Any:
        """Returns the same for the steps of a group of batches; None if they run one by one."""
        return self.programs.staged("lower", self._taken(group), self.described())

    def trace(self, group: DeviceBatches) -> Any:
        """Returns the traced program of a group of batches; None if it is not one program."""
        return self.programs.staged("trace", self._taken(group), self.described())

    def trace_evaluation(self, group: DeviceBatches) -> Any:
        """Returns the traced program that evaluates a group of batches; None if it is not one."""
        return self.programs.trace_evaluation(self._taken(group), self.described())

    def trace_prediction(self, group: DeviceBatches) -> Any:
        """Returns the traced program that predicts for a group of batches."""
        program, operands = self._prediction(group, self.described(), 0)
        return program.trace(*operands)

    @property
    def programs(self) -> CompiledSteps:
        """The steps of training and evaluation that `compile` has chosen."""
        assert self._compiled is not None, "compile() comes first."
        return self._compiled

    @programs.setter
    def programs(self, programs: CompiledSteps) -> None:
        self._ran.clear()
        self._compiled = programs

    def _taken(self, group: DeviceBatches) -> DeviceBatches:
        take = self.steps.without_padding
        return group if take is None else take(group)

    def _fetch(self, x: jax.Array) -> np.ndarray:
        """Returns a whole array that is sharded by row, on every process."""
        return np.asarray(_jax.finished(x if x.is_fully_addressable else self._replicated(x)))

    def _describe(self, coming: ComingState) -> None:
        coming.describe(partial(self.steps.describe_state, start=self._start))

    @property
    def _start(self) -> Start:
        return Start(self._optimizer or optax.identity(), self._seed, self._accumulation_steps)


OF_GROUPS = "groups/"
"""Start of the paths of arrays that groups of ranks have for themselves."""
# A step that has run so often is compiled for the ranks that a loss would leave.
_RUNS_BEFORE = 2


def _described_on(steps: Steps, mesh: Mesh, group: DeviceBatches) -> DeviceBatches:
    """Returns descriptions of a group's batches, divided among the ranks of other steps."""
    dim, num_ranks = int(group.num_steps > 1), steps.rank_slice.num_ranks
    num_real = group.num_rows // group.num_steps
    num_rows = micro_batch_size(num_real, num_ranks) * num_ranks
    leading = (None,) * dim
    sharding = NamedSharding(mesh, PartitionSpec(*leading, _jax.rank_axes(mesh)))

    def describe(x: Any) -> jax.ShapeDtypeStruct:
        shape = (*x.shape[:dim], num_rows, *x.shape[dim + 1 :])
        return jax.ShapeDtypeStruct(shape, x.dtype, sharding=sharding)

    batch = group.batch._replace(mask=None)
    like = jax.tree.leaves(batch)[0]
    if num_rows != num_real:
        mask = jax.ShapeDtypeStruct((*like.shape[:dim], num_rows), np.float32)
        batch = batch._replace(mask=mask)
    return group._replace(batch=jax.tree.map(describe, batch))


def _memory_of(trace: Callable[[DeviceBatches], Any], group: DeviceBatches) -> _jax.ProgramMemory:
    return _jax.TracedProgram(trace(group)).compile()


_FIRST = np.uint32(0)  # Rows of the data before the batch.


def steps_per_program(trainer: Trainer, wanted: int, batch: Batch) -> int:
    """Returns how many steps of evaluation share a program: as wanted, but 1 where that is slow."""
    if wanted == 1 or trainer.steps.fused is None or trainer.runtime.platform != "cpu":
        return wanted
    # Training gives all convolutions their features last; others are many times slower in loops.
    state = trainer.require_state()
    inputs = trainer.put(batch.inputs)
    operands = (state.params, state.model_state, inputs, _FIRST)
    return 1 if _jax.convolves_slowly_in_loops(trainer.predict_step, *operands) else wanted


def trace_outputs(trainer: Trainer, batch: Batch) -> tuple[Any, Any]:
    """Returns shapes and dtypes of the outputs, and `"sigmoid"`, `"softmax"` or `""` for each."""
    state = trainer.described()
    step: Any = trainer.predict_step
    if trainer.steps.fused is None:
        # Steps that run one by one have several programs, none of which says it alone.
        step = make_predict_step(trainer.adapter.apply, trainer.runtime.mesh)
    inputs = trainer.put(batch.inputs)
    traced = step.trace(state.params, state.model_state, inputs, _FIRST)
    activations = [activation or "" for activation in _jax.last_activations(traced)]
    return traced.out_info, jax.tree.unflatten(jax.tree.structure(traced.out_info), activations)


def local_outputs(trainer: Trainer, batch: Batch) -> Any:
    """Returns host arrays of the outputs for this process's rows of a batch, padding included."""
    state = trainer.require_state()
    with phases.in_phase("step"):
        outputs = _jax.finished(
            trainer.predict_step(state.params, state.model_state, trainer.put(batch.inputs), _FIRST)
        )
    return jax.tree.map(execution.local_rows, outputs)


def device_feed(
    trainer: Trainer,
    items: Iterator[HostBatch],
    unpack: Callable[[HostBatch], Batch],
    *,
    threaded: bool,
    num_steps: int = 1,
    gives_up: Callable[[], bool] | None = None,
) -> Feed:
    """Returns a feed of `DeviceBatches` for the steps of a trainer.

    `unpack` makes what a step takes of a host batch, in a thread if `threaded`. So many batches of
    equal shapes are put together for one program, unless steps run one by one. `gives_up` is that
    of `Feed`.
    """
    prepare = preparation_of(trainer, unpack, threaded=threaded)
    size = 1 if trainer.steps.fused is None else num_steps
    return Feed(in_groups(items, size), prepare, threaded=threaded, gives_up=gives_up)


def preparation_of(
    trainer: Trainer, unpack: Callable[[HostBatch], Batch], *, threaded: bool
) -> Callable[[list[HostBatch]], DeviceBatches]:
    """Returns the function that makes of some host batches what one program takes."""
    # Without a thread that hides its cost, device_put takes longer than the compiled step does to
    # fetch host arrays itself.
    is_local = not trainer.runtime.mesh.is_multi_process
    is_direct = is_local and not threaded and trainer.steps.takes_host_arrays

    def prepare(group: list[HostBatch]) -> DeviceBatches:
        batches = [unpack(item) for item in group]
        batch = batches[0] if len(group) == 1 else stack(batches)
        put = trainer.put if len(group) == 1 else trainer.put_stacked
        num_rows = sum(item.num_rows for item in group)
        return DeviceBatches(
            batch if is_direct else put(batch), num_rows, len(group), group[0].shards
        )

    return prepare
