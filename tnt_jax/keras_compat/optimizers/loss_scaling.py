"""An optimizer wrapper that scales the loss, for training in float16."""

from typing import Any

import optax

from tnt_jax.keras_compat.configuration import plain
from tnt_jax.keras_compat.optimizers.base import LearningRate, Optimizer
from tnt_jax.train.finite import with_dynamic_scale

# Keras writes these into configurations, with values that have no effect.
_SAYING_NOTHING = {
    "dynamic": True,
    "weight_decay": None,
    "clipnorm": None,
    "global_clipnorm": None,
    "clipvalue": None,
    "use_ema": False,
    "ema_momentum": 0.99,
    "ema_overwrite_frequency": None,
    "loss_scale_factor": None,
    "gradient_accumulation_steps": None,
}


class LossScaleOptimizer(Optimizer):
    """Scales the loss, so that small gradients do not underflow in float16, and unscales them.

    If the gradients, summed over all ranks, are not all finite, a step changes no weights and
    halves the scale. `dynamic_growth_steps` finite steps in a row double it. With
    `gradient_accumulation_steps` of the inner optimizer, "step" means update here. As in Keras, a
    skipped step still updates the statistics of `BatchNormalization`.

    Args:
        inner_optimizer: Optimizer of the unscaled gradients; its learning rate is that of this one.
        initial_scale: Initial scale; the changing scale is part of the optimizer state.
        dynamic_growth_steps: Finite steps after which the scale is doubled.
        **kwargs: Options of other optimizers with values that have no effect, as in Keras. Pass
            options to `inner_optimizer`.

    Raises:
        TypeError: If `inner_optimizer` is not a tnt_jax optimizer.
        ValueError: If an option belongs to the inner optimizer or is unknown.
    """

    def __init__(
        self,
        inner_optimizer: Optimizer,
        initial_scale: float = 2.0**15,
        dynamic_growth_steps: int = 2000,
        name: str | None = None,
        **kwargs: Any,
    ) -> None:
        _check(inner_optimizer, kwargs)
        self.inner_optimizer = inner_optimizer
        # As in Keras: the loss would be scaled twice.
        inner_optimizer.loss_scale_factor = None  # type: ignore[attr-defined]
        self.initial_scale = initial_scale
        self.dynamic_growth_steps = dynamic_growth_steps
        # The base class's settings are those of the inner optimizer, which also has the rate.
        self.name = name or "loss_scale_optimizer"
        self.use_ema, self.ema_momentum = inner_optimizer.use_ema, inner_optimizer.ema_momentum
        self.ema_overwrite_frequency = inner_optimizer.ema_overwrite_frequency
        self.gradient_accumulation_steps = inner_optimizer.gradient_accumulation_steps

    def get_config(self) -> dict[str, Any]:
        """Returns the arguments, and those of the inner optimizer, as plain values."""
        return {
            "name": self.name,
            "initial_scale": self.initial_scale,
            "dynamic_growth_steps": self.dynamic_growth_steps,
            "inner_optimizer": plain(self.inner_optimizer),
        }

    @property
    def learning_rate(self) -> LearningRate | None:  # type: ignore[override]
        """Rate or schedule of the inner optimizer."""
        return self.inner_optimizer.learning_rate

    @learning_rate.setter
    def learning_rate(self, value: LearningRate | None) -> None:
        """Sets the rate of the inner optimizer."""
        self.inner_optimizer.learning_rate = value

    @property
    def _undecayed(self) -> tuple[str, ...]:  # type: ignore[override]
        return self.inner_optimizer._undecayed

    def transformation(self) -> optax.GradientTransformation:
        """Returns a transformation of scaled gradients; its state is a `LossScaleState`."""
        return self.scaled(self.inner_optimizer.transformation())

    def scaled(self, inner: optax.GradientTransformation) -> optax.GradientTransformation:
        """Returns a transformation of scaled gradients around one of the unscaled gradients."""
        steps = self.dynamic_growth_steps
        return with_dynamic_scale(inner, initial_scale=self.initial_scale, growth_steps=steps)


def _check(inner: Any, options: dict[str, Any]) -> None:
    if not isinstance(inner, Optimizer):
        raise TypeError(
            "inner_optimizer must be an optimizer, such as tnt_jax.optimizers.Adam(1e-3), but is "
            f"{inner!r}. tnt_jax.optimizers.get creates one from a name, an Optax transformation "
            "or a Keras optimizer."
        )
    if not options.get("dynamic", True):
        raise ValueError(
            "LossScaleOptimizer has no dynamic=False: pass loss_scale_factor to the inner "
            "optimizer instead."
        )
    if unknown := [name for name in options if name not in _SAYING_NOTHING]:
        raise ValueError(f"LossScaleOptimizer has no option {', '.join(unknown)}.")
    if given := [name for name, value in options.items() if value != _SAYING_NOTHING[name]]:
        raise ValueError(
            f"LossScaleOptimizer does not take {', '.join(given)}: pass it to inner_optimizer."
        )
