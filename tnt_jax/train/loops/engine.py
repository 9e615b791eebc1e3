"""The host side of a distributed step: compilation, device arrays and steps in flight."""

import time
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from typing import Any, Literal

import jax
import numpy as np
from jax.core import Tracer
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from tnt_jax import _jax
from tnt_jax.adapters.nnx import check_unshared
from tnt_jax.data.feed import BATCHES_AHEAD
from tnt_jax.distributed import timeline
from tnt_jax.distributed.host import collectives
from tnt_jax.distributed.joining.runtime import Runtime
from tnt_jax.distributed.liveness import phases
from tnt_jax.distributed.sums.reduction import Reduction, choose_reduction
from tnt_jax.job import Slot
from tnt_jax.log import logger
from tnt_jax.train.execution import InFlight
from tnt_jax.train.health.recording import Recorder, changed_by_rounding, rounding_unit
from tnt_jax.train.loops.checkpoints import restores, save_recorded
from tnt_jax.train.loops.context import SummedMetric, refuse_passes
from tnt_jax.train.loops.dataset import DistributedBatch
from tnt_jax.train.loops.program import Program
from tnt_jax.train.memory_choice import (
    Way,
    choose,
    first_run,
    half_as_many,
    local_bytes,
    memory_limit,
)
from tnt_jax.train.state import digest, state_arrays
from tnt_jax.train.steps.epoch_sums import num_local_rows
from tnt_jax.train.steps.global_step import RealRows, divided, global_mesh, log_choice
from tnt_jax.train.steps.step import compiled


