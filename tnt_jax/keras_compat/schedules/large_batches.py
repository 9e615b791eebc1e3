"""Learning rates for large batches: how they grow with the batch, and how training warms up."""

from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from tnt_jax.keras_compat.schedules.keras_schedules import LearningRateSchedule


def scale_linearly(learning_rate: float, *, batch_size: int, base_batch_size: int) -> float:
    """Returns the rate for a global batch, in proportion to its size.

    This is the linear scaling rule of Goyal et al. 2017 (arXiv:1706.02677, section 2.1).

    Args:
        learning_rate: A good rate for `base_batch_size`.
        batch_size: Rows of the global batch.
        base_batch_size: Rows of the batch for which the rate was found.

    Raises:
        ValueError: If a size is below 1.
    """
    return learning_rate * _ratio(batch_size, base_batch_size)


def scale_by_square_root(learning_rate: float, *, batch_size: int, base_batch_size: int) -> float:
    """Returns the rate for a global batch, in proportion to the square root of its size.

    This keeps the variance of an update (Krizhevsky 2014, arXiv:1404.5997, section 5). Arguments
    and errors are those of `scale_linearly`.
    """
    return learning_rate * _ratio(batch_size, base_batch_size) ** 0.5


@dataclass(eq=False, repr=False)
class GradualWarmup(LearningRateSchedule):
    """A linear warm-up, step by step, to a constant rate or to the rate of another schedule.

    It is that of Goyal et al. 2017 (arXiv:1706.02677, section 2.2). Horovod's warm-up rises from
    the rate of one rank to that of all:
    `GradualWarmup(rate * tnt.get_size(), warmup_steps=5 * steps_per_epoch,
    initial_learning_rate=rate)`.

    Args:
        learning_rate: The rate after the warm-up, or a schedule, which counts steps from the
            beginning of training; the warm-up ends at its rate of step `warmup_steps`.
        warmup_steps: Length of the warm-up, in updates; 0 for none.
        initial_learning_rate: The rate at step 0.

    Raises:
        ValueError: If `warmup_steps` is negative.
    """

    learning_rate: float | Callable[[ArrayLike], ArrayLike]
    _: KW_ONLY
    warmup_steps: int
    initial_learning_rate: float = 0.0
    name: str = "GradualWarmup"

    def __post_init__(self) -> None:
        if self.warmup_steps < 0:
            raise ValueError(f"warmup_steps must be at least 0, got {self.warmup_steps}.")

    def __call__(self, step: ArrayLike) -> jax.Array:
        """Returns the rate at `step`."""
        step = jnp.asarray(step)
        fraction = jnp.minimum(step, self.warmup_steps) / max(self.warmup_steps, 1)
        target = self._after(jnp.maximum(step, self.warmup_steps))
        rising = self.initial_learning_rate + (target - self.initial_learning_rate) * fraction
        return jnp.where(step < self.warmup_steps, rising, target)

    def _after(self, step: jax.Array) -> jax.Array:
        rate = self.learning_rate(step) if callable(self.learning_rate) else self.learning_rate
        return jnp.asarray(rate, jnp.float32)


@dataclass(eq=False, repr=False)
class WarmupSteps(LearningRateSchedule):
    """A linear warm-up from 0, then drops at given epochs.

    The schedule is that of Goyal et al. 2017 (arXiv:1706.02677, section 5.1). The rate is
    `peak * epoch / warmup_epochs` in the warm-up, then `peak` times the first multiplier, and times
    the next one from each boundary on; epochs are fractions.

    Args:
        peak: Rate after the warm-up: 0.1 * global batch / 256 by the linear scaling rule.
        steps_per_epoch: Updates of an epoch.
        warmup_epochs: Length of the warm-up.
        boundaries: Epochs at which the rate changes, rising.
        multipliers: Factors of `peak`, one more than boundaries.

    Raises:
        ValueError: If there is not one multiplier more than boundaries, or the boundaries do not
            rise.
    """

    peak: float
    _: KW_ONLY
    steps_per_epoch: int
    warmup_epochs: float = 5
    boundaries: Sequence[float] = (30, 60, 80)
    multipliers: Sequence[float] = (1.0, 0.1, 0.01, 0.001)
    name: str = "WarmupSteps"

    def __post_init__(self) -> None:
        multipliers, boundaries = list(self.multipliers), list(self.boundaries)
        if len(multipliers) != len(boundaries) + 1 or boundaries != sorted(boundaries):
            raise ValueError(
                f"There must be one multiplier more than boundaries, and boundaries must rise, "
                f"but they are {self.multipliers} and {self.boundaries}."
            )
        self.multipliers, self.boundaries = multipliers, boundaries

    def __call__(self, step: ArrayLike) -> jax.Array:
        """Returns the rate at `step`."""
        epoch = jnp.asarray(step, jnp.float32) / self.steps_per_epoch
        passed = jnp.sum(epoch >= jnp.asarray(self.boundaries, jnp.float32)).astype(jnp.int32)
        rate = self.peak * jnp.asarray(self.multipliers, jnp.float32)[passed]
        warm = self.peak * epoch / max(self.warmup_epochs, 1e-9)
        return jnp.where(epoch < self.warmup_epochs, warm, rate)


@dataclass(eq=False, repr=False)
class InverseSquareRoot(LearningRateSchedule):
    """A linear warm-up, then a rate that falls with the square root of the step.

    The rate is `factor * width**-0.5 * min(1, step / warmup) / sqrt(max(step, warmup))`, with steps
    from 1 (Vaswani et al. 2017, arXiv:1706.03762, section 5.3).

    Args:
        factor: 1 in the paper.
        width: Width of the model.
        warmup_steps: Updates until the rate is highest.
    """

    factor: float
    _: KW_ONLY
    width: int
    warmup_steps: int
    name: str = "InverseSquareRoot"

    def __call__(self, step: ArrayLike) -> jax.Array:
        """Returns the rate at `step`, counted from 0."""
        number = jnp.asarray(step, jnp.float32) + 1
        warm = jnp.minimum(1.0, number / self.warmup_steps)
        highest = self.factor * self.width**-0.5
        return highest * warm / jnp.sqrt(jnp.maximum(number, self.warmup_steps))


def _ratio(batch_size: int, base_batch_size: int) -> float:
    if batch_size < 1 or base_batch_size < 1:
        raise ValueError(
            f"Sizes of batches must be at least 1, but are batch_size={batch_size} and "
            f"base_batch_size={base_batch_size}."
        )
    return batch_size / base_batch_size
