"""The shared state of a `Model`: the module, its options, its trainer, and its compilation."""

import gc
import math
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from tnt_jax import _jax, reproducible, sharded
from tnt_jax.adapters import wrap
from tnt_jax.adapters.base import Variables
from tnt_jax.data.feed import BATCHES_AHEAD
from tnt_jax.distributed.host import collectives
from tnt_jax.distributed.joining import runtime
from tnt_jax.job import Slot
from tnt_jax.keras_compat.callbacks.base import check_can_read, check_changes_model
from tnt_jax.keras_compat.compiling.compiled import Compilation, Compiled
from tnt_jax.keras_compat.compiling.keras_training import transformation_of
from tnt_jax.keras_compat.compiling.objective import CompiledObjective, unused_name
from tnt_jax.keras_compat.keras_objects import is_keras
from tnt_jax.keras_compat.state.options import ModelOptions, refuse_with_local_steps
from tnt_jax.log import logger
from tnt_jax.sharded import ShardingOptions, planning
from tnt_jax.sharded.pipeline.schedules import STAGE_AXIS
from tnt_jax.train import memory_choice
from tnt_jax.train.compiled_steps import CompiledSteps
from tnt_jax.train.contracts import Batch, Parts, Steps
from tnt_jax.train.execution import IN_FLIGHT
from tnt_jax.train.finite import CHECKED
from tnt_jax.train.local.trainer import LocalTrainer
from tnt_jax.train.loops.context import steps_in_use
from tnt_jax.train.memory_choice import found_no_memory, half_as_many
from tnt_jax.train.steps.data_parallel import DataParallelSteps
from tnt_jax.train.steps.epoch_sums import num_local_rows
from tnt_jax.train.steps.global_step import WholeBatches, log_choice
from tnt_jax.train.steps.micro_batches import RowsAtOnce, evaluated_in_passes, why_in_one_pass
from tnt_jax.train.trainer import Trainer


class _Form(NamedTuple):
    """A form that the step of a model may have."""

    name: str  # Empty for the form that the steps have.
    options: ModelOptions
    sharding: ShardingOptions | None  # None for data parallelism alone.

    def saving(self) -> "_Form":
        """Returns the same form with rematerialization."""
        name = ", ".join(filter(None, (self.name, "remat='full'")))
        options = replace(self.options, remat="full")
        return _Form(name, options, self.sharding)


# What helps where a step with `reproducible=True` does not fit.
_OF_VIRTUAL_RANKS = (
    "Use more virtual_ranks, which compute fewer rows at once, a smaller global batch, "
    "remat='full', or precision='mixed_bfloat16' (docs/reproducibility.md)"
)


# The models that have been used in this job.
_on_devices = Slot[weakref.WeakSet["Core"]](weakref.WeakSet, lasts=True)


