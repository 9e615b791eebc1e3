"""Learning-rate schedules of the tutorials: functions of the number of updates made, traced into
the training step.
"""

import jax.numpy as jnp

import tnt_jax as tnt

WarmupSteps = tnt.schedules.WarmupSteps
InverseSquareRoot = tnt.schedules.InverseSquareRoot


class WarmupExponential:
    """Linear warm-up, then `peak * 0.97 ** (epochs / 2.4)`, counted from the first epoch as in the
    tutorial.

    Args:
        peak: Rate after the warm-up.
        steps_per_epoch: Updates of an epoch.
        warmup_epochs: Length of the warm-up.
    """

    def __init__(self, peak, *, steps_per_epoch, warmup_epochs=5):
        self.peak, self.steps_per_epoch, self.warmup_epochs = peak, steps_per_epoch, warmup_epochs

    def __call__(self, step):
        epoch = jnp.asarray(step, jnp.float32) / self.steps_per_epoch
        warm = self.peak * epoch / max(self.warmup_epochs, 1e-9)
        return jnp.where(epoch < self.warmup_epochs, warm, self.peak * 0.97 ** (epoch / 2.4))
