"""Keras's learning-rate schedules, from a step to a rate: its names, arguments and values."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from tnt_jax.keras_compat import configuration
from tnt_jax.keras_compat.configuration import Recorded


class LearningRateSchedule(Recorded):
    """Base class of schedules.

    An optimizer also accepts any other callable from a step to a rate. Subclasses are saved with a
    model, by the arguments of their constructor.
    """

    def __call__(self, step: ArrayLike) -> jax.Array:
        """Returns the rate of the step after `step` steps."""
        raise NotImplementedError(f"{type(self).__name__} must implement __call__(step).")


@dataclass(eq=False, repr=False)
class Constant(LearningRateSchedule):
    """A constant rate."""

    learning_rate: float

    def __call__(self, step: ArrayLike) -> jax.Array:
        """Returns the rate."""
        return jnp.full((), self.learning_rate, jnp.float32)


@dataclass(eq=False, repr=False)
class ExponentialDecay(LearningRateSchedule):
    """initial * decay_rate^(step / decay_steps).

    Args:
        initial_learning_rate: The rate at step 0.
        decay_steps: Number of steps after which the rate is multiplied by `decay_rate`; positive.
        decay_rate: The factor.
        staircase: Whether the exponent is rounded down.
    """

    initial_learning_rate: float
    decay_steps: int
    decay_rate: float
    staircase: bool = False
    name: str = "ExponentialDecay"

    def __post_init__(self) -> None:
        _require_positive("decay_steps", self.decay_steps)

    def __call__(self, step: ArrayLike) -> jax.Array:
        """Returns the rate at `step`."""
        periods = _periods(step, self.decay_steps, self.staircase)
        return self.initial_learning_rate * jnp.float32(self.decay_rate) ** periods


@dataclass(eq=False, repr=False)
class InverseTimeDecay(LearningRateSchedule):
    """initial / (1 + decay_rate * step / decay_steps).

    Args:
        initial_learning_rate: The rate at step 0.
        decay_steps: Length of one period, in steps; positive.
        decay_rate: The amount that one period adds to the divisor.
        staircase: Whether the number of periods is rounded down.
    """

    initial_learning_rate: float
    decay_steps: int
    decay_rate: float
    staircase: bool = False
    name: str = "InverseTimeDecay"

    def __post_init__(self) -> None:
        _require_positive("decay_steps", self.decay_steps)

    def __call__(self, step: ArrayLike) -> jax.Array:
        """Returns the rate at `step`."""
        periods = _periods(step, self.decay_steps, self.staircase)
        return self.initial_learning_rate / (1 + self.decay_rate * periods)


@dataclass(eq=False, repr=False)
class PolynomialDecay(LearningRateSchedule):
    """(initial - end) * (1 - step / decay_steps)^power + end, and `end` after `decay_steps`.

    Args:
        initial_learning_rate: The rate at step 0.
        decay_steps: Length of the decay, in steps; positive.
        end_learning_rate: The last rate.
        power: Exponent; 1 is linear.
        cycle: Whether, instead of staying at the end, `decay_steps` is stretched to its next
            multiple above the step.
    """

    initial_learning_rate: float
    decay_steps: int
    end_learning_rate: float = 1e-4
    power: float = 1.0
    cycle: bool = False
    name: str = "PolynomialDecay"

    def __post_init__(self) -> None:
        _require_positive("decay_steps", self.decay_steps)

    def __call__(self, step: ArrayLike) -> jax.Array:
        """Returns the rate at `step`."""
        step = jnp.asarray(step, jnp.float32)
        length = jnp.float32(self.decay_steps)
        if self.cycle:
            length = length * jnp.maximum(1, jnp.ceil(step / length))
        remaining = 1 - jnp.minimum(step, length) / length
        span = self.initial_learning_rate - self.end_learning_rate
        return span * remaining**self.power + self.end_learning_rate


@dataclass(eq=False, repr=False)
class PiecewiseConstantDecay(LearningRateSchedule):
    """Constant rates: `values[i]` up to and including step `boundaries[i]`, then the last value.

    Args:
        boundaries: Steps in increasing order.
        values: Rates, one more than boundaries.
    """

    boundaries: Sequence[float]
    values: Sequence[float]
    name: str = "PiecewiseConstant"

    def __post_init__(self) -> None:
        self.boundaries, self.values = list(self.boundaries), list(self.values)
        if len(self.values) != len(self.boundaries) + 1:
            raise ValueError(
                f"There must be one more value than boundaries, got {len(self.values)} values for "
                f"{len(self.boundaries)} boundaries."
            )
        if self.boundaries != sorted(self.boundaries):
            raise ValueError(f"boundaries must increase, got {self.boundaries}.")

    def __call__(self, step: ArrayLike) -> jax.Array:
        """Returns the rate at `step`."""
        passed = jnp.sum(jnp.asarray(step) > jnp.asarray(np.array(self.boundaries)))
        return jnp.asarray(self.values, jnp.float32)[passed]


@dataclass(eq=False, repr=False)
class CosineDecay(LearningRateSchedule):
    """Half a cosine from the initial rate to `alpha` times it, after an optional linear warm-up.

    Loshchilov and Hutter 2017, arXiv:1608.03983; warm-up as in Goyal et al. 2017, arXiv:1706.02677.

    Args:
        initial_learning_rate: The rate at step 0, and without warm-up the largest.
        decay_steps: Length of the decay in steps, after the warm-up; positive.
        alpha: The last rate, as a fraction of the largest.
        warmup_target: The rate at the end of the warm-up; no warm-up if None.
        warmup_steps: Length of the warm-up, in steps.
    """

    initial_learning_rate: float
    decay_steps: int
    alpha: float = 0.0
    name: str = "CosineDecay"
    warmup_target: float | None = None
    warmup_steps: int = 0

    def __post_init__(self) -> None:
        _require_positive("decay_steps", self.decay_steps)

    def __call__(self, step: ArrayLike) -> jax.Array:
        """Returns the rate at `step`."""
        step = jnp.asarray(step, jnp.float32)
        if self.warmup_target is None:
            return self._decayed(step, self.initial_learning_rate)
        decayed = self._decayed(step - self.warmup_steps, self.warmup_target)
        if not self.warmup_steps:
            return decayed
        slope = (self.warmup_target - self.initial_learning_rate) / self.warmup_steps
        warm = self.initial_learning_rate + slope * step
        return jnp.where(step < self.warmup_steps, warm, decayed)

    def _decayed(self, step: jax.Array, largest: float) -> jax.Array:
        fraction = jnp.minimum(step, self.decay_steps) / self.decay_steps
        return largest * ((1 - self.alpha) * 0.5 * (1 + jnp.cos(jnp.pi * fraction)) + self.alpha)


@dataclass(eq=False, repr=False)
class CosineDecayRestarts(LearningRateSchedule):
    """Successive half cosines, each `t_mul` times longer and `m_mul` times higher than the last.

    Loshchilov and Hutter 2017, arXiv:1608.03983 (SGDR).

    Args:
        initial_learning_rate: The rate at step 0.
        first_decay_steps: Length of the first period, in steps; positive.
        t_mul: Length of a period relative to the one before.
        m_mul: First rate of a period relative to the one before.
        alpha: Smallest rate, as a fraction of the initial one.
    """

    initial_learning_rate: float
    first_decay_steps: int
    t_mul: float = 2.0
    m_mul: float = 1.0
    alpha: float = 0.0
    name: str = "SGDRDecay"

    def __post_init__(self) -> None:
        _require_positive("first_decay_steps", self.first_decay_steps)

    def __call__(self, step: ArrayLike) -> jax.Array:
        """Returns the rate at `step`."""
        periods = jnp.asarray(step, jnp.float32) / self.first_decay_steps
        if self.t_mul == 1:
            restarts = jnp.floor(periods)
            fraction = periods - restarts
        else:
            # The first n periods take (t_mul^n - 1) / (t_mul - 1) of the first one.
            grown = 1 - periods * (1 - self.t_mul)
            restarts = jnp.floor(jnp.log(grown) / jnp.log(jnp.float32(self.t_mul)))
            length = jnp.float32(self.t_mul) ** restarts
            fraction = (periods - (1 - length) / (1 - self.t_mul)) / length
        cosine = 0.5 * jnp.float32(self.m_mul) ** restarts * (1 + jnp.cos(jnp.pi * fraction))
        return self.initial_learning_rate * ((1 - self.alpha) * cosine + self.alpha)


def serialize(learning_rate_schedule: LearningRateSchedule) -> dict[str, Any]:
    """Returns a schedule as plain values that JSON can hold, in Keras's form."""
    return configuration.serialize(learning_rate_schedule)


def deserialize(config: Any, custom_objects: Mapping[str, Any] | None = None) -> Any:
    """Returns the schedule that `serialize`, or Keras's own, wrote.

    Names are also those of the user's `custom_objects`; an unknown one raises a ValueError.
    """
    return configuration.deserialize(config, "schedules", custom_objects)


def _require_positive(name: str, value: int) -> None:
    if value <= 0:
        raise ValueError(f"{name} must be positive, got {value}.")


def _periods(step: ArrayLike, decay_steps: int, staircase: bool) -> jax.Array:
    periods = jnp.asarray(step, jnp.float32) / decay_steps
    return jnp.floor(periods) if staircase else periods
