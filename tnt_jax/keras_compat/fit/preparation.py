"""Opens the data of calls, and prepares compiled steps for it: variables, losses and checks."""

from functools import partial
from typing import Any

import jax
import numpy as np

from tnt_jax.adapters.base import CallError
from tnt_jax.data.arguments import check_arguments, check_numbers, is_arrays, is_taken_apart
from tnt_jax.data.elements import unpack
from tnt_jax.data.layout import ReadOptions, micro_batch_size, num_padded_rows
from tnt_jax.data.sources import Source, array_source
from tnt_jax.data.streams import EpochStream
from tnt_jax.distributed.host import collectives
from tnt_jax.distributed.joining import runtime
from tnt_jax.keras_compat.compiling.compiled import Compiled
from tnt_jax.keras_compat.compiling.objective import CompiledObjective
from tnt_jax.keras_compat.compiling.row_checks import (
    PerRow,
    bytes_of_products,
    dependence_of_rows,
    outputs_per_row,
    traced_dependence,
)
from tnt_jax.keras_compat.fit.data_intake import (
    DataArguments,
    Plan,
    input_problem,
    kinds,
    require_targets,
    shapes,
    signature_tells,
    to_batch,
    unusable_inputs,
)
from tnt_jax.keras_compat.fit.hooks import Progress
from tnt_jax.keras_compat.fit.resume import Resumption
from tnt_jax.keras_compat.keras_objects import is_keras
from tnt_jax.keras_compat.state.core import Core
from tnt_jax.keras_compat.state.model_state import ModelState
from tnt_jax.log import logger
from tnt_jax.sharded import ShardedSteps
from tnt_jax.train.contracts import Batch
from tnt_jax.train.steps.epoch_sums import num_real_local_rows
from tnt_jax.train.trainer import local_outputs, preparation_of, steps_per_program, trace_outputs

# The number of characters that an error quotes of another.
_QUOTED = 400


