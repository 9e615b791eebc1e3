"""The base class of optimizers: clipping, weight decay, averaged weights, the transformation.

A rule is written for one array (`init_leaf`, `update_leaf`), so that it reads like its formula;
`transformation` maps it over the parameters. The order is Keras's: clip the gradients, decay the
weights, apply the rule, average the weights.
"""

import inspect
import re
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, TypedDict

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array

from tnt_jax.keras_compat import keras_objects
from tnt_jax.keras_compat.configuration import Recorded, config_of, plain
from tnt_jax.train.finite import with_fixed_scale

Slots = dict[str, Array]
LearningRate = float | Callable[[Array], Array]


class OptionsButDecay(TypedDict, total=False):
    """The common options of all optimizers, except weight decay; see `Optimizer`."""

    clipnorm: float | None
    clipvalue: float | None
    global_clipnorm: float | None
    use_ema: bool
    ema_momentum: float
    ema_overwrite_frequency: int | None
    loss_scale_factor: float | None
    gradient_accumulation_steps: int | None
    name: str | None
    decay: float | None


class Options(OptionsButDecay, total=False):
    """The common options of all optimizers; see `Optimizer`."""

    weight_decay: float | None


class OptimizerState(NamedTuple):
    """State of the transformation of an `Optimizer`, below `inject_hyperparams`.

    Attributes:
        count: Number of updates made, int32.
        slots: Like the parameters, each array replaced by the rule's arrays for it, by name.
        shared: Scalars of the rule that all parameters share, by name.
        average: Averaged weights like the parameters; None without `use_ema`.
    """

    count: Array
    slots: Any
    shared: Slots
    average: Any


