"""Prepares compiled steps for a first batch: variables, losses, metrics and checks."""

from collections.abc import Callable
from typing import Any

from tnt_jax.adapters.base import CallError
from tnt_jax.data.layout import micro_batch_size
from tnt_jax.data.sources import HostBatch, Source
from tnt_jax.data.streams import EpochStream
from tnt_jax.distributed.host import collectives
from tnt_jax.distributed.host.collectives import raise_on_all_processes
from tnt_jax.distributed.joining import runtime
from tnt_jax.keras_compat.compiling.compilation import Compilation
from tnt_jax.keras_compat.compiling.compiled import Compiled
from tnt_jax.keras_compat.compiling.objective import CompiledObjective
from tnt_jax.keras_compat.compiling.row_checks import (
    PerRow,
    bytes_of_products,
    dependence_of_rows,
    outputs_per_row,
    real_rows,
    traced_dependence,
)
from tnt_jax.keras_compat.fit.data_intake import DataIntake, Weighting, require_targets, to_batch
from tnt_jax.keras_compat.fit.hooks import Progress
from tnt_jax.keras_compat.fit.resume import Resumption
from tnt_jax.keras_compat.keras_objects import is_keras
from tnt_jax.keras_compat.state.building import Builder, kinds
from tnt_jax.keras_compat.state.core import Core
from tnt_jax.keras_compat.state.model_state import ModelState
from tnt_jax.sharded import ShardedSteps
from tnt_jax.train.contracts import Batch
from tnt_jax.train.trainer import local_outputs, preparation_of, steps_per_program, trace_outputs


