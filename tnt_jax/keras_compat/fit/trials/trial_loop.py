"""`fit` in a process of `tnt-jax tune` or `tnt-jax plan`.

It compares ways to sum gradients, or shows what a step needs, instead of training.
"""

from typing import NoReturn

from tnt_jax.distributed.joining.runtime import is_master_rank
from tnt_jax.keras_compat.fit.fit_loop import FitLoop
from tnt_jax.keras_compat.fit.fit_plan import Plan
from tnt_jax.keras_compat.fit.hooks import CallbackArguments
from tnt_jax.keras_compat.fit.trials.trials_done import TrialsDone
from tnt_jax.sharded.planning import plan_step
from tnt_jax.train.timing import tuning


class TrialLoop(FitLoop):
    """Times ways to sum gradients on the model and data of a `fit`, instead of training."""

    compiles_ahead = False

    def fit(self, plan: Plan, callbacks: CallbackArguments) -> NoReturn:
        """Prints the options to use, on the master, and hands back to the entry of the process."""
        trainer = self._core.trainer
        compilation = self._core.require_compiled()
        transformation = compilation.transformation
        assert transformation is not None
        step = tuning.Step(
            self._core.step_parts(),
            transformation,
            compilation.accumulation_steps,
            compilation.steps_per_execution or 1,
        )
        by_argument = self._core.options.fusion_threshold is not None
        tuning.tune(trainer, step, plan.first, plan.unpack, by_argument=by_argument)
        raise TrialsDone


class PlanLoop(FitLoop):
    """Shows what a step of a `fit` needs, instead of training."""

    compiles_ahead = False

    def fit(self, plan: Plan, callbacks: CallbackArguments) -> NoReturn:
        """Prints the plan on the master, and hands back to the entry of the process."""
        trainer = self._core.trainer
        lowered = trainer.lower_train_step(plan.unpack(plan.first))
        planned = plan_step(
            lowered,
            trainer.require_state(),
            trainer.runtime.mesh,
            notes=self._core.mesh_notes(),
        )
        if is_master_rank():
            print(planned.text(), flush=True)
        raise TrialsDone