class Optimizer(Recorded):
    """Base class of optimizers: options, order and numbers of `keras.optimizers.Optimizer`.

    Args:
        learning_rate: A number, a schedule `step -> rate`, or a function without arguments, which
            is called once. `step` is an int32 scalar, the number of batches before this one; as in
            Keras, it counts batches also if several make one update.
        weight_decay: Before each update a weight w becomes w - w * weight_decay * learning_rate.
        clipnorm: Maximum norm of each gradient array. At most one of the three clipping options may
            be given.
        clipvalue: Maximum absolute value of each gradient entry.
        global_clipnorm: Maximum norm of all gradients together.
        use_ema: Whether to keep an average of the weights, `averaged_params`.
        ema_momentum: average = ema_momentum * average + (1 - ema_momentum) * weights after each
            step, in [0, 1].
        ema_overwrite_frequency: Number of updates after which the weights are replaced by their
            average; never if None.
        loss_scale_factor: Factor by which the loss is multiplied before differentiation, and the
            gradients are divided afterwards, so that small gradients do not underflow in float16.
        gradient_accumulation_steps: Number of steps, at least 2, whose mean gradient makes one
            update. The training step accumulates; the transformation is not affected.
        name: Name of the optimizer; by default that of the class in snake_case.
        decay: Option of Keras 2; ignored with a warning.

    Raises:
        ValueError: If an option is out of its range, or several clips are given.
    """

    # Arrays that the rule keeps for each parameter, zero at first.
    _slots: tuple[str, ...] = ()

    def __init__(
        self,
        learning_rate: LearningRate,
        weight_decay: float | None = None,
        clipnorm: float | None = None,
        clipvalue: float | None = None,
        global_clipnorm: float | None = None,
        use_ema: bool = False,
        ema_momentum: float = 0.99,
        ema_overwrite_frequency: int | None = None,
        loss_scale_factor: float | None = None,
        gradient_accumulation_steps: int | None = None,
        name: str | None = None,
        *,
        decay: float | None = None,
    ) -> None:
        if decay is not None:
            warnings.warn(
                "decay is no longer supported and is ignored: pass a schedule as learning_rate.",
                stacklevel=3,
            )
        if not (callable(learning_rate) or jnp.ndim(learning_rate) == 0):
            raise ValueError(
                f"learning_rate must be a number or a schedule step -> rate, got {learning_rate!r}."
            )
        if not 0 <= ema_momentum <= 1:
            raise ValueError(f"ema_momentum must be in [0, 1], got {ema_momentum}.")
        for option, value, least in (
            ("ema_overwrite_frequency", ema_overwrite_frequency, 1),
            ("gradient_accumulation_steps", gradient_accumulation_steps, 2),
        ):
            if value is not None and value < least:
                raise ValueError(f"{option} must be at least {least} or None, got {value}.")
        self.learning_rate: LearningRate | None = (
            learning_rate if callable(learning_rate) else float(learning_rate)
        )
        self.weight_decay = weight_decay
        clips = {"clipnorm": clipnorm, "clipvalue": clipvalue, "global_clipnorm": global_clipnorm}
        if sum(bound is not None for bound in clips.values()) > 1:
            raise ValueError(
                f"Only one of clipnorm, clipvalue and global_clipnorm may be given, got {clips}."
            )
        self.clipnorm = clipnorm
        self.clipvalue = clipvalue
        self.global_clipnorm = global_clipnorm
        self.use_ema = use_ema
        self.ema_momentum = ema_momentum
        self.ema_overwrite_frequency = ema_overwrite_frequency
        self.loss_scale_factor = loss_scale_factor
        self.gradient_accumulation_steps = gradient_accumulation_steps
        self.name = name or keras_objects.snake_case(type(self).__name__)
        self._undecayed: tuple[str, ...] = ()

    def get_config(self) -> dict[str, Any]:
        """Returns the arguments of an equal optimizer as plain values, without excluded weights."""
        shared = {name: getattr(self, name) for name in Options.__annotations__ if name != "decay"}
        first = {"name": self.name, "learning_rate": plain(self.learning_rate)}
        own = [name for name in config_of(self) if name not in (*first, "decay", *shared)]
        return first | shared | {name: plain(getattr(self, name)) for name in own}

    def exclude_from_weight_decay(
        self, var_list: Sequence[Any] | None = None, var_names: Sequence[str] | None = None
    ) -> None:
        """Excludes parameters from weight decay; a second call replaces the first.

        Args:
            var_list: Variables of a Keras model, known by their paths, or names as in `var_names`.
            var_names: Regular expressions, searched in the path of a parameter (`"Dense_0/bias"`)
                and in its last part.

        Raises:
            TypeError: If an entry of `var_list` has no path.
        """
        self._undecayed = (*map(_pattern, var_list or ()), *(var_names or ()))

    def clip(self, grads: list[Array]) -> list[Array]:
        """Returns the clipped gradients; a bound that is not positive clips nothing."""
        if self.clipnorm is not None and self.clipnorm > 0:
            return [clip_norm(grad, self.clipnorm) for grad in grads]
        if self.clipvalue is not None and self.clipvalue > 0:
            return [jnp.clip(grad, -self.clipvalue, self.clipvalue) for grad in grads]
        if self.global_clipnorm is not None and self.global_clipnorm > 0:
            return clip_global_norm(grads, self.global_clipnorm)
        return grads

    def init_leaf(self, param: Array, path: str) -> Slots:
        """Returns the arrays that the rule keeps for one parameter, by name."""
        return {name: jnp.zeros_like(param) for name in self._slots}

    def update_leaf(
        self, grad: Array, param: Array, slots: Slots, rate: Array, step: Array, shared: Slots
    ) -> tuple[Array, Slots]:
        """Applies the rule to one parameter.

        Args:
            grad: Clipped gradient, at least float32.
            param: The parameter after weight decay, at least float32.
            slots: The arrays of `init_leaf` after the last update, at least float32.
            rate: Learning rate, float32 scalar.
            step: Number of this update, from 1, float32 scalar.
            shared: The result of `update_shared` for this update.

        Returns:
            The change of the parameter, and its new slots.
        """
        raise NotImplementedError(f"{type(self).__name__} must implement update_leaf.")

    def init_shared(self) -> Slots:
        """Returns the scalars that the rule keeps for all parameters, by name."""
        return {}

    def update_shared(self, shared: Slots, step: Array) -> Slots:
        """Returns the scalars for update number `step`, from 1."""
        return shared

    def decay_of(self, param: Array, path: str) -> float:
        """Returns the weight decay of one parameter, 0 for an excluded one."""
        return 0.0 if self.weight_decay is None or self.is_exempt(path) else self.weight_decay

    def is_exempt(self, path: str) -> bool:
        """Returns whether `exclude_from_weight_decay` names the parameter at `path`."""
        texts = (path, path.rsplit("/", 1)[-1])
        return any(re.search(pattern, text) for pattern in self._undecayed for text in texts)

    def transformation(self) -> optax.GradientTransformation:
        """Returns the Optax transformation, whose state has `hyperparams["learning_rate"]`."""

        def at_rate(learning_rate: Array) -> optax.GradientTransformation:
            update = partial(self._update, rate=learning_rate)
            return optax.GradientTransformation(self._init, update)  # pyright: ignore

        injected = optax.inject_hyperparams(at_rate, hyperparam_dtype=jnp.float32)  # pyright: ignore
        rate = self._rate_of_update if callable(self.learning_rate) else self.learning_rate
        transformation: Any = injected(learning_rate=rate)
        if self.loss_scale_factor is None:
            return transformation
        return with_fixed_scale(transformation, self.loss_scale_factor)

    def rate_at(self, step: Any) -> Any:
        """Returns the learning rate after `step` steps, which accumulate or not, as in Keras."""
        rate = self.learning_rate
        if not callable(rate):
            return rate
        return rate(step) if _takes_step(rate) else rate()  # pyright: ignore[reportCallIssue]

    def _rate_of_update(self, count: Array) -> Any:
        num_steps = self.gradient_accumulation_steps or 1
        return self.rate_at(count * num_steps + num_steps - 1)

    def averaged_params(self, opt_state: Any) -> Any:
        """Returns the averaged weights in a state; a ValueError if the optimizer keeps none."""
        if not self.use_ema:
            raise ValueError(
                f"The optimizer {self.name!r} keeps no averaged weights: create it with "
                "use_ema=True."
            )
        return optax.tree.get(opt_state, "average")

    def _init(self, params: Any) -> OptimizerState:
        leaves, structure = jax.tree_util.tree_flatten_with_path(params)
        slots = structure.unflatten([self.init_leaf(leaf, _path(path)) for path, leaf in leaves])
        average = jax.tree.map(jnp.zeros_like, params) if self.use_ema else None
        return OptimizerState(jnp.zeros((), jnp.int32), slots, self.init_shared(), average)

    def _update(
        self, grads: Any, state: OptimizerState, params: Any = None, *, rate: Array
    ) -> tuple[Any, OptimizerState]:
        if params is None:
            raise ValueError(
                f"The optimizer {self.name!r} needs the parameters: call update(grads, state, "
                "params)."
            )
        leaves, structure = jax.tree_util.tree_flatten_with_path(params)
        all_slots = structure.flatten_up_to(state.slots)
        step = (state.count + 1).astype(jnp.float32)
        shared = self.update_shared(state.shared, step)
        updates, new_slots = [], []
        grads = self.clip(structure.flatten_up_to(grads))
        for (path, param), grad, slots in zip(leaves, grads, all_slots, strict=True):
            # Half-precision weights are updated in float32: 1 - 0.999 ** step is 0 in bfloat16.
            wide = jnp.promote_types(param.dtype, jnp.float32)
            decay = self.decay_of(param, _path(path)) * rate * param.astype(wide)
            wide_slots = {name: slot.astype(wide) for name, slot in slots.items()}
            update, wide_slots = self.update_leaf(
                grad.astype(wide), param.astype(wide) - decay, wide_slots, rate, step, shared
            )
            updates.append((update - decay).astype(param.dtype))
            new_slots.append({name: x.astype(slots[name].dtype) for name, x in wide_slots.items()})
        updates, average = self._averaged(structure.unflatten(updates), params, state)
        slots = structure.unflatten(new_slots)
        return updates, OptimizerState(state.count + 1, slots, shared, average)

    def _averaged(self, updates: Any, params: Any, state: OptimizerState) -> tuple[Any, Any]:
        """Returns updates and averaged weights, to which updates lead where they overwrite."""
        if not self.use_ema:
            return updates, None
        momentum = jnp.where(state.count == 0, 0.0, self.ema_momentum)
        # Keras averages after every step, even after those that only accumulate and do not change
        # the weights.
        kept = momentum ** ((self.gradient_accumulation_steps or 1) - 1)

        def mean(average: Array, old: Array, new: Array) -> Array:
            before = kept * average + (1 - kept) * old
            return (momentum * before + (1 - momentum) * new).astype(new.dtype)

        average = jax.tree.map(mean, state.average, params, optax.apply_updates(params, updates))
        if self.ema_overwrite_frequency is None:
            return updates, average
        overwrites = (state.count + 1) % self.ema_overwrite_frequency == 0
        updates = jax.tree.map(
            lambda u, p, a: jnp.where(overwrites, a - p, u), updates, params, average
        )
        return updates, average


