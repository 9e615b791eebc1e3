"""Keras 3's elementwise optimizers; docstrings say how rules of Optax of these names differ."""

from typing import Unpack

import jax.numpy as jnp
from jax import Array

from tnt_jax.keras_compat.optimizers.base import LearningRate, Optimizer, Options, Slots

_NOT_NEGATIVE = """
    initial_accumulator_value l1_regularization_strength l2_regularization_strength
    l2_shrinkage_regularization_strength
""".split()


class SGD(Optimizer):
    """Gradient descent: m = momentum * m - rate * g, w += m.

    With Nesterov, w += momentum * m - rate * g.
    Optax multiplies by the rate after the momentum, which differs if the rate changes.
    """

    def __init__(
        self,
        learning_rate: LearningRate = 0.01,
        momentum: float = 0.0,
        nesterov: bool = False,
        **options: Unpack[Options],
    ) -> None:
        super().__init__(learning_rate, **options)
        if not 0 <= momentum <= 1:
            raise ValueError(f"momentum must be in [0, 1], got {momentum}.")
        self.momentum, self.nesterov = momentum, nesterov

    def init_leaf(self, param: Array, path: str) -> Slots:
        """Returns the momentum, if there is any."""
        return {"momentum": jnp.zeros_like(param)} if self.momentum else {}

    def update_leaf(
        self, grad: Array, param: Array, slots: Slots, rate: Array, step: Array, shared: Slots
    ) -> tuple[Array, Slots]:
        """Returns the update and the momentum, if there is any; see `Optimizer.update_leaf`."""
        if not slots:
            return -rate * grad, slots
        momentum = self.momentum * slots["momentum"] - rate * grad
        update = self.momentum * momentum - rate * grad if self.nesterov else momentum
        return update, {"momentum": momentum}


class RMSprop(Optimizer):
    """Divides by a running root mean square of the gradients.

    v = rho * v + (1 - rho) * g^2, w -= rate * g / sqrt(v + epsilon).
    With `centered`, v - mean(g)^2 replaces v; with momentum, m = momentum * m + rate * g / sqrt(v +
    epsilon), w -= m (Hinton, Neural Networks for Machine Learning, lecture 6).
    """

    def __init__(
        self,
        learning_rate: LearningRate = 0.001,
        rho: float = 0.9,
        momentum: float = 0.0,
        epsilon: float = 1e-7,
        centered: bool = False,
        **options: Unpack[Options],
    ) -> None:
        super().__init__(learning_rate, **options)
        self.rho, self.momentum, self.epsilon, self.centered = rho, momentum, epsilon, centered

    def init_leaf(self, param: Array, path: str) -> Slots:
        """Returns the running square and, if needed, the momentum and the running gradient."""
        names = [
            "velocity",
            *(["momentum"] if self.momentum > 0 else []),
            *(["average_gradient"] if self.centered else []),
        ]
        return {name: jnp.zeros_like(param) for name in names}

    def update_leaf(
        self, grad: Array, param: Array, slots: Slots, rate: Array, step: Array, shared: Slots
    ) -> tuple[Array, Slots]:
        """Returns the update and the means of the gradients; see `Optimizer.update_leaf`."""
        rho = self.rho
        slots = dict(slots)
        slots["velocity"] = variance = rho * slots["velocity"] + (1 - rho) * jnp.square(grad)
        if self.centered:
            slots["average_gradient"] = rho * slots["average_gradient"] + (1 - rho) * grad
            variance = variance - jnp.square(slots["average_gradient"])
        increment = rate * grad / jnp.sqrt(variance + self.epsilon)
        if self.momentum > 0:
            slots["momentum"] = increment = self.momentum * slots["momentum"] + increment
        return -increment, slots


class Adadelta(Optimizer):
    """d = -rms(past d) / rms(g) * g, w += rate * d (Zeiler 2012, arXiv:1212.5701)."""

    _slots = ("accumulated_grad", "accumulated_delta")

    def __init__(
        self,
        learning_rate: LearningRate = 0.001,
        rho: float = 0.95,
        epsilon: float = 1e-7,
        **options: Unpack[Options],
    ) -> None:
        super().__init__(learning_rate, **options)
        self.rho, self.epsilon = rho, epsilon

    def update_leaf(
        self, grad: Array, param: Array, slots: Slots, rate: Array, step: Array, shared: Slots
    ) -> tuple[Array, Slots]:
        """Returns the update and the means of both squares; see `Optimizer.update_leaf`."""
        rho, epsilon = self.rho, self.epsilon
        squares = rho * slots["accumulated_grad"] + (1 - rho) * jnp.square(grad)
        delta = -jnp.sqrt(slots["accumulated_delta"] + epsilon) * grad / jnp.sqrt(squares + epsilon)
        deltas = rho * slots["accumulated_delta"] + (1 - rho) * jnp.square(delta)
        return rate * delta, {"accumulated_grad": squares, "accumulated_delta": deltas}


