"""Real Keras optimizers as Optax transformations: their own update rule on their own variables, as a pytree."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.core import Tracer

from tnt_jax.keras_compat.keras_objects import require_jax_backend
from tnt_jax.keras_compat.optimizers.base import Optimizer


class KerasOptimizerState(NamedTuple):
    """State of a Keras optimizer.

    Attributes:
        hyperparams: The learning rate, as in `optax.inject_hyperparams`; with a schedule that of the last update.
        hyperparams_states: Has the key `"learning_rate"` if a schedule decides the rate.
        average: Averaged weights like the parameters; None without `use_ema`.
        variables: Values of the other variables, in Keras's order.
    """

    hyperparams: dict[str, jax.Array]
    hyperparams_states: dict[str, tuple[()]]
    average: Any
    variables: list[jax.Array]


class KerasOptimizer(Optimizer):
    """A `keras.optimizers.Optimizer`, built anew from its configuration; the given object is left as it is.

    Raises:
        ValueError: If Keras runs on another backend than JAX, or the optimizer needs more of the loop than gradients.
    """

    def __init__(self, optimizer: Any) -> None:
        keras = require_jax_backend()
        if optimizer.loss_scale_factor is not None or isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
            raise ValueError(
                f"The Keras optimizer {optimizer.name!r} scales the loss, which is not done here. Use it without loss scaling: "
                "float32 and bfloat16 do not need it."
            )
        if getattr(optimizer, "_exclude_from_weight_decay", None):
            raise ValueError(
                f"The Keras optimizer {optimizer.name!r} exempts variables from weight decay by object, but parameters here are "
                "other objects. Exempt them by name: exclude_from_weight_decay(var_names=[...])."
            )
        schedule = _schedule_of(optimizer)
        rate = float(optimizer.learning_rate) if schedule is None else schedule
        super().__init__(
            rate,
            use_ema=optimizer.use_ema,
            ema_momentum=optimizer.ema_momentum,
            gradient_accumulation_steps=optimizer.gradient_accumulation_steps,
            name=optimizer.name,
        )
        self.keras_optimizer = optimizer

    def transformation(self) -> optax.GradientTransformation:
        """Returns a transformation that applies the Keras optimizer; its state is a `KerasOptimizerState`."""
        rule = _Rule(self.keras_optimizer, self.learning_rate)
        return optax.GradientTransformation(rule.init, rule.update)  # pyright: ignore[reportArgumentType]


class _Rule:
    """The two functions of a transformation, around a Keras optimizer that is built when the parameters are known."""

    def __init__(self, optimizer: Any, learning_rate: Any) -> None:
        self.given, self.learning_rate = optimizer, learning_rate
        self.is_scheduled = callable(learning_rate)

    def init(self, params: Any) -> KerasOptimizerState:
        """Returns the first values of the variables of a Keras optimizer built for `params`."""
        # The training step accumulates gradients itself: ranks then exchange them once for an update.
        changes = {"learning_rate": self.learning_rate, "gradient_accumulation_steps": None}
        self.optimizer = type(self.given).from_config(self.given.get_config() | changes)
        for setting in ("_exclude_from_weight_decay", "_exclude_from_weight_decay_pattern"):
            if hasattr(self.given, setting):
                setattr(self.optimizer, setting, getattr(self.given, setting))
        self.structure = jax.tree.structure(params)
        with jax.ensure_compile_time_eval():
            self.optimizer.build(_variables_like(params))
            variables = self.optimizer.variables
            values = [np.asarray(variable.value) for variable in variables]
        index = {id(variable): i for i, variable in enumerate(variables)}
        averages = self.optimizer._model_variables_moving_average if self.optimizer.use_ema else []
        self.average_index = [index[id(average)] for average in averages]
        self.rate_index = None if self.is_scheduled else [variable.name for variable in variables].index("learning_rate")
        return self._split([jnp.asarray(value) for value in values])

    def update(self, grads: Any, state: KerasOptimizerState, params: Any = None) -> tuple[Any, KerasOptimizerState]:
        """Returns what the Keras optimizer adds to the parameters, and its variables afterwards."""
        old = jax.tree.leaves(params)
        new, values = self.optimizer.stateless_apply(self._joined(state), self.structure.flatten_up_to(grads), old)
        return self.structure.unflatten([after - before for after, before in zip(new, old, strict=True)]), self._split(values)

    def _split(self, values: list[jax.Array]) -> KerasOptimizerState:
        """Returns the state with the rate and the averages apart, where they can be read and set."""
        if self.rate_index is None:
            last_step = jnp.maximum(values[0] - 1, 0)
            rate = jnp.asarray(self.optimizer._learning_rate(last_step), jnp.float32)
        else:
            rate = values[self.rate_index]
        average = self.structure.unflatten([values[i] for i in self.average_index]) if self.average_index else None
        rest = [value for i, value in enumerate(values) if i != self.rate_index and i not in self.average_index]
        return KerasOptimizerState({"learning_rate": rate}, {"learning_rate": ()} if self.is_scheduled else {}, average, rest)

    def _joined(self, state: KerasOptimizerState) -> list[jax.Array]:
        """Returns the values of all variables in Keras's order."""
        apart = dict(zip(self.average_index, jax.tree.leaves(state.average), strict=True))
        if self.rate_index is not None:
            apart[self.rate_index] = state.hyperparams["learning_rate"]
        rest = iter(state.variables)
        return [apart[i] if i in apart else next(rest) for i in range(len(apart) + len(state.variables))]


def _schedule_of(optimizer: Any) -> Any:
    """Returns the schedule of a Keras optimizer, None if its rate is a number."""
    schedule = optimizer._learning_rate  # learning_rate itself is the rate at the current iteration.
    keras = require_jax_backend()
    return schedule if isinstance(schedule, keras.optimizers.schedules.LearningRateSchedule) else None


def _variables_like(params: Any) -> list[Any]:
    """Returns Keras variables like parameters, path included: some rules go by the path, or begin with the values."""
    keras = require_jax_backend()
    variables = []
    for path, leaf in jax.tree_util.tree_flatten_with_path(params)[0]:
        *scopes, name = jax.tree_util.keystr(path, simple=True, separator="/").split("/")
        with ExitStack() as stack:
            for scope in scopes:
                stack.enter_context(keras.name_scope(scope))
            # Where only shapes are asked for there are no values.
            value = np.zeros(leaf.shape) if isinstance(leaf, Tracer) else np.asarray(leaf)
            variables.append(keras.Variable(value, dtype=leaf.dtype, name=name or "param"))
    return variables