class Engine:
    """The programs of a user's step, which may take a key and return a state, on the ranks.

    Metrics that the step updates count its rows, unless it runs for a trial.
    """

    def __init__(
        self,
        function: Callable,
        name: str,
        runtime: Runtime,
        *,
        takes_key: bool,
        trains: bool,
        rows_at_once: int | Literal["auto"] | None = None,
        counts: bool = True,
    ) -> None:
        self.runtime, self.name, self.trains, self._counts = runtime, name, trains, counts
        self._rows_at_once: int | Literal["auto"] | None = rows_at_once
        reduction = choose_reduction(runtime.platform, runtime.num_ranks, settings=runtime.settings)
        self._program = Program(
            function, name, runtime.platform, reduction, takes_key=takes_key, trains=trains
        )
        self._placement = _Placement(name, runtime.mesh)
        # By whether batches are stacked: the program, and the rows at once where memory chose them.
        self._compiled: dict[bool, Callable] = {}
        self._chosen: dict[bool, int | None] = {}
        # Kinds of batches whose program has found memory.
        self._ran: set[tuple[bool, int]] = set()
        self._metrics = _Metrics([], [], self._placement, counts=counts)
        self._take: RealRows | None = None
        self.comparison: str | None = None
        """How the step compares rows, so that the compiler divides it and sums gradients."""
        fits_memory = rows_at_once == "auto" and runtime.platform == "cpu"
        self._running = InFlight(most=0 if fits_memory else None)
        self._words: tuple[Any, Any] = (None, None)
        # Number of the batch that is expected next, and the same on the devices.
        self._next: tuple[int | None, Any] = (None, None)
        self._recorder = _recorder_of(runtime) if trains else None

    def run(
        self, state: Any, batch: DistributedBatch, key: Any, *, stacked: bool
    ) -> tuple[Any, Any]:
        """Runs the program of one step, or of stacked ones; returns state and metrics."""
        self._check_arguments(batch, key, stacked=stacked)
        if self._recorder is not None and not self._recorder.has_begun:
            self._check_recorded(state)
        start_ns = time.perf_counter_ns()
        state = self._placement.place(state)
        words = self._key_words(key)
        # For the errors of processes that stand elsewhere.
        here = phases.here()
        here.epoch, here.step = batch.epoch + 1, batch.index + 1
        number = self._next[1] if self._next[0] == batch.step else np.int32(batch.step)
        phase: phases.Phase = "steps" if stacked else "step"
        kind = (stacked, batch.num_rows)
        with phases.in_phase(phase if stacked in self._compiled else "compile"):
            program = self._compiled.get(stacked) or self._compile(state, batch, words, number)
            arguments = state, (self._metrics.totals(), number), self._taken(batch), words
            if self._recorder is not None:
                arguments = self._begin_record(program, batch, arguments), *arguments[1:]
            if stacked in self._chosen and kind not in self._ran:
                state, carried, metrics = self._first_run(arguments, stacked=stacked)
                self._ran.add(kind)
            else:
                state, carried, metrics = program(*arguments)
            totals, number = carried
            self._metrics.replace(totals)
            self._next = batch.step + (batch.num_steps or 1), number
            self._running.add(number)
        kind = "train step" if self.trains else "test step"
        last = batch.index + (batch.num_steps or 1)
        timeline.add(kind, "step", start_ns, epoch=batch.epoch + 1, step=last)
        if self._recorder is not None:
            place = {"epoch": batch.epoch, "batch": last - 1, "num_rows": batch.num_rows}
            step = batch.step + last - batch.index
            self._recorder.end_step(step, state_arrays(state), state_arrays(metrics), **place)
            self._recorder.end_killed(lambda: save_recorded(state))
        return state, metrics

    def on(self, runtime: Runtime, reduction: Reduction | None = None) -> "Engine":
        """Returns the same step for trials, on other devices or with another form of sums."""
        program = self._program
        other = Engine(
            program.function,
            self.name,
            runtime,
            takes_key=program.takes_key,
            trains=self.trains,
            rows_at_once=self._rows_at_once,
            counts=False,
        )
        other._program = replace(other._program, reduction=reduction or other._program.reduction)
        return other

    def trace(self, state: Any, batch: DistributedBatch, key: Any) -> Any:
        """Returns the traced program of the step."""
        state, words = self._placement.place(state), self._key_words(key)
        number, stacked = np.int32(batch.step), batch.num_steps is not None
        program: Any = self._compiled.get(stacked) or self._compile(state, batch, words, number)
        carried = self._metrics.totals(), number
        return program.trace(state, carried, self._taken(batch), words)

    def _taken(self, batch: DistributedBatch) -> Any:
        if self._take is None:
            return batch.arrays
        return self._take(batch.arrays, batch.real_rows, dim=int(batch.num_steps is not None))

    def _check_recorded(self, state: Any) -> None:
        """Ends the script if its steps cannot be recorded as it was asked for."""
        recorder, name = self._recorder, self.name
        assert recorder is not None
        if recorder.kind == "sharded":
            recorder.leave_out(
                f"{name} updates its state itself, the whole of it on every rank: in a custom "
                "training loop no state is sharded."
            )
        if recorder.kind in ("killed", "resumed") and not restores(state):
            recorder.leave_out(
                f"The loop does not restore the state of {name} by tnt_jax.LoopCheckpoints before "
                "its first step."
            )

    def _begin_record(
        self, program: Any, batch: DistributedBatch, arguments: tuple[Any, ...]
    ) -> Any:
        """Notes a batch, and before the first the state; returns the state to go on with."""
        recorder, state = self._recorder, arguments[0]
        assert recorder is not None
        if not recorder.has_begun:
            known = state_arrays(state)
            traced = program.trace(*arguments)
            unit = rounding_unit(known, traced.lower().as_text(), self.runtime.platform)
            drawn = _jax.draws_in(traced.jaxpr.jaxpr, _ORDINARY_KEY)
            recorder.begin(
                batch.step,
                known,
                unit=unit,
                trained_by=self.name,
                drawn=[list(shape) for name, shape in drawn if name == "random_bits"],
                rows_of_rank=self._rows_of_rank(batch.arrays, stacked=batch.num_steps is not None),
            )
            if recorder.kind == "rounded":
                state = changed_by_rounding(state, unit)
        recorder.note_batch(batch.arrays, batch.real_rows, dim=int(batch.num_steps is not None))
        return state

    def _compile(self, state: Any, batch: DistributedBatch, words: Any, number: Any) -> Callable:
        """Compiles the step; with its rows in two passes if that is to be recorded."""
        recorder = self._recorder
        if recorder is None or recorder.kind != "passes":
            return self._compile_as_is(state, batch, words, number)
        num_rows = self._rows_of_rank(batch.arrays, stacked=batch.num_steps is not None)
        if num_rows == 1:
            recorder.leave_out("A rank has one row, which cannot be computed in two passes.")
        self._rows_at_once = -(-num_rows // 2)
        try:
            return self._compile_as_is(state, batch, words, number)
        except ValueError as error:  # In one pass the step has run.
            recorder.leave_out(str(error))

    def _compile_as_is(
        self, state: Any, batch: DistributedBatch, words: Any, number: Any
    ) -> Callable:
        stacked = batch.num_steps is not None
        one = batch.arrays
        if stacked:
            one = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), one)
        mesh, in_passes = self.runtime.mesh, self._rows_at_once is not None
        metrics, sums, operation = self._program.prepared(
            mesh, state, one, words, in_passes=in_passes
        )
        self._metrics = _Metrics(metrics, sums, self._placement, counts=self._counts)
        if in_passes:
            arguments = state, (self._metrics.totals(), number), batch.arrays, words
            self._check_passes(operation, state, one, words)
            program = self._in_passes(arguments, stacked=stacked)
        elif operation is None:
            program = self._jitted(None, stacked=stacked)
        else:
            mesh = self._with_whole_batches(operation)
            mapped = self._program.mapped(mesh, stacked=stacked)
            program = divided(
                mapped,
                mesh,
                at=2,
                dim=int(stacked),
                donate_argnums=0 if self.trains else (),
                out_shardings=NamedSharding(mesh, PartitionSpec()),
            )
        self._compiled[stacked] = program
        return program

    def _jitted(self, rows_at_once: int | None, *, stacked: bool) -> Callable:
        """Returns the program that computes the gradients of so many rows at once."""
        program, mesh = replace(self._program, rows_at_once=rows_at_once), self.runtime.mesh
        mapped = program.mapped(mesh, stacked=stacked)
        return compiled(mapped, mesh, donate_argnums=0 if program.trains else ())

    def _check_passes(self, operation: str | None, state: Any, batch: Any, words: Any) -> None:
        """Raises a ValueError if several passes would give other results, whatever is chosen."""
        mesh = self.runtime.mesh
        if operation is not None:
            refuse_passes(self.name, f"it compares rows of a batch, by {operation}")
        if (num_rows := num_local_rows(batch) // mesh.size) > 1:
            two_passes = replace(self._program, rows_at_once=num_rows - 1)
            two_passes.prepared(mesh, state, batch, words)

    def _in_passes(self, arguments: tuple[Any, ...], *, stacked: bool) -> Callable:
        """Returns the program with the rows at once that were asked for, or that fit the memory."""
        if isinstance(self._rows_at_once, int):
            return self._jitted(self._rows_at_once, stacked=stacked)
        jitted: Any = cache(partial(self._jitted, stacked=stacked))

        def program(rows_at_once: int | None) -> _jax.TracedProgram:
            return _jax.TracedProgram(jitted(rows_at_once).trace(*arguments))

        state, _, arrays, _ = arguments
        waiting = BATCHES_AHEAD * local_bytes(arrays)
        floor = local_bytes((state, arrays)) + waiting
        way = Way("", floor, 0, program, waiting, self._rows_of_rank(arrays, stacked=stacked))
        setting = self.runtime.settings.device_memory
        limit = memory_limit(self.runtime.mesh.local_devices, setting, state)
        choice = choose(f'{self.name}(rows_at_once="auto")', [way], limit)
        logger.info("%s.", choice)
        self._chosen[stacked] = choice.rows_at_once
        return jitted(choice.rows_at_once)

    def _rows_of_rank(self, arrays: Any, *, stacked: bool) -> int:
        return jax.tree.leaves(arrays)[0].shape[int(stacked)] // self.runtime.mesh.size

    def _first_run(self, arguments: tuple[Any, ...], *, stacked: bool) -> Any:
        """Runs a program whose rows at once memory has chosen; see `first_run`."""
        state, *others = arguments
        # A program that fails may have taken the state.
        held = jax.device_get(state) if jax.process_count() == 1 else None

        def computed_bytes() -> int:
            program: Any = self._compiled[stacked]
            return _jax.TracedProgram(program.trace(state, *others)).compile().computed_bytes

        def put_back() -> None:
            nonlocal state
            state = _jax.replicate(held, self.runtime.mesh)

        def fewer_rows() -> bool:
            num_rows = self._rows_of_rank(others[1], stacked=stacked)
            fewer = half_as_many(num_rows, self._chosen[stacked])
            if fewer is not None:
                self._chosen[stacked] = fewer
                self._compiled[stacked] = self._jitted(fewer, stacked=stacked)
            return fewer is not None

        return first_run(
            lambda: self._compiled[stacked](state, *others),
            devices=self.runtime.mesh.local_devices,
            computed_bytes=computed_bytes,
            fewer_rows=fewer_rows,
            put_back=put_back,
        )

    def _with_whole_batches(self, operation: str) -> Mesh:
        """Returns the mesh of steps that compare rows."""
        mesh = global_mesh(self.runtime.mesh)
        if self._take is None:
            self.comparison = f"{self.name} compares rows of a batch, by {operation}"
            log_choice(self.comparison, self.runtime.num_ranks)
            self._take = RealRows(mesh)
        self._program = replace(self._program, reduction=Reduction("xla"))
        return mesh

    def _check_arguments(self, batch: Any, key: Any, *, stacked: bool) -> None:
        name = self.name
        if not isinstance(batch, DistributedBatch):
            raise TypeError(
                f"{name} takes batches of a distributed dataset, but got a {type(batch).__name__}. "
                "Make one by tnt_jax.distribute(data) and loop over it."
            )
        if stacked and batch.num_steps is None:
            raise TypeError(
                f"{name}.scan takes stacked batches, but got one batch. Loop over "
                f"dataset.stacked(), or call {name} itself."
            )
        if not stacked and batch.num_steps is not None:
            raise TypeError(
                f"{name} takes one batch, but got {batch.num_steps} stacked ones. Pass them to "
                f"{name}.scan, or loop over the dataset itself."
            )
        if (key is not None) != self._program.takes_key:
            raise TypeError(
                f"{name} needs a key: pass jax.random.key(seed), the same in every step."
                if self._program.takes_key
                else f"{name} takes no key, but got one. Let the function take it: {name}(state, "
                f"batch, key)."
            )

    def _key_words(self, key: Any) -> Any:
        if key is not self._words[0]:
            words = np.asarray(_jax.key_words(key))
            if words.shape != (2,) or words.dtype != np.uint32:
                raise TypeError(
                    "A key must be one of JAX's default kind, jax.random.key(seed), but is "
                    f"{key!r}."
                )
            self._words = key, words
        return self._words[1]


# The keys of steps, which draw by row, are of another kind.
_ORDINARY_KEY = jax.eval_shape(lambda: jax.random.key(0)).dtype
_recorders = Slot[list[Recorder]](list)


def _recorder_of(runtime: Runtime) -> Recorder | None:
    """Returns what records the steps of the first engine of a job, if they are to be recorded."""
    if runtime.settings.record_steps is None or _recorders.get():
        return None
    _recorders.get().append(Recorder(runtime, lambda x: x))
    return _recorders.get()[0]


class _Placement:
    """Puts the state of the step `name` on every device of a mesh, unless it lies there already."""

    def __init__(self, name: str, mesh: Mesh) -> None:
        self._name = name
        self._mesh = mesh
        self._sharding = NamedSharding(mesh, PartitionSpec())
        # By identity, with which a step of a small model is found in place fastest.
        self._known: dict[int, Any] = {}

    def place(self, state: Any) -> Any:
        """Returns a state on every device; of one that lies elsewhere, a copy."""
        known = self._known
        leaves = jax.tree.leaves(state)
        if leaves and isinstance(leaves[0], Tracer):
            raise TypeError(
                f"{self._name} is a program of its own and cannot be traced: call it outside of "
                f"jax.jit, jax.lax.scan and other steps. Many steps in one program are "
                f"{self._name}.scan(state, batches) with batches of dataset.stacked()."
            )
        for x in leaves:
            if id(getattr(x, "sharding", None)) not in known or x.is_deleted():
                return self._placed(state, leaves)
        return state

    def _placed(self, state: Any, leaves: list[Any]) -> Any:
        arrays = [x for x in leaves if isinstance(x, jax.Array)]
        # JAX may end the process where it is given deleted arrays.
        for path, x in jax.tree_util.tree_leaves_with_path(state):
            if isinstance(x, jax.Array) and x.is_deleted():
                raise ValueError(
                    f"The state{jax.tree_util.keystr(path)} was given to an earlier step, which "
                    "has used its memory again (donated it). Go on with the state that the step "
                    f"returned: state, metrics = {self._name}(state, batch)."
                )
        whole = self._sharding
        if len(arrays) == len(leaves) and all(
            x.sharding.is_equivalent_to(whole, x.ndim) for x in arrays
        ):
            self._known |= {id(x.sharding): x.sharding for x in arrays}
            return state
        check_unshared(state)
        state = jax.tree.map(_jax.local_copy, state)
        self._check_equal(state)
        return _jax.replicate(state, self._mesh)

    def _check_equal(self, state: Any) -> None:
        if jax.process_count() == 1:
            return
        sums = {
            jax.tree_util.keystr(path): digest(_jax.key_words(leaf))
            for path, leaf in jax.tree_util.tree_leaves_with_path(state)
        }
        first, *_ = told = collectives.agree(self._name, {}, note=sums)
        for process, other in enumerate(told):
            differing = [path for path in {**first, **other} if first.get(path) != other.get(path)]
            if differing:
                raise ValueError(
                    f"{self._name} needs the same state on every process, but state{differing[0]} "
                    f"({len(differing)} of {len(first)} arrays) of process {process} differs from "
                    f"that of process 0. Seed all alike, or take one's: "
                    f"state = tnt_jax.broadcast_state(state)."
                )


class _Metrics:
    """Metrics that a step updates, unless it `counts` nothing, and the arrays they add up."""

    def __init__(
        self, metrics: list[SummedMetric], shapes: list[Any], placement: _Placement, *, counts: bool
    ) -> None:
        self._metrics, self._shapes, self._placement = metrics, shapes, placement
        self._own = None if counts else jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), shapes)

    def totals(self) -> list[Any]:
        if not self._metrics:
            return []
        if self._own is not None:
            self._own = self._placement.place(self._own)
            return self._own
        pairs = zip(self._metrics, self._shapes, strict=True)
        # They may have been reset, or updated elsewhere.
        return self._placement.place([metric.sums(shape) for metric, shape in pairs])

    def replace(self, totals: list[Any]) -> None:
        if self._own is not None:
            self._own = totals
            return
        for metric, sums in zip(self._metrics, totals, strict=True):
            metric.replace_sums(sums)
