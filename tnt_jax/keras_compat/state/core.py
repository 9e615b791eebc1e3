"""The shared state of a `Model`: the module, its options, its trainer, and its compilation."""

import math
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Literal

import jax
import numpy as np

from tnt_jax import _jax, reproducible, sharded
from tnt_jax.adapters import wrap
from tnt_jax.adapters.base import Variables
from tnt_jax.distributed.host import collectives
from tnt_jax.distributed.joining import runtime
from tnt_jax.distributed.sums.reduction import Reduction, choose_reduction
from tnt_jax.keras_compat.callbacks.base import check_can_read, check_changes_model
from tnt_jax.keras_compat.compiling.compilation import Compilation
from tnt_jax.keras_compat.compiling.compiled import Compiled
from tnt_jax.keras_compat.compiling.keras_training import transformation_of
from tnt_jax.keras_compat.compiling.objective import CompiledObjective
from tnt_jax.log import logger
from tnt_jax.sharded import Pipeline, Remat, Rule, ShardingOptions, auto
from tnt_jax.sharded.pipeline.schedules import STAGE_AXIS
from tnt_jax.train.contracts import Apply, Batch, Parts, Steps
from tnt_jax.train.finite import CHECKED
from tnt_jax.train.state import TrainState
from tnt_jax.train.steps.data_parallel import DataParallelSteps
from tnt_jax.train.steps.global_step import GlobalSteps, WholeBatches, log_choice
from tnt_jax.train.trainer import Trainer


@dataclass(frozen=True)
class ModelOptions:
    """The arguments of `Model` except module and variables; see `Model`."""

    seed: int
    precision: str
    trainable: Sequence[str] | None
    frozen: Sequence[str]
    synchronize_batch_norm: bool
    fusion_threshold: int | Literal["xla"] | None
    gradient_compression: Literal["bfloat16"] | None
    ranks_per_host: int
    shard_optimizer_state: bool
    reproducible: bool
    virtual_ranks: int
    mesh: Mapping[str, int] | Literal["auto"] | None = None
    sharding_rules: Sequence[Rule] = ()
    pipeline: Pipeline | None = None
    remat: Remat | Mapping[str, Remat] = "none"

    def for_adapter(self) -> dict[str, Any]:
        """Returns the options of `tnt_jax.adapters.wrap`."""
        return self._named("precision", "trainable", "frozen", "synchronize_batch_norm")

    def for_sharding(self) -> ShardingOptions | None:
        """Returns how the model is sharded; None for data parallelism alone."""
        return ShardingOptions.of(
            self.mesh,
            self.sharding_rules,
            self.pipeline,
            reproducible=self.reproducible,
            gradient_compression=self.gradient_compression,
            ranks_per_host=self.ranks_per_host > 1,
            shard_optimizer_state=self.shard_optimizer_state,
        )

    def saved(self) -> dict[str, Any]:
        """Returns the arguments of a saved or cloned model, without the machine's, as `mesh`."""
        return self._named(
            "seed",
            "precision",
            "trainable",
            "frozen",
            "synchronize_batch_norm",
            "fusion_threshold",
            "gradient_compression",
            "shard_optimizer_state",
            "reproducible",
            "virtual_ranks",
        )

    def _named(self, *names: str) -> dict[str, Any]:
        return {name: getattr(self, name) for name in names}


