"""`fit` in a process of `tnt-jax tune`, `plan` or `scale`, which measures instead of training."""

import resource
from dataclasses import asdict, replace
from fractions import Fraction
from importlib.metadata import version
from typing import NoReturn

import jax
import numpy as np

from tnt_jax.data.streams import full_batches, read_in_lockstep
from tnt_jax.distributed import goodput
from tnt_jax.distributed.host import collectives
from tnt_jax.distributed.joining.runtime import is_master_rank
from tnt_jax.keras_compat.fit.data_intake import DataArguments, FitArguments, Plan
from tnt_jax.keras_compat.fit.fit_loop import FitLoop
from tnt_jax.keras_compat.state.core import Core
from tnt_jax.launch.scale.projection import Outer
from tnt_jax.launch.scale.scaling import as_line
from tnt_jax.log import report_to_launcher
from tnt_jax.settings import Settings, TrialsDone
from tnt_jax.sharded.planning import plan_step
from tnt_jax.train.local.trainer import GroupTrainer
from tnt_jax.train.timing import tuning
from tnt_jax.train.timing.timed_steps import time_steps

_LIBRARIES = ("jax", "jaxlib", "flax")


class TrialLoop(FitLoop):
    """Times ways to sum gradients on the model and data of a `fit`, instead of training."""

    trains = False

    def prepare(self, data: DataArguments, arguments: FitArguments) -> Plan:
        """Does the same as for training; for `tnt-jax scale` with the global batch of its ranks."""
        check_sums(self._core, "tune")
        if self._core.trainer.runtime.settings.scale_steps is not None:
            data = scaled(self._core, data)
        return super().prepare(data, arguments)

    def fit(self, plan: Plan) -> NoReturn:
        """Prints the options to use, on the master, and hands back to the entry of the process."""
        core = self._core
        by_argument = core.options.fusion_threshold is not None
        tuning.tune(
            core.trainer, step_to_tune(core), plan.first, plan.unpack, by_argument=by_argument
        )
        raise TrialsDone


class PlanLoop(FitLoop):
    """Shows what a step of a `fit` needs, instead of training."""

    trains = False

    def prepare(self, data: DataArguments, arguments: FitArguments) -> Plan:
        """Does the same as for training."""
        check_sums(self._core, "plan")
        return super().prepare(data, arguments)

    def fit(self, plan: Plan) -> NoReturn:
        """Prints the plan on the master, and hands back to the entry of the process."""
        trainer = self._core.trainer
        lowered = trainer.lower_train_step(plan.unpack(plan.first))
        planned = plan_step(
            lowered, trainer.require_state(), trainer.runtime.mesh, notes=self._core.mesh_notes()
        )
        if is_master_rank():
            print(planned.text(), flush=True)
        raise TrialsDone


def step_to_tune(core: Core) -> tuning.Step:
    """Returns the step of a model that is ready for its data."""
    compilation = core.require_compiled()
    transformation = compilation.transformation
    assert transformation is not None
    num_steps = compilation.steps_per_execution or 1
    return tuning.Step(core.step_parts(), transformation, compilation.accumulation_steps, num_steps)


def check_sums(core: Core, command: str) -> None:
    """Raises a ValueError for a command whose steps are those of all ranks together."""
    if core.options.sync is not None:
        raise ValueError(
            f"tnt-jax {command} knows steps in which all ranks sum gradients, and with "
            "sync=LocalSteps groups train by themselves. Leave sync out for the command; tnt-jax "
            "scale measures both."
        )


def scale_batch(data: DataArguments, num_ranks: int, settings: Settings) -> DataArguments:
    """Returns the data with the global batch for a number of ranks: the script's, or multiplied."""
    factor = Fraction(num_ranks, settings.scale_from)
    if factor == 1:
        return data
    if settings.scale_weak:
        # The rows of a rank, and the batches of a process, stay the same by themselves.
        if not data.distribute or data.rows_per_rank is not None:
            return data
        from tnt_jax.data.dispatch import with_larger_batches

        x, batch_size = with_larger_batches(data.x, data.batch_size, factor)
        return replace(data, x=x, batch_size=batch_size)
    if not data.distribute:
        raise ValueError(
            "tnt_distribute_dataset=False gives each process batches of its own, so that the "
            "global batch grows with the ranks: measure with --weak."
        )
    if data.rows_per_rank is None:
        return data
    micro = data.rows_per_rank / factor
    if micro.denominator != 1:
        raise ValueError(
            f"With --strong the rows of a rank shrink as ranks are added, but "
            f"tnt_micro_batch_size={data.rows_per_rank} cannot be divided by {factor}. Measure "
            "with --weak, which keeps it, or on other numbers of ranks."
        )
    return replace(data, micro_batch_size=int(micro))


