"""Learning-rate schedules of the tutorials: functions of the number of updates made, traced into the training step."""

import jax.numpy as jnp


class WarmupSteps:
    """Linear warm-up, then drops at given epochs (Goyal et al. 2017, arXiv:1706.02677, section 5.1).

    The rate is `peak * epoch / warmup_epochs` in the warm-up, then `peak` times the first multiplier, and times the next one from
    each boundary on; epochs are fractions.

    Args:
        peak: Rate after the warm-up: 0.1 * global batch / 256 by the linear scaling rule.
        steps_per_epoch: Updates of an epoch.
        warmup_epochs: Length of the warm-up.
        boundaries: Epochs at which the rate changes, rising.
        multipliers: Factors of `peak`, one more than boundaries.

    Raises:
        ValueError: If there is not one multiplier more than boundaries, or the boundaries do not rise.
    """

    def __init__(self, peak, *, steps_per_epoch, warmup_epochs=5, boundaries=(30, 60, 80), multipliers=(1.0, 0.1, 0.01, 0.001)):
        if len(multipliers) != len(boundaries) + 1 or list(boundaries) != sorted(boundaries):
            raise ValueError(
                f"There must be one multiplier more than boundaries, and boundaries must rise, but they are {multipliers} and {boundaries}."
            )
        self.peak, self.steps_per_epoch, self.warmup_epochs = peak, steps_per_epoch, warmup_epochs
        self.boundaries, self.multipliers = boundaries, multipliers

    def __call__(self, step):
        epoch = jnp.asarray(step, jnp.float32) / self.steps_per_epoch
        passed = sum((epoch >= boundary).astype(jnp.int32) for boundary in self.boundaries)
        rate = self.peak * jnp.asarray(self.multipliers, jnp.float32)[passed]
        return jnp.where(epoch < self.warmup_epochs, self.peak * epoch / max(self.warmup_epochs, 1e-9), rate)


class WarmupExponential:
    """Linear warm-up, then `peak * 0.97 ** (epochs / 2.4)`, counted from the first epoch as in the tutorial.

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


class InverseSquareRoot:
    """`factor * width**-0.5 * min(1, step / warmup) / sqrt(max(step, warmup))`, steps from 1 (Vaswani et al. 2017, section 5.3).

    Args:
        factor: 2.0 in the tutorial, 1 in the paper.
        width: Width of the model.
        warmup_steps: Updates until the rate is highest.
    """

    def __init__(self, factor, *, width, warmup_steps):
        self.factor, self.width, self.warmup_steps = factor, width, warmup_steps

    def __call__(self, step):
        step = jnp.asarray(step, jnp.float32) + 1
        warm = jnp.minimum(1.0, step / self.warmup_steps)
        return self.factor * self.width**-0.5 * warm / jnp.sqrt(jnp.maximum(step, self.warmup_steps))