class Preparation:
    """Prepares a compiled model for its data."""

    def __init__(self, core: Core, state: ModelState, builder: Builder) -> None:
        self._core = core
        self._state = state
        self._builder = builder

    def prepare(self, first: HostBatch, weighting: Weighting | None = None) -> None:
        """Creates variables and compiled functions for data like `first`, and checks the data."""
        compilation = self._core.require_compiled()
        batch = to_batch(first, weighting)
        if compilation.needs_targets:
            require_targets(batch)
        self._builder.build_for(batch)
        kind = kinds((batch.inputs, batch.targets))
        if kind in compilation.known_kinds:
            return
        if compilation.announced_kind not in (None, kind):
            compilation.functions = None
        compilation.announced_kind = None
        try:
            functions = self._fitted(compilation, batch)
        except CallError as error:
            # The message says what to do; the traceback does not help.
            raise CallError(str(error)) from None
        if compilation.functions is None:
            self._compile(compilation, functions)
        compilation.known_kinds.add(kind)

    def prepare_announced(self, announced: HostBatch, weighting: Weighting | None) -> None:
        """Creates variables and compiled functions for data that is still being read.

        `prepare` follows, and checks the data. All processes must call it.
        """
        compilation = self._core.require_compiled()
        batch = to_batch(announced, weighting)
        if compilation.needs_targets:
            require_targets(batch)
        self._builder.build_for(batch)
        if (objective := compilation.arguments.objective) is not None:
            functions = CompiledObjective(objective)
        else:
            outputs, _ = trace_outputs(self._core.trainer, batch)
            functions = self._compared(compilation, outputs, batch)
        self._compile(compilation, functions)
        compilation.announced_kind = kinds((batch.inputs, batch.targets))

    def compile_ahead(
        self, stream: EpochStream, first: HostBatch, unpack: Callable[[HostBatch], Batch]
    ) -> None:
        """Begins to compile the first step of a model that has not been trained since `compile`.

        Called after `Core.choose_mesh`. Steps that share a program need an epoch that has so many.
        """
        compilation, trainer = self._core.require_compiled(), self._core.trainer.of_group
        prepare = preparation_of(trainer, unpack, threaded=not stream.source.in_memory)
        if runtime.is_to_join():
            # It has its steps from the others, and has to trace the sums alone.
            trainer.programs.zero_sums(prepare([first]), trainer.described())
            return
        num_steps = compilation.steps_per_execution or 1
        if trainer.steps.fused is None or compilation.compiled_kinds:
            return
        if num_steps > 1 and (stream.num_steps or 0) < num_steps:
            return
        trainer.ahead.start(lambda: trainer.lower(prepare([first] * num_steps)))

    def fit_memory(
        self, stream: EpochStream, first: HostBatch, unpack: Callable[[HostBatch], Batch]
    ) -> None:
        """Chooses a step that fits the memory of the devices, and compiles it; after `check_rows`.

        A ValueError says that no step fits.
        """
        trainer, compilation = self._core.trainer, self._core.require_compiled()
        num_steps = min(compilation.steps_per_execution or 1, stream.num_steps or 1)

        prepare = preparation_of(trainer, unpack, threaded=not stream.source.in_memory)

        def trace() -> Any:
            # Steps may run one by one, although several were asked for.
            several = trainer.trace(prepare([first] * num_steps)) if num_steps > 1 else None
            return several or trainer.trace(prepare([first]))

        trainer.ahead.wait()
        self._core.fit_memory("fit", unpack(first), trace)

    def trace_rows(
        self,
        first: HostBatch,
        weighting: Weighting | None = None,
        *,
        train: bool,
        source: Source | None = None,
    ) -> None:
        """Chooses the step by whether rows depend on one another, if the program says so.

        Called before `compile_ahead`; `check_rows` runs the program where that does not suffice.
        """
        compilation, core = self._core.require_compiled(), self._core
        if train in compilation.traced_rows or not core.cares_for_rows:
            return
        functions = compilation.functions
        assert functions is not None
        batch, per_row = to_batch(first, weighting), functions.per_row(core.adapter)
        dependence, is_known = traced_dependence(
            core.trainer,
            batch,
            per_row,
            train=train,
            sizes=functions.has_own_losses,
            last_rows=_last_rows(source, first.num_rows, core.trainer.rank_slice.num_ranks),
        )
        compilation.traced_rows.add(train)
        reason = dependence or (self._why_rows_move(batch, per_row) if train else None)
        if is_known or reason is not None:
            self._choose_step(reason, train=train)

    def _why_rows_move(self, batch: Batch, per_row: PerRow) -> str | None:
        """Returns why a step had better move rows than parameters; None if it had not."""
        core = self._core
        # mesh="auto" has measured the step that gathers.
        is_measured = core.has_open_mesh or core.memory_choice is not None
        if not isinstance(core.trainer.steps, ShardedSteps) or is_measured:
            return None
        nbytes = bytes_of_products(core.trainer, batch, per_row)
        if nbytes is None:  # The compiler would sum gradients in half precision, too.
            return None
        return core.trainer.steps.why_rows_move(core.trainer.described().params, nbytes)

    def check_rows(
        self, first: HostBatch, weighting: Weighting | None = None, *, train: bool
    ) -> None:
        """Chooses the step by whether rows depend on one another; all processes must call it.

        The check runs once per `compile` for training and once for evaluation.
        """
        self.trace_rows(first, weighting, train=train)
        compilation, core = self._core.require_compiled(), self._core
        if train in compilation.checked_rows or not core.cares_for_rows:
            return
        functions = compilation.functions
        assert functions is not None
        batch, per_row = to_batch(first, weighting), functions.per_row(core.adapter)
        sizes = functions.has_own_losses
        dependence = self._seen_dependence(batch, per_row, train=train, sizes=sizes)
        self._choose_step(dependence, train=train)

    def check_outputs(self, batch: Batch) -> None:
        """Does for the model's outputs alone what `check_rows` does; for prediction."""
        core = self._core
        is_checked = core.compilation is not None and False in core.compilation.checked_rows
        if is_checked or core.knows_outputs or not core.cares_for_rows:
            return
        per_row = outputs_per_row(core.adapter)
        try:
            dependence, is_known = traced_dependence(core.trainer, batch, per_row, train=False)
        except CallError as error:
            # The message says what to do; the traceback does not help.
            raise CallError(str(error)) from None
        if not is_known:
            dependence = self._seen_dependence(batch, per_row, train=False)
        core.knows_outputs, core.dependence_of_outputs = True, dependence
        core.choose_step_of_rows()

    def _seen_dependence(self, batch: Batch, per_row: PerRow, **options: bool) -> str | None:
        """Returns how rows depend on one another, as any process finds by running the function."""
        found = dependence_of_rows(self._core.trainer, batch, per_row, **options)
        notes = collectives.agree("check of rows", {}, note=found)
        return next(filter(None, notes), None)

    def _choose_step(self, dependence: str | None, *, train: bool) -> None:
        compilation = self._core.require_compiled()
        compilation.dependence = compilation.dependence or dependence
        compilation.checked_rows.add(train)
        self._core.choose_step_of_rows()

    def check_validation(self, source: Source) -> None:
        """Raises a ValueError if available validation data does not fit the model or the losses."""
        if source.in_memory:
            try:
                self.prepare(next(source.batches(0)))
            except ValueError as error:
                raise ValueError(f"validation_data does not fit. {error}") from None

    def compile_evaluation_ahead(self, source: Source) -> None:
        """Begins to compile the evaluation of validation data, beside the first steps of training.

        Called after `compile_ahead` and `check_validation`. Data must be in memory or announced.
        """
        compilation, trainer = self._core.require_compiled(), self._core.trainer
        if trainer.steps.fused is None or compilation.compiled_kinds:
            return
        if compilation.steps_per_execution is None:
            return  # The first epoch chooses it.
        announce = getattr(source, "announce", lambda: None)
        first = next(source.batches(0)) if source.in_memory else announce()
        if first is None:
            return
        batch = to_batch(first)
        if kinds((batch.inputs, batch.targets)) not in compilation.known_kinds:
            return
        num_steps = steps_per_program(trainer, compilation.steps_per_execution, batch)
        if num_steps > 1 and (source.num_batches or 0) < num_steps:
            return
        prepare = preparation_of(trainer, to_batch, threaded=not source.in_memory)
        trainer.evaluation_ahead.start(
            lambda: trainer.trace_evaluation(prepare([first] * num_steps)).lower()
        )

    def _fitted(self, compilation: Compilation, batch: Batch) -> Compiled | CompiledObjective:
        """Returns the losses and metrics for a new kind of data, after checking them against it."""
        arguments = compilation.arguments
        trainer = self._core.trainer
        if arguments.objective is not None:
            return CompiledObjective(arguments.objective)
        outputs, activations = trace_outputs(trainer, batch)
        compiled = self._compared(compilation, outputs, batch)
        raise_on_all_processes(_problem_of_first_batch(compiled, batch, None))
        compiled.check_traced(outputs, activations, batch.targets)
        if not compilation.known_kinds and compiled.looks_at_outputs:
            raise_on_all_processes(
                _problem_of_first_batch(compiled, batch, local_outputs(trainer, batch))
            )
        return compiled

    def _compared(self, compilation: Compilation, outputs: Any, batch: Batch) -> Compiled:
        module = self._core.module
        declared = getattr(module, "output_names", None) if is_keras(module) else None
        return Compiled(compilation.arguments, outputs, batch.targets, declared)

    def _compile(self, compilation: Compilation, functions: Compiled | CompiledObjective) -> None:
        """Chooses what the steps compute; they are compiled on their first run."""
        self._state.start_optimizer()
        self._core.compile_steps(functions)
        compilation.functions = functions
        runtime.log_start_phase("weights made")