class Core:
    """The wrapped module, its options, its trainer, and the choices of `compile`."""

    def __init__(
        self, module: Any, variables: Mapping[str, Any] | None, options: ModelOptions
    ) -> None:
        if options.reproducible:
            reproducible.check_reproducible(
                options.virtual_ranks, options.gradient_compression, options.shard_optimizer_state
            )
        self.module = module
        self.options = options
        self._sharding = options.for_sharding()
        sharded.check_remat(options.remat)
        self.adapter = wrap(module, variables=variables, **options.for_adapter())
        # This object's own method: another model of the module has other options.
        self.adapter.apply = self._chosen_apply(self.adapter.apply)
        self.compilation: Compilation | None = None
        self.mesh_choice: auto.Choice | None = None
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
            job = runtime.init()
            if self._sharding is not None:
                job = replace(job, mesh=self._sharding.mesh.build(job.mesh))
            if self.options.pipeline is not None:
                logger.info("%s.", *self._pipeline_notes(job))
            steps: Steps
            if self.options.reproducible:
                ranks = reproducible.VirtualRanks(self.options.virtual_ranks, job.mesh)
                steps = reproducible.ReproducibleSteps(ranks)
            else:
                steps = self._steps_of(job, whole=False)
            self._trainer = Trainer(self.adapter, job, steps, seed=self.options.seed)
        return self._trainer

    def view(self, owner: Trainer) -> None:
        """Makes this model compute with the state of another one."""
        self._trainer = Trainer(
            self.adapter, owner.runtime, owner.steps, seed=self.options.seed, owner=owner
        )

    @contextmanager
    def trained_by(self, trainer: Trainer) -> Iterator[None]:
        """Lets another trainer of the same adapter take the place of the model's own."""
        own, self._trainer = self._trainer, trainer
        try:
            yield
        finally:
            self._trainer = own

    def choose_mesh(self, batch: Batch) -> None:
        """Chooses the mesh of a model with `mesh="auto"`, which training keeps."""
        if not self.has_open_mesh:
            return
        assert self._sharding is not None
        trainer, compilation, job = self.trainer, self.require_compiled(), runtime.init()
        assert compilation.transformation is not None
        step = auto.TrainingStep(
            self.step_parts(),
            compilation.transformation,
            compilation.accumulation_steps,
            compilation.on_nan,
        )

        @cache
        def steps_on(axes: sharded.MeshAxes) -> tuple[runtime.Runtime, auto.StepsInPlaces]:
            here = replace(job, mesh=axes.build(job.mesh))
            return here, self._plain_steps(here) if axes.fsdp == 1 else self._sharded_steps(here)

        self.mesh_choice = auto.choose(step, trainer.require_state(), trainer.put(batch), steps_on)
        logger.info("%s.", self.mesh_choice)
        self._sharding = replace(self._sharding, mesh=self.mesh_choice.axes, is_open=False)
        here, steps = steps_on(self.mesh_choice.axes)
        trainer.move(here, steps, steps.place(trainer.require_state()))
        trainer.compile(**step._asdict())

    @property
    def splits_rows(self) -> bool:
        """Whether a step sees parts of a batch, so that it matters how rows depend on others."""
        steps = self.trainer.steps
        return steps.rank_slice.num_ranks > 1 or self.options.pipeline is not None

    def choose_step_of_rows(self) -> None:
        """Computes whole batches if rows were found to depend on one another, otherwise parts."""
        trainer, compilation = self.trainer, self.compilation
        of_steps = None if compilation is None else compilation.dependence
        dependence = of_steps or self.dependence_of_outputs
        is_whole = isinstance(trainer.steps, WholeBatches)
        if is_whole == (dependence is not None):
            return
        if dependence is not None:
            self._require_whole_batches(dependence)
        self._move(trainer.runtime, self._steps_of(trainer.runtime, whole=dependence is not None))

    def _require_whole_batches(self, dependence: str) -> None:
        """Raises a ValueError if an option needs parts of batches; logs the choice otherwise."""
        needs = {
            "reproducible=True": self.options.reproducible,
            "A pipeline": self.options.pipeline is not None,
            "gradient_compression": self.options.gradient_compression is not None,
            "A parameter server": type(self.trainer.steps)
            not in (DataParallelSteps, sharded.ShardedSteps),
        }
        for name, is_set in needs.items():
            if is_set:
                raise ValueError(
                    f"{dependence}. {name} computes parts of a batch by themselves, with which "
                    f"results would depend on the number of {self.trainer.rank_slice.kind}. Let "
                    "the values of a row depend on this row alone, or leave it out: without it, "
                    "such models are trained. See docs/flax.md#models-that-compare-rows."
                )
        log_choice(dependence, self.trainer.runtime.num_ranks)

    def _move(self, job: runtime.Runtime, steps: DataParallelSteps | sharded.ShardedSteps) -> None:
        """Lets the trainer go on with other steps."""
        trainer, compilation = self.trainer, self.compilation
        trainer.move(job, steps, steps.place(trainer.require_state()))
        if compilation is None or compilation.functions is None:
            return
        assert compilation.transformation is not None
        trainer.compile(
            self.step_parts(),
            compilation.transformation,
            accumulation_steps=compilation.accumulation_steps,
            on_nan=compilation.on_nan,
        )

    @property
    def has_open_mesh(self) -> bool:
        """Whether training has still to choose the mesh."""
        return self._sharding is not None and self._sharding.is_open

    @property
    def finds_mesh(self) -> bool:
        """Whether training chooses, or has chosen, the mesh."""
        return self.has_open_mesh or self.mesh_choice is not None

    def mesh_notes(self) -> list[str]:
        """Returns why the mesh was chosen, if training chose it, and what a pipeline costs."""
        chosen = [] if self.mesh_choice is None else [str(self.mesh_choice)]
        return chosen + self._pipeline_notes(self.trainer.runtime)

    def _pipeline_notes(self, job: runtime.Runtime) -> list[str]:
        pipeline = self.options.pipeline
        num_stages = job.mesh.shape.get(STAGE_AXIS, 1)
        return [] if pipeline is None else [pipeline.description(num_stages)]

    @property
    def calls_model(self) -> bool:
        """Whether steps call the model on the inputs; an objective may not do so."""
        return self.compilation is None or not self.compilation.has_objective

    def require_compiled(self) -> Compilation:
        """Returns the compilation."""
        if self.compilation is None:
            does_not_count = getattr(self.module, "compiled", False)
            own = " The Keras model's own compile() does not count." if does_not_count else ""
            raise RuntimeError(
                f"The model must be compiled first: call compile(optimizer=..., loss=...).{own}"
            )
        return self.compilation

    def require_trainable(self) -> Compilation:
        """Returns the compilation of a model that can be trained."""
        compilation = self.require_compiled()
        if self.trainer.owner is not None:
            raise RuntimeError(
                "A view cannot be trained: call fit of the model that it was made from."
            )
        return compilation

    @property
    def functions(self) -> Compiled | CompiledObjective | None:
        """Losses and metrics for the outputs; None before the first batch after `compile`."""
        return None if self.compilation is None else self.compilation.functions

    @property
    def compiled_kinds(self) -> set[Any]:
        """Shapes of the batches that training has seen."""
        return set() if self.compilation is None else self.compilation.compiled_kinds

    def step_parts(self) -> Parts:
        """Returns the forward pass, the loss and the metrics of a step, once data is known."""
        assert self.functions is not None
        return self.functions.step_parts(self.adapter.apply)

    def use_optimizer(self) -> None:
        """Starts the optimizer of the compilation, if there is one, unless it already runs."""
        if (compilation := self.compilation) is None:
            return
        if compilation.transformation is None:
            compilation.transformation = transformation_of(
                compilation.optimizer, self.adapter.held_variables
            )
        self.trainer.use_optimizer(
            compilation.transformation, accumulation_steps=compilation.accumulation_steps
        )

    def logs(self, sums: Any) -> dict[str, float]:
        """Returns the logs for the sums of an epoch so far."""
        assert self.functions is not None
        logs = self.functions.results(sums) | self.adapter.metric_results(sums["metrics"]["model"])
        if CHECKED in sums and not np.asarray(sums["loss"][1]):
            logs["loss"] = math.nan  # Every step was left.
        return logs

    def kept_sums(self, sums: Any) -> Any:
        """Returns the sums with which the epoch after one begins; None if they begin with zeros."""
        functions = self.functions
        if sums is None or not isinstance(functions, Compiled):
            return None
        return functions.kept(sums)

    def training_logs(self, sums: Any) -> dict[str, float]:
        """Returns the logs of training; with `on_nan` they count the steps that were left."""
        counts = {"skipped_steps": float(sums[CHECKED][2])} if CHECKED in sums else {}
        return self.logs(sums) | counts

    @contextmanager
    def fitting(self) -> Iterator[None]:
        """Surrounds training: stores the variables in the wrapped object when it ends.

        Also after an exception, but not in a job of several processes: the others may wait for this
        one, which is about to end.
        """
        self.is_fitting = True
        try:
            yield
            self.read_assigned()
        except BaseException:
            state = self.trainer.state
            if jax.process_count() == 1 and state is not None and _is_whole(state):
                self._store()
            raise
        else:
            self._store()
        finally:
            self.is_fitting = False

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
        state = self.trainer.state if self.is_fitting else None
        if state is None or not self.adapter.has_assigned():
            return
        check_changes_model("Assigning a variable of the wrapped object")
        held = Variables(state.params, state.model_state)
        self._put(state, self.adapter.with_assigned(held))

    def take_over_changes(self, inputs: Any) -> bool:
        """Reads the variables of the wrapped object again if the user has changed them.

        On every process those of the master count. Returns whether others than before are trained:
        the optimizer then starts afresh, and steps are compiled anew.
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
            self._put(state, variables)
        return trains_others

    def _put(self, state: TrainState, variables: Variables) -> None:
        """Replaces the variables of the state by host arrays or by its own."""

        def put(new: Any, old: jax.Array) -> jax.Array:
            return old if new is old else _jax.put(np.asarray(new, old.dtype), old.sharding)

        params, model_state = jax.tree.map(put, tuple(variables), (state.params, state.model_state))
        self.trainer.state = replace(state, params=params, model_state=model_state)

    def write_back_outside_fit(self) -> None:
        """Stores the variables in the wrapped object, unless `fit` runs, which does so itself."""
        if not self.is_fitting:
            self.write_back()

    def _chosen_apply(self, apply: Apply) -> Apply:
        """Returns the forward pass in a pipeline, or with rematerialization, as options say."""
        pipeline, remat = self.options.pipeline, self.options.remat
        if pipeline is not None:
            return sharded.pipelined(apply, pipeline, policy=self._layer_policy())
        return apply if remat == "none" else sharded.rematerialized_apply(apply, remat)

    def _layer_policy(self) -> Any:
        """Returns what the layers of a pipeline keep for backpropagation; None for everything."""
        pipeline, remat = self.options.pipeline, self.options.remat
        if pipeline is None or remat == "none":
            return None
        return sharded.policy_of(remat, pipeline.path)

    def _steps_of(
        self, job: runtime.Runtime, *, whole: bool
    ) -> DataParallelSteps | sharded.ShardedSteps:
        """Returns the steps that compute the parts of a batch, or whole batches."""
        if self._sharding is not None:
            return self._sharded_steps(job, whole=whole)
        return GlobalSteps(job) if whole else self._plain_steps(job)

    def _plain_steps(self, job: runtime.Runtime) -> DataParallelSteps:
        return DataParallelSteps(job, self._reduction(job))

    def _sharded_steps(self, job: runtime.Runtime, *, whole: bool = False) -> sharded.ShardedSteps:
        assert self._sharding is not None
        make = sharded.ShardedGlobalSteps if whole else sharded.ShardedSteps
        return make(
            job,
            self._reduction(job),
            rules=self._sharding.rules,
            names=self.adapter.axis_names,
            pipeline=self.options.pipeline,
            policy=self._layer_policy(),
            has_remat=self.options.remat != "none",
        )

    def _reduction(self, job: runtime.Runtime) -> Reduction:
        return choose_reduction(
            job.platform,
            job.num_ranks,
            settings=job.settings,
            threshold_kb=self.options.fusion_threshold,
            compression=self.options.gradient_compression,
            ranks_per_host=self.options.ranks_per_host,
            shard_optimizer_state=self.options.shard_optimizer_state,
        )


def _shapes(tree: Any) -> Any:
    return jax.tree.map(lambda x: (x.shape, x.dtype), tree)


def _is_whole(state: TrainState) -> bool:
    """Returns whether no array was donated to a step whose results never arrived."""
    return not any(x.is_deleted() for x in jax.tree.leaves((state.params, state.model_state)))
