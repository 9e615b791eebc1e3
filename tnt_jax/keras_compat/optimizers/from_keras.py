"""Keras optimizers as Optax transformations: their own rule, on their own variables as a pytree."""

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.core import Tracer

from tnt_jax.keras_compat.keras_objects import require_jax_backend
from tnt_jax.keras_compat.optimizers.base import Optimizer
from tnt_jax.train.finite import with_fixed_scale


class KerasOptimizerState(NamedTuple):
    """State of a Keras optimizer."""

    # The learning rate, as in `optax.inject_hyperparams`; with a schedule, that of the last update,
    # and `hyperparams_states` has the key "learning_rate".
    hyperparams: dict[str, jax.Array]
    hyperparams_states: dict[str, tuple[()]]
    average: Any  # Averaged weights like the parameters; None without `use_ema`.
    variables: list[jax.Array]  # The others, in Keras's order.


class KerasOptimizer(Optimizer):
    """A `keras.optimizers.Optimizer`, rebuilt from its configuration.

    Training starts from the variables that it may have already; the given object does not change.
    """

    def __init__(self, optimizer: Any) -> None:
        require_jax_backend()
        if optimizer.use_ema and optimizer.gradient_accumulation_steps:
            raise ValueError(
                f"The Keras optimizer {optimizer.name!r} averages weights (use_ema) in each of its "
                "gradient_accumulation_steps, which is not supported. Use an optimizer of "
                "tnt_jax.optimizers, which averages once per update, or only one of the two "
                "options."
            )
        _rebuilt(optimizer)
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
        self.loss_scale_factor = optimizer.loss_scale_factor

    def transformation(self) -> optax.GradientTransformation:
        """Returns a transformation with a `KerasOptimizerState`, maybe in a `LossScaleState`."""
        return self.transformation_for(dict)

    def transformation_for(
        self, variables: Callable[[], Mapping[str, Any]]
    ) -> optax.GradientTransformation:
        """Returns a transformation like `transformation`, for the parameters of a Keras model."""
        rule = _Rule(self.keras_optimizer, self.learning_rate, variables)
        transformation = optax.GradientTransformation(rule.init, rule.update)  # pyright: ignore
        if self.loss_scale_factor is None:
            return transformation
        return with_fixed_scale(transformation, self.loss_scale_factor)


class _Rule:
    """The functions of a transformation; its optimizer is built when parameters are known."""

    def __init__(
        self, optimizer: Any, learning_rate: Any, variables: Callable[[], Mapping[str, Any]]
    ) -> None:
        self.given = optimizer
        self.learning_rate = learning_rate
        self.model_variables = variables
        self.is_scheduled = callable(learning_rate)

    def init(self, params: Any) -> KerasOptimizerState:
        """Returns the first values of the variables of a Keras optimizer built for `params`."""
        self.optimizer = _rebuilt(self.given, learning_rate=self.learning_rate)
        num_steps = self.given.gradient_accumulation_steps
        if self.is_scheduled and num_steps:
            self.optimizer._learning_rate = _counting_steps(self.learning_rate, num_steps)
        self.structure = jax.tree.structure(params)
        with jax.ensure_compile_time_eval():
            trained = _variables_like(params)
            self._exempt(trained)
            self.optimizer.build(list(trained.values()))
            variables = self.optimizer.variables
            values = [np.asarray(value) for value in _first_values(self.given, self.optimizer)]
        index = {id(variable): i for i, variable in enumerate(variables)}
        averages = self.optimizer._model_variables_moving_average if self.optimizer.use_ema else []
        self.average_index = [index[id(average)] for average in averages]
        names = [variable.name for variable in variables]
        self.rate_index = None if self.is_scheduled else names.index("learning_rate")
        return self._split([jnp.asarray(value) for value in values])

    def _exempt(self, trained: Mapping[str, Any]) -> None:
        """Excludes from weight decay what the given optimizer excludes, by name or as an object."""
        chosen = getattr(self.given, "_exclude_from_weight_decay", None) or set()
        known = {id(variable): path for path, variable in self.model_variables().items()}
        if not chosen <= set(known):
            raise ValueError(
                f"The Keras optimizer {self.given.name!r} excludes variables from weight decay "
                "that do not belong to this model. Exclude variables of the trained Keras model, "
                "or exclude by name: exclude_from_weight_decay(var_names=[...])."
            )
        paths = {known[key] for key in chosen}
        excluded = {id(v) for path, v in trained.items() if path in paths}
        self.optimizer._exclude_from_weight_decay = excluded
        if hasattr(self.given, "_exclude_from_weight_decay_pattern"):
            pattern = self.given._exclude_from_weight_decay_pattern
            self.optimizer._exclude_from_weight_decay_pattern = pattern

    def update(
        self, grads: Any, state: KerasOptimizerState, params: Any = None
    ) -> tuple[Any, KerasOptimizerState]:
        """Returns the Keras optimizer's changes of the parameters, and its variables afterwards."""
        old = jax.tree.leaves(params)
        grads = self.structure.flatten_up_to(grads)
        new, values = self.optimizer.stateless_apply(self._joined(state), grads, old)
        changes = [after - before for after, before in zip(new, old, strict=True)]
        return self.structure.unflatten(changes), self._split(values)

    def _split(self, values: list[jax.Array]) -> KerasOptimizerState:
        """Returns the state with the rate and the averages separate, to read and set them."""
        if self.rate_index is None:
            last_step = jnp.maximum(values[0] - 1, 0)
            rate = jnp.asarray(self.optimizer._learning_rate(last_step), jnp.float32)
        else:
            rate = values[self.rate_index]
        averages = [values[i] for i in self.average_index]
        average = self.structure.unflatten(averages) if averages else None
        apart = (self.rate_index, *self.average_index)
        rest = [value for i, value in enumerate(values) if i not in apart]
        states = {"learning_rate": ()} if self.is_scheduled else {}
        return KerasOptimizerState({"learning_rate": rate}, states, average, rest)

    def _joined(self, state: KerasOptimizerState) -> list[jax.Array]:
        """Returns the values of all variables in Keras's order."""
        apart = dict(zip(self.average_index, jax.tree.leaves(state.average), strict=True))
        if self.rate_index is not None:
            apart[self.rate_index] = state.hyperparams["learning_rate"]
        rest = iter(state.variables)
        number = len(apart) + len(state.variables)
        return [apart[i] if i in apart else next(rest) for i in range(number)]


