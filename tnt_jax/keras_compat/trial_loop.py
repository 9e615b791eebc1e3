"""`fit` in a process of `tnt-jax tune` or `tnt-jax plan`.

It compares ways to sum gradients, or shows what a step needs, instead of training. The launcher
says so by `TNT_TUNE_STEPS` or `TNT_PLAN`. `FitLoop` knows nothing of it.
"""

import os
from typing import NoReturn

from tnt_jax.distributed.runtime import is_master_rank
from tnt_jax.keras_compat.fit_loop import FitLoop
from tnt_jax.keras_compat.fit_plan import Plan
from tnt_jax.keras_compat.hooks import CallbackArguments
from tnt_jax.keras_compat.trials_done import TrialsDone
from tnt_jax.settings import read_settings

_CHOICES = ("TNT_TUNE_STEPS", "TNT_PLAN")


def choose_fit_loop() -> type[FitLoop]:
    """Returns what runs `fit` in this job: training, trials, or a plan.

    Raises:
        ValueError: If a variable of the launcher has no valid value.
    """
    settings = read_settings({name: os.environ.get(name, "") for name in _CHOICES})
    if settings.plan:
        return PlanLoop
    return FitLoop if settings.tune_steps is None else TrialLoop


class TrialLoop(FitLoop):
    """Times ways to sum gradients on the model and data of a `fit`, instead of training."""

    def fit(self, plan: Plan, callbacks: CallbackArguments) -> NoReturn:
        """Prints the options to use, on the master, and hands back to the entry of the process.

        Raises:
            TrialsDone: At the end; `tune_script` waits for it.
            ValueError: If there is nothing to choose: one rank, or reproducible training.
        """
        # Training needs none of it.
        from tnt_jax.train import tuning

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

    def fit(self, plan: Plan, callbacks: CallbackArguments) -> NoReturn:
        """Prints the plan on the master, and hands back to the entry of the process.

        Raises:
            TrialsDone: At the end; `tune_script` waits for it.
        """
        # Training needs none of it.
        from tnt_jax.sharded.planning import plan_step

        trainer = self._core.trainer
        lowered = trainer.lower_train_step(plan.unpack(plan.first))
        planned = plan_step(lowered, trainer.require_state(), trainer.runtime.mesh)
        if is_master_rank():
            print(planned.text(), flush=True)
        raise TrialsDone