class Core:
    """The wrapped module, its options, its trainer, and the choices of `compile`."""

    def __init__(
        self, module: Any, variables: Mapping[str, Any] | None, options: ModelOptions
    ) -> None:
        if options.reproducible:
            reproducible.check_reproducible(
                options.virtual_ranks, options.gradient_compression, options.shard_optimizer_state
            )
        options.check_local_steps()
        self.module = module
        self.options = options
        self._sharding = ShardingOptions.of(
            options.mesh,
            options.sharding_rules,
            options.pipeline,
            reproducible=options.reproducible,
            gradient_compression=options.gradient_compression,
            ranks_per_host=options.ranks_per_host > 1,
            shard_optimizer_state=options.shard_optimizer_state,
        )
        sharded.check_remat(options.remat)
        self.adapter = wrap(module, variables=variables, **options.for_adapter())
        self.at_once = RowsAtOnce()
        self._plain_apply = self.adapter.apply
        self._use(options)
        self.compilation: Compilation | None = None
        # Why training has this mesh and these passes, where they are chosen.
        self.memory_choice: memory_choice.Choice | None = None
        # Whether a call has asked for passes, which stay until `compile`.
        self.fits_memory = False
        # Calls and shapes of batches for which a step was chosen by its memory.
        self._fitted: set[Any] = set()
        # While `fit` runs, the wrapped object is out of date.
        self.is_fitting = False
        # How rows of the model's outputs depend on one another in prediction, once that is known.
        self.knows_outputs = False
        self.dependence_of_outputs: str | None = None
        self._trainer: Trainer | None = None
        # The state whose variables the wrapped object shows within `fit`.
        self._shown: weakref.ref[Any] | None = None

    @property
    def trainer(self) -> Trainer:
        """The trainer of the model; its first use joins the job."""
        if self._trainer is None:
            job = self._used.on_mesh(runtime.init(), self._sharding)
            if self.options.pipeline is not None:
                logger.info("%s.", *self._pipeline_notes(job))
            steps = self._first_steps(job)
            options, make = self.options, Trainer
            if options.sync is not None:
                make = partial(
                    LocalTrainer, sync=options.sync, threshold_kb=options.fusion_threshold
                )
            self._trainer = make(self.adapter, job, steps, seed=options.seed)
            _on_devices.get().add(self)
        return self._trainer

    def _first_steps(self, job: runtime.Runtime) -> Steps:
        if self.options.reproducible:
            ranks = reproducible.VirtualRanks(self.options.virtual_ranks, job.mesh)
            return reproducible.ReproducibleSteps(ranks)
        return self._steps(job)

    def reopen(self, kept: Any) -> None:
        """Goes on from what the trainer has kept, on the devices of another generation."""
        # Form and passes were chosen for other processes, and those that join know of neither.
        self._use(self.options)
        self.forget_passes()
        job = self._used.on_mesh(runtime.init(), self._sharding)
        self.trainer.reopen(job, self._first_steps(job), kept)
        self.compile_steps()
        # The wrapped object holds arrays of devices that are closed.
        self._store()

    def prepare_for_loss(self, *, goes_on: bool) -> None:
        """Lets the trainer compile its step for fewer processes, if training goes on with them."""
        options = self.options
        # GPUs try kernels for a program that is compiled, which takes their memory.
        has_one_step = self.trainer.runtime.platform == "cpu" and not options.reproducible
        prepares = goes_on and has_one_step and options.sync is None and not self.fits_memory
        self.trainer.steps_of = self._steps if prepares else None

    def why_not_elastic(self) -> str | None:
        """Returns why training cannot go on with other processes in place, None if it can."""
        options, trainer = self.options, self.trainer
        compares_rows = isinstance(trainer.steps, WholeBatches)
        loses_parts = isinstance(trainer, LocalTrainer) and not trainer.loses_whole_groups
        if len(_on_devices.get()) > 1:
            gc.collect()  # A model that is forgotten may refer to itself.
        has_others = any(other is not self for other in _on_devices.get())
        reasons = {
            "the optimizer's state is sharded": self._used.shard_optimizer_state,
            "the variables are sharded": self._sharding is not None,
            "what compression leaves out is sharded": options.gradient_compression is not None,
            "a group that trains by itself may lose a part of its ranks": loses_parts,
            "the arrays of another model would be lost": has_others,
            "the state of a model that compares rows is sharded": compares_rows,
            "the state of a custom training loop would be lost": bool(steps_in_use.get()),
        }
        return next((reason for reason, is_so in reasons.items() if is_so), None)

    def view(self, owner: Trainer) -> None:
        """Makes this model compute with the state of another one."""
        self._trainer = Trainer(
            self.adapter, owner.runtime, owner.steps, seed=self.options.seed, owner=owner
        )
        _on_devices.get().add(self)

    @contextmanager
    def trained_by(self, trainer: Trainer) -> Iterator[None]:
        """Lets another trainer of the same adapter take the place of the model's own."""
        own, self._trainer = self._trainer, trainer
        try:
            yield
        finally:
            self._trainer = own

    def _use(self, options: ModelOptions) -> None:
        """Lets the forward pass and the steps to come have the user's options, or those chosen."""
        self._used = options
        apply = options.apply(self._plain_apply)
        # This object's own method: another model of the module has other options.
        self.adapter.apply = evaluated_in_passes(apply, self.at_once)

    def _steps(
        self, job: runtime.Runtime, *, whole: bool = False
    ) -> DataParallelSteps | sharded.ShardedSteps:
        return self._used.steps(job, self._sharding, self.adapter.axis_names, whole=whole)

    def choose_mesh(self, batch: Batch) -> None:
        """Chooses the mesh of `mesh="auto"` for batches like `batch`; a ValueError if none fits."""
        if self.has_open_mesh:
            self._choose(planning.MESH, batch, self._forms(in_passes=False))

    def ask_for_passes(self) -> None:
        """Lets the coming call compute as many rows at once as fit the memory of a device."""
        if self.options.sync is not None:
            raise ValueError(
                f"{memory_choice.MICRO_BATCH} cannot be combined with sync=LocalSteps: the memory "
                "of a group's step is not measured. Pass a number of rows."
            )
        if self.options.pipeline:
            raise ValueError(
                f"{memory_choice.MICRO_BATCH} chooses the rows that a device computes at once, "
                "which pipeline decides: it computes its own micro-batches, smaller ones with more "
                "of them. Leave one of the two out."
            )
        self.fits_memory = True

    def fit_memory(
        self, call: str, batch: Batch, trace: Callable[[], Any], *, goes_on: bool = False
    ) -> None:
        """Chooses how a step is cut in time and space, for `tnt_micro_batch_size="auto"`.

        Called once `check_rows` is done. `trace` returns the trace of the trainer's own step for
        this process's `batch`. If training `goes_on` with other processes, the state stays whole. A
        ValueError, on every process, says that no step fits.
        """
        shapes = tuple((np.shape(x), str(np.result_type(x))) for x in jax.tree.leaves(batch))
        if (call, shapes) in self._fitted:
            return
        self.trainer.most_in_flight = 0 if self.trainer.runtime.platform == "cpu" else None
        if call == "fit":
            asked, forms = memory_choice.MICRO_BATCH, self._forms(in_passes=True)
            if goes_on:
                asked, forms = f"{asked} on {jax.process_count()} process(es)", forms[:1]
            self._choose(asked, batch, forms, trace)
        elif not self.options.reproducible:
            self._choose_passes(call, batch, trace)
        self._fitted.add((call, shapes))

    def _memory_limit(self) -> int:
        """Returns the bytes that a step may use on a device."""
        job, state = runtime.init(), self.trainer.require_state()
        return memory_choice.memory_limit(job.mesh.local_devices, job.settings.device_memory, state)

    def _choose_passes(self, call: str, batch: Batch, trace: Callable[[], Any]) -> None:
        """Chooses the rows at once of evaluation or prediction."""
        state = self.trainer.require_state()
        whole = memory_choice.local_bytes(state)
        given = memory_choice.local_bytes((state.params, state.model_state))

        def program(rows_at_once: int | None) -> _jax.TracedProgram:
            self.at_once.evaluation = rows_at_once
            self.trainer.renew_evaluation()
            return _jax.TracedProgram(trace())

        dependence = self.dependence_of_outputs or (
            self.compilation and self.compilation.dependence
        )
        num_rows = num_local_rows(batch) // self.trainer.rank_slice.local_ranks
        way = memory_choice.Way(
            "", whole, 0, program, whole - given, num_rows, lambda: dependence or None
        )
        limit = self._memory_limit()
        choice = memory_choice.choose(f"{call}({memory_choice.MICRO_BATCH})", [way], limit)
        if choice.rows_at_once != self.at_once.evaluation:
            self.at_once.evaluation = choice.rows_at_once
            self.trainer.renew_evaluation()
        self.trainer.fewer_evaluated_rows = lambda: (
            not dependence and self._evaluate_fewer_rows(num_rows)
        )
        logger.info("%s.", choice)

    def _forms(self, *, in_passes: bool) -> list[_Form]:
        """Returns the ways to compute a step without rematerialization, the fastest first."""
        options, own, num_ranks = self._used, self._sharding, runtime.init().num_ranks
        if options.reproducible:  # Another program rounds differently.
            return [_Form("one virtual rank at a time", options, None)]
        meshes = planning.candidates(runtime.init().mesh.size)
        name = planning.name_of(meshes[0]) if self.has_open_mesh else ""
        forms = [_Form(name, options, None if self.has_open_mesh else own)]
        is_free = own is None and not (options.gradient_compression or options.ranks_per_host > 1)
        if in_passes and is_free and num_ranks > 1 and not options.shard_optimizer_state:
            sharded_state = replace(options, shard_optimizer_state=True)
            forms.append(_Form("shard_optimizer_state", sharded_state, None))
        if self.has_open_mesh or (in_passes and is_free):
            rules = () if own is None else own.rules
            options = replace(options, shard_optimizer_state=False)
            forms += [
                _Form(planning.name_of(axes), options, ShardingOptions(axes, rules))
                for axes in meshes[1:]
            ]
        return forms

    def _choose(
        self,
        asked: str,
        batch: Batch,
        forms: Sequence[_Form],
        trace: Callable[[], Any] | None = None,
        failed: memory_choice.Attempt | None = None,
    ) -> None:
        """Takes the first form that fits the memory; after one that `failed`, with less."""
        trainer, compilation, job = self.trainer, self.require_compiled(), runtime.init()
        limit = self._memory_limit() if failed is None else int(failed.nbytes) - 1
        remedies = _OF_VIRTUAL_RANKS if self.options.reproducible else memory_choice.REMEDIES
        state, placed = trainer.require_state(), trainer.put(batch)
        functions, transformation = self.functions, compilation.transformation
        assert functions is not None and transformation is not None
        is_whole = isinstance(trainer.steps, WholeBatches)
        of_batch = memory_choice.local_bytes(placed)
        num_rows, waiting = None, 0
        if trace is not None:
            waiting = (IN_FLIGHT + BATCHES_AHEAD - 1) * of_batch
            if not self.options.reproducible:
                num_rows = num_local_rows(batch) // trainer.rank_slice.local_ranks

        shapes, rows = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(np.shape(x), jnp.result_type(x)), (state, batch)
        )

        before = _Form("", self._used, self._sharding)
        saves = num_rows is not None and before.options.remat == "none"
        lacks_blocks = False
        looked_at: list[_Form] = []
        # Steps that were looked at where training can run them as they are.
        compiled: dict[tuple[str, int | None], CompiledSteps] = {}

        def stays(form: _Form) -> bool:
            """Returns whether state and batches lie in a form as they do now."""
            options = replace(form.options, remat=before.options.remat)
            return form.sharding is before.sharding and options == before.options

        @cache
        def why_whole() -> str | None:
            return compilation.dependence or why_in_one_pass(
                self.step_parts(), shapes, rows, num_rows or 1, trainer.runtime.mesh
            )

        def way_of(form: _Form) -> memory_choice.Way:
            looked_at.append(form)
            here = form.options.on_mesh(job, form.sharding)
            steps, places = trainer.steps, state
            if not stays(form):
                axis_names = self.adapter.axis_names
                steps = form.options.steps(here, form.sharding, axis_names, whole=is_whole)
                places = steps.place(state)
            step_options = (compilation.accumulation_steps, compilation.on_nan)

            def program(rows_at_once: int | None) -> _jax.TracedProgram:
                nonlocal lacks_blocks
                try:
                    if trace is not None and stays(form):
                        self._take(form, rows_at_once)
                        self.compile_steps()
                        compiled[form.name, rows_at_once] = trainer.programs
                        return _jax.TracedProgram(trace())
                    apply = form.options.apply(self._plain_apply)
                    parts = functions.step_parts(apply, rows_at_once)
                    step = planning.TrainingStep(parts, transformation, *step_options)
                    traced = planning.trace_step(step, steps, here.mesh, state, placed)
                    return _jax.TracedProgram(traced)
                except sharded.NoBlocksError:
                    lacks_blocks = True
                    raise

            grads = memory_choice.local_bytes(places.params)
            of_state = memory_choice.local_bytes(places)
            beside = waiting + (of_state if compilation.on_nan == "rollback" else 0)  # Its copy.
            floor = of_state + of_batch + beside + steps.num_waiting * grads

            has_failed = form is forms[0] and failed is not None and why_whole() is None
            asked_rows = None if has_failed else num_rows
            return memory_choice.Way(
                form.name, floor, grads, program, beside, asked_rows, why_whole
            )

        def variants() -> Iterator[_Form]:
            """Yields the forms that there are by then: only some models can rematerialize."""
            yield forms[0]
            if saves:
                yield forms[0].saving()
            for form in forms[1:]:
                if saves and not lacks_blocks:
                    yield form.saving()
                if lacks_blocks or not saves:
                    yield form

        try:
            ways = map(way_of, variants())
            choice = memory_choice.choose(
                asked, ways, limit, looks_at_all=job.settings.plan, remedies=remedies
            )
        except ValueError:
            self._take(before, None)
            self.compile_steps()
            raise
        if failed is None:
            logger.info("%s.", choice)
        else:
            found_no_memory(failed.name, choice.chosen.name)
        self.memory_choice = choice
        form = looked_at[choice.way]
        self._take(form, choice.rows_at_once)
        if programs := compiled.get((form.name, choice.rows_at_once)):
            trainer.programs = programs
        else:
            here = form.options.on_mesh(job, form.sharding)
            self._move(here, self._steps(here, whole=is_whole))
        if num_rows is not None:
            trainer.fewer_rows = lambda: (
                (why_whole() is None and self._compute_fewer_rows(num_rows))
                or self._choose_less(asked, batch, trace)
            )
            trainer.fewer_evaluated_rows = lambda: (
                compilation.dependence is None and self._evaluate_fewer_rows(num_rows)
            )

    def _choose_less(self, asked: str, batch: Batch, trace: Callable[[], Any] | None) -> bool:
        """Chooses a form on the same mesh that needs less memory; returns whether there is one."""
        assert self.memory_choice is not None
        forms = [x for x in self._forms(in_passes=True) if x.sharding is self._sharding]
        try:
            self._choose(asked, batch, forms, trace, self.memory_choice.chosen)
        except ValueError:
            return False
        return True

    def _compute_fewer_rows(self, num_rows: int) -> bool:
        """Halves the rows of a pass, of `num_rows` of a rank; returns whether they were several."""
        fewer = half_as_many(num_rows, self.at_once.training)
        if fewer is None:
            return False
        self.at_once.training = self.at_once.evaluation = fewer
        self.compile_steps()
        return True

    def _evaluate_fewer_rows(self, num_rows: int) -> bool:
        """Does the same for the passes of evaluation and prediction."""
        fewer = half_as_many(num_rows, self.at_once.evaluation)
        if fewer is None:
            return False
        self.at_once.evaluation = fewer
        self.trainer.renew_evaluation()
        return True

    def forget_passes(self) -> None:
        """Lets steps compute all rows at once: passes suit the model and loss of their choice."""
        self._fitted.clear()
        if self._trainer is None:
            return
        self.trainer.fewer_rows = self.trainer.fewer_evaluated_rows = None
        if self.at_once != RowsAtOnce():
            self.at_once.training = self.at_once.evaluation = None
            self.trainer.renew_evaluation()

    def compute_in_two_passes(self, batch: Batch) -> str | None:
        """Lets training compute half of a rank's rows at once; returns why it cannot, or None."""
        trainer, compilation = self.trainer, self.require_compiled()
        num_rows = num_local_rows(batch) // trainer.rank_slice.local_ranks
        if num_rows == 1:
            return "A rank has one row"
        problem = compilation.dependence or why_in_one_pass(
            self.step_parts(), trainer.require_state(), batch, num_rows, trainer.runtime.mesh
        )
        if problem is None:
            self.at_once.training = math.ceil(num_rows / 2)
            self.compile_steps()
        return problem

    def shard_optimizer_state(self) -> str | None:
        """Lets training shard the optimizer's state; returns why it cannot, or None."""
        options, trainer, compilation = self._used, self.trainer, self.require_compiled()
        obstacles = {
            "There is one rank": trainer.rank_slice.num_ranks == 1,
            "The model shards it already": options.shard_optimizer_state,
            "The model has a mesh of its own": self._sharding is not None,
            "reproducible=True has steps of its own": options.reproducible,
            "Gradients are accumulated": compilation.accumulation_steps > 1,
            "Gradients are compressed, or summed within hosts first": bool(
                options.gradient_compression or options.ranks_per_host > 1
            ),
            "Rows are compared with each other": isinstance(trainer.steps, WholeBatches),
        }
        problem = next((why for why, holds in obstacles.items() if holds), None)
        if problem is None:
            self._use(replace(options, shard_optimizer_state=True))
            self._move(trainer.runtime, self._steps(trainer.runtime))
        return problem

    def _take(self, form: _Form, rows_at_once: int | None) -> None:
        """Lets the steps that are compiled next have another form."""
        self.at_once.training = self.at_once.evaluation = rows_at_once
        self._sharding = form.sharding
        self._use(form.options)

    @property
    def splits_rows(self) -> bool:
        """Whether a step sees parts of a batch, so that it matters how rows depend on others."""
        steps = self.trainer.steps
        return steps.rank_slice.num_ranks > 1 or self.options.pipeline is not None

    @property
    def cares_for_rows(self) -> bool:
        """Whether it must be known how rows depend on others."""
        return self.splits_rows or self.fits_memory

    def choose_step_of_rows(self) -> None:
        """Computes whole batches if rows were found to depend on one another, otherwise parts."""
        trainer, compilation = self.trainer, self.compilation
        of_steps = None if compilation is None else compilation.dependence
        dependence = of_steps or self.dependence_of_outputs
        is_whole = isinstance(trainer.steps, WholeBatches)
        if not self.splits_rows or is_whole == (dependence is not None):
            return
        if dependence is not None:
            options, kind = self.options, type(trainer.steps)
            needs = {
                "reproducible=True": options.reproducible,
                "A pipeline": options.pipeline is not None,
                "gradient_compression": options.gradient_compression is not None,
                "sync=LocalSteps": options.sync is not None,
                "A parameter server": kind not in (DataParallelSteps, sharded.ShardedSteps),
            }
            if name := next((name for name, is_set in needs.items() if is_set), None):
                raise ValueError(
                    f"{dependence}. {name} computes parts of a batch by themselves, with which "
                    f"results would depend on the number of {trainer.rank_slice.kind}. Let the "
                    "values of a row depend on this row alone, or leave it out: without it, such "
                    "models are trained. See docs/flax.md#models-that-compare-rows."
                )
            log_choice(dependence, trainer.runtime.num_ranks)
        self._move(trainer.runtime, self._steps(trainer.runtime, whole=dependence is not None))

    def _move(self, job: runtime.Runtime, steps: DataParallelSteps | sharded.ShardedSteps) -> None:
        trainer = self.trainer
        trainer.move(job, steps, steps.place(trainer.require_state()))
        self.compile_steps()

    def compile_steps(
        self,
        functions: Compiled | CompiledObjective | None = None,
        *,
        trainer: Trainer | None = None,
    ) -> None:
        """Lets steps, by default the trainer's, compute what was chosen, once data is known."""
        compilation, functions = self.compilation, functions or self.functions
        if compilation is None or functions is None:
            return
        assert compilation.transformation is not None
        (trainer or self.trainer).compile(
            functions.step_parts(self.adapter.apply, self.at_once.training),
            compilation.transformation,
            accumulation_steps=compilation.accumulation_steps,
            on_nan=compilation.on_nan,
        )

    @property
    def has_open_mesh(self) -> bool:
        """Whether training has still to choose the mesh."""
        return self._sharding is not None and self._sharding.is_open

    def mesh_notes(self) -> list[str]:
        """Returns why training chose this step, if it did, and what a pipeline costs."""
        choice = self.memory_choice
        chosen = [] if choice is None else [str(choice), *planning.alternatives(choice)]
        return chosen + self._pipeline_notes(self.trainer.runtime)

    def _pipeline_notes(self, job: runtime.Runtime) -> list[str]:
        pipeline = self.options.pipeline
        num_stages = job.mesh.shape.get(STAGE_AXIS, 1)
        return [] if pipeline is None else [pipeline.description(num_stages)]

    def check_local_steps(self, compilation: Compilation) -> None:
        """Raises a ValueError if `compile` chose what groups that train by themselves cannot do."""
        if self.options.sync is None:
            return
        refuse_with_local_steps(
            (
                'on_nan="rollback"',
                compilation.on_nan == "rollback",
                "a group would undo what it has taken from the others",
            ),
            (
                "gradient_accumulation_steps",
                compilation.accumulation_steps > 1,
                "a larger batch, or a larger LocalSteps(every=...), has its effect",
            ),
            ("use_ema", compilation.optimizer.use_ema, "each group would keep averages of its own"),
        )

    @property
    def calls_model(self) -> bool:
        """Whether steps call the model on the inputs; an objective may not do so."""
        return self.compilation is None or self.compilation.arguments.objective is None

    def require_compiled(self) -> Compilation:
        """Returns the compilation."""
        if self.compilation is None:
            does_not_count = getattr(self.module, "compiled", False)
            own = " The Keras model's own compile() does not count." if does_not_count else ""
            raise RuntimeError(
                f"The model must be compiled first: call compile(optimizer=..., loss=...).{own}"
            )
        return self.compilation

    def require_trainable(self) -> None:
        """Raises a RuntimeError if the model is not compiled, or is a view."""
        self.require_compiled()
        if self.trainer.owner is not None:
            raise RuntimeError(
                "A view cannot be trained: call fit of the model that it was made from."
            )

    @property
    def functions(self) -> Compiled | CompiledObjective | None:
        """Losses and metrics for the outputs; None before the first batch after `compile`."""
        return None if self.compilation is None else self.compilation.functions

    def step_parts(self) -> Parts:
        """Returns the forward pass, the loss and the metrics of a step, once data is known."""
        assert self.functions is not None
        return self.functions.step_parts(self.adapter.apply, self.at_once.training)

    def use_optimizer(self) -> None:
        """Starts the optimizer of the compilation, if there is one, unless it already runs."""
        if (compilation := self.compilation) is None:
            return
        if compilation.transformation is None:
            held = self.adapter.held_variables if is_keras(self.module) else None
            compilation.transformation = transformation_of(compilation.optimizer, held)
        self.trainer.use_optimizer(
            compilation.transformation, accumulation_steps=compilation.accumulation_steps
        )

    def logs(self, sums: Any) -> dict[str, float]:
        """Returns the logs for the sums of an epoch so far."""
        assert self.functions is not None
        own = self.adapter.metric_results(sums["metrics"]["model"])
        logs = self.functions.results(sums) | self.by_log_name(own)
        if CHECKED in sums and not np.asarray(sums["loss"][1]):
            logs["loss"] = math.nan  # Every step was left.
        return logs

    def by_log_name(self, of_model: Mapping[str, Any]) -> dict[str, Any]:
        """Returns what the model's own metrics have, by names that no other log has."""
        assert self.functions is not None
        used = set(self.functions.metrics_names())
        return {unused_name(name, used): value for name, value in of_model.items()}

    def training_logs(self, sums: Any) -> dict[str, float]:
        """Returns the logs of training; with `on_nan` they count the steps that were left."""
        counts = {"skipped_steps": float(sums[CHECKED][2])} if CHECKED in sums else {}
        return self.logs(sums) | counts

    @contextmanager
    def fitting(self) -> Iterator[None]:
        """Surrounds training: stores the variables in the wrapped object when it ends."""
        was_fitting, self.is_fitting = self.is_fitting, True
        try:
            yield
            self.read_assigned()
        except BaseException:
            state = self.trainer.state
            arrays = jax.tree.leaves(state and (state.params, state.model_state))
            # Several processes may wait for this one, which is about to end; and arrays that were
            # donated to a step whose results never arrived are lost.
            if jax.process_count() == 1 and not any(x.is_deleted() for x in arrays):
                self._store()
            raise
        else:
            self._store()
        finally:
            self.is_fitting = was_fitting

    @property
    def current_module(self) -> Any:
        """See `Model.module`."""
        state = self.trainer.state if self.is_fitting else None
        if state is not None and (self._shown is None or self._shown() is not state):
            for leaf in jax.tree.leaves((state.params, state.model_state)):
                check_can_read(leaf)
            self.write_back()
            self._shown = weakref.ref(self.trainer.state)
        return self.module

    def write_back(self) -> None:
        """See `Model.write_back`."""
        self.read_assigned()
        self._store()

    def _store(self) -> None:
        if self.adapter.holds_variables and self.trainer.state is not None:
            self.adapter.write_back(self.trainer.variables())

    def read_assigned(self) -> None:
        """Reads what a callback has assigned to the wrapped object, alike on all processes."""
        state = self.trainer.state if self.is_fitting and self.adapter.has_assigned() else None
        if state is None:
            return
        check_changes_model("Assigning a variable of the wrapped object")
        held = Variables(state.params, state.model_state)
        self.replace_variables(self.adapter.with_assigned(held))

    def take_over_changes(self, inputs: Any) -> bool:
        """Reads the variables of the wrapped object, on all processes those of the master.

        Returns whether others than before are trained: steps are then compiled anew.
        """
        trainer, adapter = self.trainer, self.adapter
        if not adapter.holds_variables or trainer.owner is not None:
            return False
        if (state := trainer.state) is None:
            return False
        trains_others = adapter.trains_others()
        if not collectives.broadcast(np.int8(trains_others or adapter.has_assigned())):
            return False
        variables = Variables(*collectives.broadcast(tuple(adapter.init(inputs, seed=0))))
        if _shapes(tuple(variables)) != _shapes((state.params, state.model_state)):
            trainer.build_from(variables)
        else:
            self.replace_variables(variables)
        if trains_others:
            self.knows_outputs, self.dependence_of_outputs = False, None
            trainer.renew_evaluation()
        return trains_others

    def replace_variables(self, variables: Variables) -> None:
        """Replaces the variables of the state by host arrays or by its own."""
        state = self.trainer.require_state()

        def put(new: Any, old: jax.Array) -> jax.Array:
            return old if new is old else _jax.put(np.asarray(new, old.dtype), old.sharding)

        params, model_state = jax.tree.map(put, tuple(variables), (state.params, state.model_state))
        self.trainer.state = replace(state, params=params, model_state=model_state)

    def write_back_outside_fit(self) -> None:
        """Stores the variables in the wrapped object, unless `fit` runs, which does so itself."""
        if not self.is_fitting:
            self.write_back()


def _shapes(tree: Any) -> Any:
    return jax.tree.map(lambda x: (x.shape, x.dtype), tree)
