"""What `fit` does in this job: train, or what a command of `tnt-jax` asks for instead.

The launcher says so by `TNT_TUNE_STEPS`, `TNT_PLAN` or `TNT_SCALE_STEPS`. `FitLoop` knows nothing
of it.
"""

import os

from tnt_jax.keras_compat.fit.fit_loop import FitLoop
from tnt_jax.settings import read_settings

_CHOICES = ("TNT_TUNE_STEPS", "TNT_PLAN", "TNT_SCALE_STEPS")


def choose_fit_loop() -> type[FitLoop]:
    """Returns what runs `fit` in this job: training, trials, a plan, or steps that are timed."""
    settings = read_settings({name: os.environ.get(name, "") for name in _CHOICES})
    # Training needs none of them.
    if settings.scale_steps is not None:
        from tnt_jax.keras_compat.fit.trials.scale_loop import ScaledTrialLoop, ScaleLoop

        return ScaleLoop if settings.tune_steps is None else ScaledTrialLoop
    if settings.plan or settings.tune_steps is not None:
        from tnt_jax.keras_compat.fit.trials.trial_loop import PlanLoop, TrialLoop

        return PlanLoop if settings.plan else TrialLoop
    return FitLoop