class ScaleLoop(FitLoop):
    """Times the steps of a `fit`, without callbacks and validation."""

    trains = False

    def prepare(self, data: DataArguments, arguments: FitArguments) -> Plan:
        """Does the same as for training, with the global batch of this number of ranks."""
        plan = super().prepare(scaled(self._core, data), arguments)
        size, num_rows = plan.stream.source.global_batch_size, plan.first.num_rows
        is_weak = self._core.trainer.runtime.settings.scale_weak
        if is_weak and size is not None and num_rows < size:
            raise ValueError(
                f"The data has {num_rows} rows, fewer than one global batch ({size}) of this "
                "number of ranks. Measure on fewer ranks or with --strong, or give the script more "
                "data."
            )
        return plan

    def fit(self, plan: Plan) -> NoReturn:
        """Reports to the launcher, on the master, and hands back to the entry of the process."""
        trainer, sync = self._core.trainer.of_group, self._core.options.sync
        source = plan.stream.source
        steps = trainer.runtime.settings.scale_steps
        assert steps is not None, "The environment says whether to time steps."
        outer = None
        if sync is not None and isinstance(trainer, GroupTrainer):
            # Whole rounds, with an update of each fragment.
            steps = -(-steps // sync.every) * sync.every
            mb = trainer.round_bytes / 1e6
            ranks = trainer.runtime.num_ranks
            outer = Outer(ranks, sync.every, sync.fragments, sync.delay, mb)
        self._shared.log_plan(plan.stream)
        full = full_batches(plan.stream, first_epoch=plan.arguments.initial_epoch)
        times = time_steps(
            trainer,
            read_in_lockstep(full, source, where="the steps that are timed"),
            plan.unpack,
            threaded=not source.in_memory,
            num_steps=self._core.require_compiled().steps_per_execution,
            steps=steps,
        )
        params = jax.tree.leaves(trainer.require_state().params)
        compile_s = goodput.account().report()["compiling_s"]
        memory, memory_of = _peak_memory()
        measured = {
            "ranks": self._core.trainer.runtime.num_ranks,
            "outer": outer and asdict(outer),
            "processes": jax.process_count(),
            "device": jax.devices()[0].device_kind,
            "global_batch": source.global_batch_size or plan.first.num_rows,
            "steps": times.steps,
            "rows": times.rows,
            "seconds": times.seconds,
            "shares": dict(
                zip(("compute", "communication", "data", "host"), times.shares, strict=True)
            ),
            "compile_s": float(collectives.all_gather(np.array(compile_s)).max()),
            "memory_bytes": int(collectives.all_gather(np.array(memory, np.float64)).max()),
            "memory_of": memory_of,
            "gradient_bytes": sum(x.nbytes for x in params),
            "versions": {name: version(name) for name in _LIBRARIES},
        }
        if is_master_rank():
            report_to_launcher(as_line(measured))
        raise TrialsDone


def scaled(core: Core, data: DataArguments) -> DataArguments:
    """Returns the data of a `fit` with the global batch that the launcher asks for."""
    num_ranks, settings = core.trainer.rank_slice.num_ranks, core.trainer.runtime.settings
    return collectives.call_on_all_processes(lambda: scale_batch(data, num_ranks, settings))


def _peak_memory() -> tuple[int, str]:
    """Returns the most memory so far, of this process's devices if they tell, else its own."""
    stats = [device.memory_stats() for device in jax.local_devices()]
    if all(found and "peak_bytes_in_use" in found for found in stats):
        return sum(found["peak_bytes_in_use"] for found in stats), "device"
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024, "process"
