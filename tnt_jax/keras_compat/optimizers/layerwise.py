"""Optimizers whose rule uses a whole weight array: rows and columns, or singular values."""

import re
from collections.abc import Sequence
from typing import Unpack

import jax.numpy as jnp
from jax import Array

from tnt_jax.keras_compat.optimizers.adam import update_moments
from tnt_jax.keras_compat.optimizers.base import (
    LearningRate,
    Optimizer,
    Options,
    OptionsButDecay,
    Slots,
)


class Adafactor(Optimizer):
    """Adam with the second moment of a matrix as row and column means.

    Shazeer and Stern 2018, arXiv:1804.04235. The rate is at most 1 / sqrt(step), as in Keras for
    any `relative_step`, and is scaled by the root mean square of the weights, at least `epsilon_2`.
    """

    def __init__(
        self,
        learning_rate: LearningRate = 0.001,
        beta_2_decay: float = -0.8,
        epsilon_1: float = 1e-30,
        epsilon_2: float = 1e-3,
        clip_threshold: float = 1.0,
        relative_step: bool = True,
        **options: Unpack[Options],
    ) -> None:
        super().__init__(learning_rate, **options)
        self.beta_2_decay = beta_2_decay
        self.clip_threshold = clip_threshold
        self.relative_step = relative_step
        self.epsilon_1, self.epsilon_2 = epsilon_1, epsilon_2

    def init_leaf(self, param: Array, path: str) -> Slots:
        """Returns row and column means for two or more dimensions, else the full second moment."""
        if param.ndim < 2:
            return {"velocity": jnp.zeros_like(param)}
        shapes = {"rows": param.shape[:-1], "columns": (*param.shape[:-2], param.shape[-1])}
        return {name: jnp.zeros(shape, param.dtype) for name, shape in shapes.items()}

    def update_leaf(
        self, grad: Array, param: Array, slots: Slots, rate: Array, step: Array, shared: Slots
    ) -> tuple[Array, Slots]:
        """Returns the clipped update and the means of squares; see `Optimizer.update_leaf`."""
        square = jnp.square(grad) + self.epsilon_1
        kept = 1 - step**self.beta_2_decay
        means = {"velocity": square}
        if param.ndim >= 2:
            means = {"rows": jnp.mean(square, axis=-1), "columns": jnp.mean(square, axis=-2)}
        slots = {name: kept * slots[name] + (1 - kept) * mean for name, mean in means.items()}
        if param.ndim < 2:
            velocity = slots["velocity"]
        else:
            rows = slots["rows"] / jnp.mean(slots["rows"], axis=-1, keepdims=True)
            velocity = rows[..., None] * slots["columns"][..., None, :]
        update = grad / jnp.sqrt(velocity)
        update = update / jnp.maximum(1, _root_mean_square(update) / self.clip_threshold)
        size = jnp.maximum(self.epsilon_2, _root_mean_square(param))
        scale = size * jnp.minimum(rate, 1 / jnp.sqrt(step))
        return -scale * update, slots


class Muon(Optimizer):
    """Momentum with its singular values made equal, for matrices; Adam for everything else.

    Jordan et al. 2024 (https://kellerjordan.github.io/posts/muon), with the scale 0.2 *
    sqrt(largest dimension) of Liu et al. 2025 (arXiv:2502.16982, equation 4). As in Keras, a weight
    that is not a matrix, or whose path contains "embedding" or matches `exclude_layers`, is updated
    by Adam and decayed by `adam_weight_decay`.
    """

    def __init__(
        self,
        learning_rate: LearningRate = 0.001,
        adam_beta_1: float = 0.9,
        adam_beta_2: float = 0.999,
        adam_weight_decay: float | None = 0.004,
        epsilon: float = 1e-7,
        weight_decay: float | None = 0.004,
        *,
        exclude_layers: Sequence[str] | None = None,
        exclude_embeddings: bool = True,
        muon_a: float = 3.4445,
        muon_b: float = -4.775,
        muon_c: float = 2.0315,
        adam_lr_ratio: float = 1,
        momentum: float = 0.95,
        ns_steps: int = 5,
        nesterov: bool = True,
        rms_rate: float | None = 0.2,
        **options: Unpack[OptionsButDecay],
    ) -> None:
        super().__init__(learning_rate, weight_decay=weight_decay, **options)
        self.adam_beta_1, self.adam_beta_2 = adam_beta_1, adam_beta_2
        self.adam_weight_decay = adam_weight_decay
        self.epsilon = epsilon
        self.adam_lr_ratio = adam_lr_ratio
        self.exclude_layers = list(exclude_layers or ())
        self.exclude_embeddings = exclude_embeddings
        self.muon_a, self.muon_b, self.muon_c = muon_a, muon_b, muon_c
        self.ns_steps = ns_steps
        self.momentum, self.nesterov = momentum, nesterov
        self.rms_rate = rms_rate

    def uses_adam(self, param: Array, path: str) -> bool:
        """Returns whether a weight is updated by Adam."""
        is_embedding = self.exclude_embeddings and "embedding" in path.lower()
        is_excluded = any(re.search(pattern, path) for pattern in self.exclude_layers)
        return param.ndim != 2 or is_embedding or is_excluded

    def decay_of(self, param: Array, path: str) -> float:
        """Returns `weight_decay` or `adam_weight_decay`, 0 for an excluded weight."""
        decay = self.adam_weight_decay if self.uses_adam(param, path) else self.weight_decay
        return 0.0 if decay is None or self.is_exempt(path) else decay

    def init_leaf(self, param: Array, path: str) -> Slots:
        """Returns the momentum, and the second moment for Adam."""
        names = ["momentum", *(["velocity"] if self.uses_adam(param, path) else [])]
        return {name: jnp.zeros_like(param) for name in names}

    def update_leaf(
        self, grad: Array, param: Array, slots: Slots, rate: Array, step: Array, shared: Slots
    ) -> tuple[Array, Slots]:
        """Returns the update and the moments; see `Optimizer.update_leaf`."""
        if "velocity" in slots:
            return self._adam(grad, slots, rate * self.adam_lr_ratio, step)
        momentum = grad + self.momentum * slots["momentum"]
        direction = grad + self.momentum * momentum if self.nesterov else momentum
        coefficients = (self.muon_a, self.muon_b, self.muon_c)
        update = -rate * orthogonalized(direction, coefficients, self.ns_steps)
        scale = 1.0 if self.rms_rate is None else self.rms_rate * max(param.shape) ** 0.5
        return update * scale, {"momentum": momentum}

    def _adam(self, grad: Array, slots: Slots, rate: Array, step: Array) -> tuple[Array, Slots]:
        moments = update_moments(grad, slots, self.adam_beta_1, self.adam_beta_2)
        alpha = rate * jnp.sqrt(1 - self.adam_beta_2**step) / (1 - self.adam_beta_1**step)
        divisor = jnp.sqrt(moments["velocity"]) + self.epsilon
        return -alpha * moments["momentum"] / divisor, moments


def orthogonalized(
    matrix: Array, coefficients: tuple[float, float, float], num_iterations: int
) -> Array:
    """Returns a matrix with the same singular vectors and singular values near one."""
    # The quintic Newton-Schulz iteration: x -> a x + b (x x^T) x + c (x x^T)^2 x.
    a, b, c = coefficients
    is_tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.T if is_tall else matrix
    x = x / (jnp.linalg.norm(x) + 1e-7)
    for _ in range(num_iterations):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.T if is_tall else x


def _root_mean_square(array: Array) -> Array:
    return jnp.sqrt(jnp.mean(jnp.square(array)))