def _pattern(variable: Any) -> str:
    if isinstance(variable, str):
        return variable
    if not isinstance(getattr(variable, "path", None), str):
        raise TypeError(
            "var_list takes Keras variables, which have a path, but holds a "
            f"{type(variable).__name__}. Exclude parameters by name: "
            "exclude_from_weight_decay(var_names=['bias'])."
        )
    return f"^{re.escape(variable.path)}$"


def _takes_step(schedule: Callable[..., Any]) -> bool:
    """Returns whether a schedule takes the step; Keras also allows schedules without arguments."""
    try:
        inspect.signature(schedule).bind(0)
    except TypeError:
        return False
    except ValueError:  # Built-in functions have no signature.
        return True
    return True


def _path(path: tuple[Any, ...]) -> str:
    return jax.tree_util.keystr(path, simple=True, separator="/")


def clip_norm(grad: Array, bound: float) -> Array:
    """Returns the gradient scaled down to a norm of at most `bound`."""
    return grad * bound / jnp.maximum(jnp.sqrt(jnp.sum(jnp.square(grad))), bound)


def clip_global_norm(grads: list[Array], bound: float) -> list[Array]:
    """Returns gradients scaled to a joint norm of at most `bound`; NaN if it is not finite."""
    norm = jnp.sqrt(sum((jnp.sum(jnp.square(grad)) for grad in grads), start=jnp.zeros(())))
    # norm - norm is 0, or NaN for an infinite norm, as in Keras: a factor of 0 must not hide an
    # overflow.
    scale = bound * jnp.minimum(1 / norm, 1 / bound) + (norm - norm)
    return [(grad * scale).astype(grad.dtype) for grad in grads]