class Shared:
    """State that `fit`, `evaluate`, `predict` and the calls for single batches share."""

    def __init__(self, core: Core) -> None:
        self.core = core
        self.progress = Progress()
        self.builder = Builder(core)
        self.state = ModelState(core)
        self.intake = DataIntake(core, self.builder)
        self.preparation = Preparation(core, self.state, self.builder)
        self.resumption = Resumption(core, self.progress)


def _last_rows(source: Source | None, batch_rows: int, num_ranks: int) -> int:
    """Returns the rows of a rank in the last batch, if it is known and they are fewer; else 0."""
    if source is None or source.num_examples is None or source.num_batches is None:
        return 0
    rest = source.num_examples - (source.num_batches - 1) * batch_rows
    is_smaller = num_ranks > 1 and 0 < rest < batch_rows
    last_rows, rows = (micro_batch_size(x, num_ranks) for x in (rest, batch_rows))
    return last_rows if is_smaller and last_rows < rows else 0


def _problem_of_first_batch(compiled: Compiled, batch: Batch, outputs: Any) -> ValueError | None:
    """Returns what is wrong with this process's rows of the first batch, and outputs if given."""
    try:
        compiled.check_first_batch(outputs, batch.targets, rows=real_rows(batch))
    except ValueError as error:
        return error
    return None
