"""`fit` in a process of `tnt-jax tune`: it compares ways to sum gradients instead of training.

The launcher says so by `TNT_TUNE_STEPS`. `FitLoop` knows nothing of it.
"""

import os
from typing import NoReturn

from tnt_jax.keras_compat.fit_loop import FitLoop
from tnt_jax.keras_compat.fit_plan import Plan
from tnt_jax.keras_compat.hooks import CallbackArguments
from tnt_jax.keras_compat.trials_done import TrialsDone
from tnt_jax.settings import read_settings

_STEPS = "TNT_TUNE_STEPS"


def choose_fit_loop() -> type[FitLoop]:
    """Returns what runs `fit` in this job: training, or the trials of `tnt-jax tune`.

    Raises:
        ValueError: If the launcher's variable is no number of steps.
    """
    steps = read_settings({_STEPS: os.environ.get(_STEPS, "")}).tune_steps
    return FitLoop if steps is None else TrialLoop


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