class Shared:
    """What all calls of a `Model` share: its state, and how its steps are prepared for data."""

    def __init__(self, core: Core) -> None:
        self.core = core
        self.progress = Progress()
        self.state = ModelState(core)
        self.resumption = Resumption(core, self.progress)
        # Structures of inputs that the module has accepted, and shapes of inputs that the model was
        # called with, by their kind.
        self._known_structures: set[Any] = set()
        self._known_inputs: dict[Any, str] = {}

    def source(self, data: DataArguments, *, trains: bool = False) -> Source:
        """Returns the source of the global batches; groups of ranks may train with other rows."""
        x, y, sample_weight = data.x, data.y, data.sample_weight
        if self._is_taken_apart(data):
            x, y, sample_weight = unpack(x if isinstance(x, tuple) else tuple(x))
        if data.predicts:
            y = sample_weight = None
        check_arguments(x, y, sample_weight)
        trainer, options = self.core.trainer, self.core.options
        if not data.distribute and trainer.runtime.shares_ranks:
            raise ValueError(
                "tnt_distribute_dataset=False needs processes with rows of their own, but on this "
                "mesh several processes work on the same rows. Give each process all devices of "
                "the axes 'stage' and 'tensor', or let tnt_jax distribute the data."
            )
        rank_slice = (trainer.of_group if trains else trainer).rank_slice
        sizes = (data.batch_size, data.rows_per_rank)
        reading = ReadOptions(
            rank_slice, *sizes, data.shuffle, options.seed, data.distribute, options.reproducible
        )
        if is_arrays(x):
            return array_source(x, y, sample_weight, reading)
        # The readers of all other kinds of data are imported with the first of it.
        from tnt_jax.data.dispatch import as_source

        return as_source(x, y, sample_weight, reading)

    def log_plan(self, stream: EpochStream) -> None:
        """Logs once how the data is distributed."""
        source = stream.source
        rank_slice = self.core.trainer.rank_slice
        num_ranks = rank_slice.num_ranks
        size, examples, steps = source.global_batch_size, source.num_examples, stream.num_steps
        logger.info(
            "Global batch %s = %s rows on each of %d %s; %s examples, %s steps per epoch; %s "
            "padded row(s) per full batch, %s in the last one; shuffle seed %d.",
            size,
            None if size is None else micro_batch_size(size, num_ranks),
            num_ranks,
            rank_slice.kind,
            examples or "an unknown number of",
            steps or "an unknown number of",
            None if size is None else num_padded_rows(size, num_ranks),
            num_padded_rows(examples % size or size, num_ranks) if size and examples else "unknown",
            self.core.options.seed,
        )

    def _is_taken_apart(self, data: DataArguments) -> bool:
        """Returns whether `x` alone is `(inputs, targets[, weights])` and not several inputs."""
        if data.is_inputs or not is_taken_apart(data.x, data.y, data.sample_weight):
            return False
        if not data.predicts:
            return self.core.compilation is not None and self.core.calls_model
        num = self.core.trainer.rank_slice.local_ranks
        few = jax.tree.map(
            lambda x: np.zeros((num, *np.shape(x)[1:]), np.asarray(x[:1]).dtype), data.x
        )
        return self._input_error(few) is not None and self._input_error(few[0]) is None

    def _input_error(self, inputs: Any) -> ValueError | None:
        """Returns what is wrong with inputs; if the signature does not tell, the model is built."""
        core, structure = self.core, jax.tree.structure(inputs)
        if (problem := input_problem(core.module, inputs)) is not None:
            return ValueError(problem)
        if (
            structure in self._known_structures
            or not core.calls_model
            or signature_tells(core.module, inputs)
        ):
            return None
        try:
            core.trainer.build(inputs)
            trace_outputs(core.trainer, Batch(inputs))
        except Exception as error:
            unusable = ValueError(unusable_inputs(core.module, inputs, error))
            unusable.__cause__ = error
            return unusable
        self._known_structures.add(structure)
        return None

    def build_for(self, batch: Batch) -> None:
        """Creates missing variables, and applies changes that the user made to the object."""
        # Named as arguments, though they may come from a dataset.
        given = {"x": batch.inputs, "y": batch.targets, "sample_weight": batch.weight}
        for name, value in given.items():
            for leaf in jax.tree.leaves(value):
                check_numbers(name, leaf)
        core, trainer = self.core, self.core.trainer
        # Whether a kind of inputs is accepted depends on whether steps call the model on them.
        kind, known = (kinds(batch.inputs), core.calls_model), self._known_inputs
        was_built = trainer.is_built
        if kind not in known and (error := self._input_error(batch.inputs)) is not None:
            raise error
        trainer.build(batch.inputs)
        # While fit runs, only what callbacks assign is news in the wrapped object.
        if core.is_fitting:
            core.read_assigned()
        elif core.take_over_changes(batch.inputs) and core.compilation is not None:
            core.compilation.forget_data()
            core.forget_passes()
        if kind in known:
            return
        if was_built and core.calls_model and known:
            try:
                trace_outputs(trainer, batch)
            except CallError:
                raise
            except Exception as error:  # Any error of a module; the message quotes it.
                reason = f"{type(error).__name__}: {error}".split(" (https://")[0][:_QUOTED]
                raise ValueError(
                    f"The model {core.adapter.name!r} cannot be called with inputs "
                    f"{shapes(batch.inputs)}; before, they were {next(iter(known.values()))}. Pass "
                    "inputs of the shape for which its variables were created. It says: "
                    f"{reason}"
                ) from None
        known[kind] = shapes(batch.inputs)

    def prepare(self, batch: Batch, *, is_announced: bool = False) -> None:
        """Creates variables and compiled functions for data like `batch`, and checks the data.

        If it is announced, and still being read, the next call checks it. All processes call this.
        """
        core, compilation = self.core, self.core.require_compiled()
        arguments = compilation.arguments
        if jax.tree.leaves((arguments.loss, arguments.metrics, arguments.weighted_metrics)):
            require_targets(batch)
        self.build_for(batch)
        kind = kinds((batch.inputs, batch.targets))
        if kind in compilation.known_kinds:
            return
        if compilation.announced_kind not in (None, kind):
            compilation.functions = None
        compilation.announced_kind = kind if is_announced else None
        try:
            functions = self._functions(batch, checks=not is_announced)
        except CallError as error:
            # The message says what to do; the traceback does not help.
            raise CallError(str(error)) from None
        if compilation.functions is None:
            self.state.start_optimizer()
            core.compile_steps(functions)
            compilation.functions = functions
            runtime.log_start_phase("weights made")
        if not is_announced:
            compilation.known_kinds.add(kind)

    def _functions(self, batch: Batch, *, checks: bool) -> Compiled | CompiledObjective:
        """Returns losses and metrics for a kind of data, checked against it if that is wanted."""
        core, compilation = self.core, self.core.require_compiled()
        if compilation.arguments.objective is not None:
            return CompiledObjective(compilation.arguments.objective)
        outputs, activations = trace_outputs(core.trainer, batch)
        declared = getattr(core.module, "output_names", None) if is_keras(core.module) else None
        functions = Compiled(compilation.arguments, outputs, batch.targets, declared)
        if checks:
            check = partial(
                functions.check_first_batch, batch.targets, rows=num_real_local_rows(batch)
            )
            collectives.call_on_all_processes(check)
            functions.check_traced(outputs, activations, batch.targets)
            looks_at_outputs = any(spec.looks_at_outputs for spec in functions.specs)
            if looks_at_outputs and not compilation.known_kinds:
                local = local_outputs(core.trainer, batch)
                collectives.call_on_all_processes(partial(check, local))
        return functions

    def compile_ahead(self, plan: Plan) -> None:
        """Begins to compile the first step of a model; called after `Core.choose_mesh`."""
        compilation, trainer = self.core.require_compiled(), self.core.trainer.of_group
        prepare = preparation_of(trainer, plan.unpack, threaded=not plan.stream.source.in_memory)
        if runtime.is_to_join():
            # It has its steps from the others, and has to trace the sums alone.
            trainer.programs.zero_sums(prepare([plan.first]), trainer.described())
            return
        num_steps = compilation.steps_per_execution or 1
        are_enough = num_steps == 1 or (plan.stream.num_steps or 0) >= num_steps
        if trainer.steps.fused is not None and not compilation.compiled_kinds and are_enough:
            trainer.ahead.start(lambda: trainer.lower(prepare([plan.first] * num_steps)))

    def fit_memory(self, plan: Plan, *, goes_on: bool = False) -> None:
        """Does what `Core.fit_memory` does, for training."""
        trainer, compilation = self.core.trainer, self.core.require_compiled()
        num_steps = min(compilation.steps_per_execution or 1, plan.stream.num_steps or 1)
        prepare = preparation_of(trainer, plan.unpack, threaded=not plan.stream.source.in_memory)

        def trace() -> Any:
            # Steps may run one by one, although several were asked for.
            several = trainer.trace(prepare([plan.first] * num_steps)) if num_steps > 1 else None
            return several or trainer.trace(prepare([plan.first]))

        trainer.ahead.wait()
        self.core.fit_memory("fit", plan.unpack(plan.first), trace, goes_on=goes_on)

    def check_rows(
        self, batch: Batch, *, train: bool, may_run: bool = True, plan: Plan | None = None
    ) -> None:
        """Chooses the step by whether rows depend on one another, as the program or a run tells."""
        compilation, core = self.core.require_compiled(), self.core
        if train in compilation.checked_rows or not core.cares_for_rows:
            return
        functions = compilation.functions
        assert functions is not None
        per_row, sizes = functions.per_row(core.adapter), functions.has_own_losses
        reason, is_known = None, False
        if train not in compilation.traced_rows:
            num_ranks = core.trainer.rank_slice.num_ranks
            last_rows = 0 if plan is None else _last_rows(plan, num_ranks)
            reason, is_known = traced_dependence(
                core.trainer, batch, per_row, train=train, sizes=sizes, last_rows=last_rows
            )
            compilation.traced_rows.add(train)
            if reason is None and train:
                reason = self._why_rows_move(batch, per_row)
        if reason is None and not is_known:
            if not may_run:
                return
            reason = self._seen_dependence(batch, per_row, train=train, sizes=sizes)
        compilation.dependence = compilation.dependence or reason
        compilation.checked_rows.add(train)
        core.choose_step_of_rows()

    def _why_rows_move(self, batch: Batch, per_row: PerRow) -> str | None:
        """Returns why a step had better move rows than parameters; None if it had not."""
        core = self.core
        # mesh="auto" has measured the step that gathers.
        is_measured = core.has_open_mesh or core.memory_choice is not None
        if not isinstance(core.trainer.steps, ShardedSteps) or is_measured:
            return None
        nbytes = bytes_of_products(core.trainer, batch, per_row)
        if nbytes is None:  # The compiler would sum gradients in half precision, too.
            return None
        return core.trainer.steps.why_rows_move(core.trainer.described().params, nbytes)

    def check_outputs(self, batch: Batch) -> None:
        """Does for the model's outputs alone what `check_rows` does; for prediction."""
        core = self.core
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
        found = dependence_of_rows(self.core.trainer, batch, per_row, **options)
        notes = collectives.agree("check of rows", {}, note=found)
        return next(filter(None, notes), None)

    def check_validation(self, source: Source) -> None:
        """Raises a ValueError if available validation data does not fit the model or the losses."""
        if source.in_memory:
            try:
                self.prepare(to_batch(next(source.batches(0))))
            except ValueError as error:
                raise ValueError(f"validation_data does not fit. {error}") from None

    def compile_evaluation_ahead(self, source: Source) -> None:
        """Begins to compile evaluation for data in memory or announced; after `compile_ahead`."""
        compilation, trainer = self.core.require_compiled(), self.core.trainer
        wanted = compilation.steps_per_execution  # None until the first epoch chooses it.
        if trainer.steps.fused is None or compilation.compiled_kinds or wanted is None:
            return
        announce = getattr(source, "announce", lambda: None)
        first = next(source.batches(0)) if source.in_memory else announce()
        if first is None:
            return
        batch = to_batch(first)
        if kinds((batch.inputs, batch.targets)) not in compilation.known_kinds:
            return
        num_steps = steps_per_program(trainer, wanted, batch)
        if num_steps > 1 and (source.num_batches or 0) < num_steps:
            return
        prepare = preparation_of(trainer, to_batch, threaded=not source.in_memory)
        trainer.evaluation_ahead.start(
            lambda: trainer.trace_evaluation(prepare([first] * num_steps)).lower()
        )


def _last_rows(plan: Plan, num_ranks: int) -> int:
    """Returns the rows of a rank in the last batch, if it is known and they are fewer; else 0."""
    source, batch_rows = plan.stream.source, plan.first.num_rows
    if source.num_examples is None or source.num_batches is None:
        return 0
    rest = source.num_examples - (source.num_batches - 1) * batch_rows
    is_smaller = num_ranks > 1 and 0 < rest < batch_rows
    last_rows, rows = (micro_batch_size(x, num_ranks) for x in (rest, batch_rows))
    return last_rows if is_smaller and last_rows < rows else 0