def read_learning_rate(opt_state: Any) -> Array | None:
    """Returns a state's rate, of the last update or else of the next; None if it holds none."""
    injected = _injected(opt_state)
    return injected[0].hyperparams["learning_rate"] if injected else None


def write_learning_rate(opt_state: Any, learning_rate: Any) -> Any:
    """Returns the state with another learning rate, in its dtype and place, without retracing.

    Raises:
        TypeError: If a schedule sets the rate.
        ValueError: If the state holds no rate, as for an Optax transformation not built by
            `optax.inject_hyperparams`.
    """
    injected = _injected(opt_state)
    if not injected:
        raise ValueError(
            "This optimizer's state holds no learning rate to set. Build the Optax transformation "
            "with optax.inject_hyperparams(optax.sgd)(learning_rate=...), or use a "
            "tnt_jax.optimizers class."
        )
    if any("learning_rate" in state.hyperparams_states for state in injected):
        raise TypeError(
            "A schedule decides the learning rate, so it cannot be set; create the optimizer with "
            "a number."
        )

    def replaced(node: Any) -> Any:
        if not _is_injected(node):
            return node
        rate = _like(node.hyperparams["learning_rate"], learning_rate)
        return node._replace(hyperparams={**node.hyperparams, "learning_rate": rate})

    return jax.tree.map(replaced, opt_state, is_leaf=_is_injected)


def _like(old: Any, value: Any) -> Any:
    """Returns a number as an array with the dtype and, on devices, the sharding of another."""
    value = np.asarray(value, old.dtype)
    # Each process creates its own copies: device_put to several processes would communicate.
    if isinstance(old, Array):
        return jax.make_array_from_callback((), old.sharding, lambda _: value)
    return value


def _is_injected(node: Any) -> bool:
    has_rate = "learning_rate" in getattr(node, "hyperparams", ())
    return has_rate and hasattr(node, "hyperparams_states")


def _injected(opt_state: Any) -> list[Any]:
    """Returns the states of `inject_hyperparams` within a state that hold a learning rate."""
    return [node for node in jax.tree.leaves(opt_state, is_leaf=_is_injected) if _is_injected(node)]
