"""Adam and its relatives, which divide a running mean of the gradients by one of their size.

Rules and defaults are those of Keras 3. If Optax has another rule of the same name, the docstring
says how it differs.
"""

from typing import Unpack

import jax.numpy as jnp
from jax import Array

from tnt_jax.keras_compat.optimizers.base import (
    LearningRate,
    Optimizer,
    Options,
    OptionsButDecay,
    Slots,
)


class Adam(Optimizer):
    """Adam with "epsilon hat" (Kingma and Ba 2015, arXiv:1412.6980, before section 2.1).

    m += (1 - beta_1) * (g - m), v += (1 - beta_2) * (g^2 - v), w -= rate * sqrt(1 - beta_2^t) /
    (1 - beta_1^t) * m / (sqrt(v) + epsilon); with `amsgrad`, the largest v so far replaces v (Reddi
    et al. 2018). Optax adds epsilon after the bias correction and defaults to 1e-8.
    """

    def __init__(
        self,
        learning_rate: LearningRate = 0.001,
        beta_1: float = 0.9,
        beta_2: float = 0.999,
        epsilon: float = 1e-7,
        amsgrad: bool = False,
        **options: Unpack[Options],
    ) -> None:
        super().__init__(learning_rate, **options)
        self.beta_1, self.beta_2, self.epsilon, self.amsgrad = beta_1, beta_2, epsilon, amsgrad

    def init_leaf(self, param: Array, path: str) -> Slots:
        """Returns both moments, and the largest second one for `amsgrad`."""
        names = ["momentum", "velocity", *(["velocity_hat"] if self.amsgrad else [])]
        return {name: jnp.zeros_like(param) for name in names}

    def update_leaf(
        self, grad: Array, param: Array, slots: Slots, rate: Array, step: Array, shared: Slots
    ) -> tuple[Array, Slots]:
        """Returns the update and the moments; see `Optimizer.update_leaf`."""
        moments = update_moments(grad, slots, self.beta_1, self.beta_2)
        velocity = moments["velocity"]
        if self.amsgrad:
            moments["velocity_hat"] = velocity = jnp.maximum(slots["velocity_hat"], velocity)
        alpha = rate * jnp.sqrt(1 - self.beta_2**step) / (1 - self.beta_1**step)
        return -alpha * moments["momentum"] / (jnp.sqrt(velocity) + self.epsilon), moments


class AdamW(Adam):
    """Adam with decoupled weight decay (Loshchilov and Hutter 2019, arXiv:1711.05101)."""

    def __init__(
        self,
        learning_rate: LearningRate = 0.001,
        weight_decay: float = 0.004,
        beta_1: float = 0.9,
        beta_2: float = 0.999,
        epsilon: float = 1e-7,
        amsgrad: bool = False,
        **options: Unpack[OptionsButDecay],
    ) -> None:
        if weight_decay is None:
            raise ValueError("weight_decay of AdamW must be a number, got None: use Adam for none.")
        everything: Options = {**options, "weight_decay": weight_decay}
        super().__init__(learning_rate, beta_1, beta_2, epsilon, amsgrad, **everything)


class _TwoMoments(Optimizer):
    """Base class of optimizers with Adam's arguments, except `amsgrad`."""

    _slots = ("momentum", "velocity")

    def __init__(
        self,
        learning_rate: LearningRate = 0.001,
        beta_1: float = 0.9,
        beta_2: float = 0.999,
        epsilon: float = 1e-7,
        **options: Unpack[Options],
    ) -> None:
        super().__init__(learning_rate, **options)
        self.beta_1, self.beta_2, self.epsilon = beta_1, beta_2, epsilon


class Adamax(_TwoMoments):
    """Adam with the infinity norm (Kingma and Ba 2015, arXiv:1412.6980, algorithm 2).

    w -= rate / (1 - beta_1^t) * m / (u + epsilon), u = max(beta_2 * u, |g|). Optax adds epsilon to
    |g| instead of u.
    """

    _slots = ("momentum", "norm")

    def update_leaf(
        self, grad: Array, param: Array, slots: Slots, rate: Array, step: Array, shared: Slots
    ) -> tuple[Array, Slots]:
        """Returns the update, the first moment and the norm; see `Optimizer.update_leaf`."""
        momentum = slots["momentum"] + (1 - self.beta_1) * (grad - slots["momentum"])
        norm = jnp.maximum(self.beta_2 * slots["norm"], jnp.abs(grad))
        update = -rate * momentum / ((1 - self.beta_1**step) * (norm + self.epsilon))
        return update, {"momentum": momentum, "norm": norm}


class Nadam(_TwoMoments):
    """Adam with Nesterov momentum and the momentum schedule u_t = beta_1 * (1 - 0.96^t / 2).

    Dozat 2016, "Incorporating Nesterov momentum into Adam", algorithm 2; w -= rate * m_hat /
    (sqrt(v / (1 - beta_2^t)) + epsilon) with m_hat = u_(t+1) * m / (1 - prod_(i <= t+1) u_i) + (1 -
    u_t) * g / (1 - prod_(i <= t) u_i). Optax has no schedule of u.
    """

    def init_shared(self) -> Slots:
        """Returns the empty product of the u."""
        return {"u_product": jnp.ones(())}

    def update_shared(self, shared: Slots, step: Array) -> Slots:
        """Returns the product of the u up to `step`."""
        return {"u_product": shared["u_product"] * self._u(step)}

    def _u(self, step: Array) -> Array:
        return self.beta_1 * (1 - 0.5 * 0.96**step)

    def update_leaf(
        self, grad: Array, param: Array, slots: Slots, rate: Array, step: Array, shared: Slots
    ) -> tuple[Array, Slots]:
        """Returns the update and both moments; see `Optimizer.update_leaf`."""
        moments = update_moments(grad, slots, self.beta_1, self.beta_2)
        product = shared["u_product"]
        following = self._u(step + 1)
        ahead = following * moments["momentum"] / (1 - product * following)
        momentum = ahead + (1 - self._u(step)) * grad / (1 - product)
        velocity = moments["velocity"] / (1 - self.beta_2**step)
        return -rate * momentum / (jnp.sqrt(velocity) + self.epsilon), moments


class Lamb(_TwoMoments):
    """Adam's step scaled to each array's norm (You et al. 2020, arXiv:1904.00962, algorithm 2)."""

    def update_leaf(
        self, grad: Array, param: Array, slots: Slots, rate: Array, step: Array, shared: Slots
    ) -> tuple[Array, Slots]:
        """Returns the scaled update and both moments; see `Optimizer.update_leaf`."""
        moments = update_moments(grad, slots, self.beta_1, self.beta_2)
        momentum = moments["momentum"] / (1 - self.beta_1**step)
        velocity = moments["velocity"] / (1 - self.beta_2**step)
        update = momentum / (jnp.sqrt(velocity) + self.epsilon)
        param_norm, update_norm = (jnp.sqrt(jnp.sum(jnp.square(x))) for x in (param, update))
        has_ratio = (param_norm > 0) & (update_norm > 0)
        ratio = jnp.where(has_ratio, param_norm / jnp.where(has_ratio, update_norm, 1), 1)
        return -ratio * rate * update, moments


def update_moments(grad: Array, slots: Slots, beta_1: float, beta_2: float) -> Slots:
    """Returns the running means of the gradient and of its square after one more gradient."""
    momentum, velocity = slots["momentum"], slots["velocity"]
    return {
        "momentum": momentum + (1 - beta_1) * (grad - momentum),
        "velocity": velocity + (1 - beta_2) * (jnp.square(grad) - velocity),
    }
