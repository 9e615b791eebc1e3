"""Optimizers that use sums or averages over all gradients, with Keras 3's rules and defaults."""

from typing import Unpack

import jax.numpy as jnp
from jax import Array

from tnt_jax.keras_compat.optimizers.base import LearningRate, Optimizer, Options, Slots

_NOT_NEGATIVE = """
    initial_accumulator_value l1_regularization_strength l2_regularization_strength
    l2_shrinkage_regularization_strength
""".split()


class Ftrl(Optimizer):
    """Follow the regularized leader.

    McMahan et al. 2013, "Ad click prediction: a view from the trenches", algorithm 1:
    n += g^2, z += g + 2 * shrinkage * w - (n^-p - n_before^-p) / rate * w, with p =
    `learning_rate_power`; w = (clip(z, -l1, l1) - z) / (n^-p / rate + 2 * l2 + beta / rate). Optax
    has no such rule.
    """

    def __init__(
        self,
        learning_rate: LearningRate = 0.001,
        learning_rate_power: float = -0.5,
        initial_accumulator_value: float = 0.1,
        l1_regularization_strength: float = 0.0,
        l2_regularization_strength: float = 0.0,
        l2_shrinkage_regularization_strength: float = 0.0,
        beta: float = 0.0,
        **options: Unpack[Options],
    ) -> None:
        super().__init__(learning_rate, **options)
        if learning_rate_power > 0:
            raise ValueError(
                f"learning_rate_power must be negative or zero, got {learning_rate_power}."
            )
        self.learning_rate_power = learning_rate_power
        self.beta = beta
        self.initial_accumulator_value = initial_accumulator_value
        self.l1_regularization_strength = l1_regularization_strength
        self.l2_regularization_strength = l2_regularization_strength
        self.l2_shrinkage_regularization_strength = l2_shrinkage_regularization_strength
        for name in _NOT_NEGATIVE:
            if (value := getattr(self, name)) < 0:
                raise ValueError(f"{name} must be positive or zero, got {value}.")

    def init_leaf(self, param: Array, path: str) -> Slots:
        """Returns the sum of squares at its initial value, and the linear term."""
        return {
            "accumulator": jnp.full_like(param, self.initial_accumulator_value),
            "linear": jnp.zeros_like(param),
        }

    def update_leaf(
        self, grad: Array, param: Array, slots: Slots, rate: Array, step: Array, shared: Slots
    ) -> tuple[Array, Slots]:
        """Returns the step to the closed solution, and both sums; see `Optimizer.update_leaf`."""
        power = -self.learning_rate_power
        before = slots["accumulator"]
        accumulator = before + jnp.square(grad)
        shrunk = grad + 2 * self.l2_shrinkage_regularization_strength * param
        linear = slots["linear"] + shrunk - (accumulator**power - before**power) / rate * param
        quadratic = accumulator**power / rate + 2 * (
            self.l2_regularization_strength + self.beta / (2 * rate)
        )
        clipped = jnp.clip(
            linear, -self.l1_regularization_strength, self.l1_regularization_strength
        )
        return (clipped - linear) / quadratic - param, {
            "accumulator": accumulator,
            "linear": linear,
        }


class ScheduleFreeAdamW(Optimizer):
    """Adam that averages its weights instead of decaying its learning rate.

    Defazio et al. 2024, arXiv:2405.15682, algorithm 1:
    z -= rate * g / (sqrt(v / (1 - beta_2^t)) + epsilon), x += (z - x) / t, w = (1 - beta_1) * z +
    beta_1 * x; the rate rises linearly over the first `warmup_steps` updates. As in Keras, the
    model is evaluated at w, and all steps have the same weight in x.
    """

    def __init__(
        self,
        learning_rate: LearningRate = 0.0025,
        beta_1: float = 0.9,
        beta_2: float = 0.999,
        epsilon: float = 1e-8,
        warmup_steps: int = 0,
        **options: Unpack[Options],
    ) -> None:
        super().__init__(learning_rate, **options)
        self.beta_1 = beta_1
        self.beta_2 = beta_2
        self.epsilon = epsilon
        self.warmup_steps = warmup_steps

    def init_leaf(self, param: Array, path: str) -> Slots:
        """Returns z, which begins at the weights, and the second moment."""
        return {"momentum": jnp.array(param), "velocity": jnp.zeros_like(param)}

    def update_leaf(
        self, grad: Array, param: Array, slots: Slots, rate: Array, step: Array, shared: Slots
    ) -> tuple[Array, Slots]:
        """Returns the step of the average, z and the second moment; see `Optimizer.update_leaf`."""
        if self.warmup_steps > 0:
            rate = rate * jnp.minimum(step / self.warmup_steps, 1)
        before = slots["momentum"]
        velocity = slots["velocity"] + (1 - self.beta_2) * (jnp.square(grad) - slots["velocity"])
        momentum = before - rate * grad / (
            jnp.sqrt(velocity / (1 - self.beta_2**step)) + self.epsilon
        )
        average = (param - (1 - self.beta_1) * before) / self.beta_1
        average = (1 - 1 / step) * average + momentum / step
        interpolated = (1 - self.beta_1) * momentum + self.beta_1 * average
        return interpolated - param, {"momentum": momentum, "velocity": velocity}