def _schedule_of(optimizer: Any) -> Any:
    """Returns the schedule of a Keras optimizer, or None if its rate is a number."""
    # learning_rate itself is the rate at the current iteration.
    schedule = optimizer._learning_rate
    kind = require_jax_backend().optimizers.schedules.LearningRateSchedule
    return schedule if isinstance(schedule, kind) else None


def _rebuilt(optimizer: Any, **changes: Any) -> Any:
    """Returns a copy of a Keras optimizer, not built; the step accumulates and scales losses."""
    # Ranks accumulate by themselves and exchange gradients once per update.
    changes |= {"gradient_accumulation_steps": None, "loss_scale_factor": None}
    changes.setdefault(
        "learning_rate",
        optimizer._learning_rate if _schedule_of(optimizer) else float(optimizer.learning_rate),
    )
    try:
        rebuilt = type(optimizer).from_config(optimizer.get_config() | changes)
    except TypeError as error:
        raise ValueError(
            f"The Keras optimizer {optimizer.name!r} cannot be recreated from its get_config(): "
            f"{error}. Let its constructor take **kwargs and pass them to super().__init__, and "
            "let get_config() return its own arguments, too."
        ) from error
    plain = {
        name: value
        for name, value in vars(optimizer).items()
        if not name.startswith("_")
        and name not in (*changes, "built")
        and isinstance(value, (bool, int, float, str))
    }
    lost = [name for name, value in plain.items() if getattr(rebuilt, name, None) != value]
    if lost:
        raise ValueError(
            f"The get_config() of the Keras optimizer {optimizer.name!r} leaves out "
            f"{', '.join(lost)}, so a different optimizer would be created from it. Add what the "
            "constructor needs."
        )
    return rebuilt


def _counting_steps(schedule: Any, num_steps: int) -> Any:
    """Returns a schedule by updates for Keras's by steps, of which `num_steps` make an update."""
    keras = require_jax_backend()

    class CountingSteps(keras.optimizers.schedules.LearningRateSchedule):
        def __call__(self, step: Any) -> Any:
            return schedule(step * num_steps + num_steps - 1)

    return CountingSteps()


def _first_values(given: Any, built: Any) -> list[Any]:
    """Returns the initial values of the variables of `built`: those of `given`, if it was built."""
    if not given.built:
        return [variable.value for variable in built.variables]
    sums = {id(variable) for variable in getattr(given, "_accumulated_gradients", ())}
    held = [variable for variable in given.variables if id(variable) not in sums]
    if [v.shape for v in held] != [v.shape for v in built.variables]:
        raise ValueError(
            f"The Keras optimizer {given.name!r} was built for other variables than those trained "
            f"now: it holds {len(held)} arrays, and {len(built.variables)} are needed, or their "
            "shapes differ. Pass a new optimizer."
        )
    # Keras counts steps, several of which make an update.
    steps = given.gradient_accumulation_steps or 1
    return [v.value // steps if v is given._iterations else v.value for v in held]


def _variables_like(params: Any) -> dict[str, Any]:
    """Returns Keras variables with the parameters' paths and values: some rules need them."""
    keras = require_jax_backend()
    variables = {}
    for entries, leaf in jax.tree_util.tree_flatten_with_path(params)[0]:
        path = jax.tree_util.keystr(entries, simple=True, separator="/")
        *scopes, name = path.split("/")
        with ExitStack() as stack:
            for scope in scopes:
                stack.enter_context(keras.name_scope(scope))
            # If only shapes are requested, there are no values.
            value = np.zeros(leaf.shape) if isinstance(leaf, Tracer) else np.asarray(leaf)
            variables[path] = keras.Variable(value, dtype=leaf.dtype, name=name or "param")
    return variables