class Adagrad(Optimizer):
    """a += g^2, w -= rate * g / sqrt(a + epsilon) (Duchi et al. 2011)."""

    def __init__(
        self,
        learning_rate: LearningRate = 0.001,
        initial_accumulator_value: float = 0.1,
        epsilon: float = 1e-7,
        **options: Unpack[Options],
    ) -> None:
        super().__init__(learning_rate, **options)
        self.initial_accumulator_value, self.epsilon = initial_accumulator_value, epsilon

    def init_leaf(self, param: Array, path: str) -> Slots:
        """Returns the sum of squares at its initial value."""
        return {"accumulator": jnp.full_like(param, self.initial_accumulator_value)}

    def update_leaf(
        self, grad: Array, param: Array, slots: Slots, rate: Array, step: Array, shared: Slots
    ) -> tuple[Array, Slots]:
        """Returns the update and the sum of squares; see `Optimizer.update_leaf`."""
        accumulator = slots["accumulator"] + jnp.square(grad)
        return -rate * grad / jnp.sqrt(accumulator + self.epsilon), {"accumulator": accumulator}


class Lion(Optimizer):
    """w -= rate * sign(beta_1 * m + (1 - beta_1) * g) (Chen et al. 2023, arXiv:2302.06675)."""

    _slots = ("momentum",)

    def __init__(
        self,
        learning_rate: LearningRate = 0.001,
        beta_1: float = 0.9,
        beta_2: float = 0.99,
        **options: Unpack[Options],
    ) -> None:
        super().__init__(learning_rate, **options)
        if not 0 < beta_1 <= 1:
            raise ValueError(
                f"beta_1 must be in (0, 1], got {beta_1}; at 0 Lion is the sign of the gradient."
            )
        self.beta_1, self.beta_2 = beta_1, beta_2

    def update_leaf(
        self, grad: Array, param: Array, slots: Slots, rate: Array, step: Array, shared: Slots
    ) -> tuple[Array, Slots]:
        """Returns the update and the momentum; see `Optimizer.update_leaf`."""
        momentum = slots["momentum"]
        update = -rate * jnp.sign(self.beta_1 * momentum + (1 - self.beta_1) * grad)
        return update, {"momentum": self.beta_2 * momentum + (1 - self.beta_2) * grad}


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
        initial = jnp.full_like(param, self.initial_accumulator_value)
        return {"accumulator": initial, "linear": jnp.zeros_like(param)}

    def update_leaf(
        self, grad: Array, param: Array, slots: Slots, rate: Array, step: Array, shared: Slots
    ) -> tuple[Array, Slots]:
        """Returns the step to the closed solution, and both sums; see `Optimizer.update_leaf`."""
        power = -self.learning_rate_power
        before = slots["accumulator"]
        accumulator = before + jnp.square(grad)
        shrunk = grad + 2 * self.l2_shrinkage_regularization_strength * param
        linear = slots["linear"] + shrunk - (accumulator**power - before**power) / rate * param
        l2 = self.l2_regularization_strength + self.beta / (2 * rate)
        quadratic = accumulator**power / rate + 2 * l2
        l1 = self.l1_regularization_strength
        clipped = jnp.clip(linear, -l1, l1)
        slots = {"accumulator": accumulator, "linear": linear}
        return (clipped - linear) / quadratic - param, slots


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
        self.beta_1, self.beta_2, self.epsilon = beta_1, beta_2, epsilon
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
        divisor = jnp.sqrt(velocity / (1 - self.beta_2**step)) + self.epsilon
        momentum = before - rate * grad / divisor
        average = (param - (1 - self.beta_1) * before) / self.beta_1
        average = (1 - 1 / step) * average + momentum / step
        interpolated = (1 - self.beta_1) * momentum + self.beta_1 * average
        return interpolated - param, {"momentum": momentum, "velocity": velocity}
