"""Arrays of the training state, and its optimizer, as callbacks may read and set them."""

import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np
import optax

from tnt_jax import _jax
from tnt_jax.keras_compat.callbacks.base import check_can_read, check_changes_model
from tnt_jax.keras_compat.optimizers import Optimizer, read_learning_rate, write_learning_rate
from tnt_jax.train.state import TrainState
from tnt_jax.train.trainer import Trainer

_NO_RATE = (
    "This Optax transformation has no learning rate that can be read or set: build it with "
    "optax.inject_hyperparams(optax.sgd)(learning_rate=...), or use a tnt_jax.optimizers class."
)


@dataclass(eq=False, repr=False)
class StateVariable:
    """One array of the training state, read and assigned like a Keras variable.

    It shows the current value. Its `path` is such as `Dense_0/kernel`, and `name` the last part;
    gradients change it if it is `trainable`.
    """

    _trainer: Trainer
    _get: Callable[[TrainState], Any]
    _put: Callable[[TrainState, Any], TrainState]
    _index: int
    path: str
    trainable: bool
    _after: Callable[[], None] | None

    @property
    def name(self) -> str:
        """Last part of the path."""
        return self.path.rpartition("/")[2]

    @property
    def value(self) -> jax.Array:
        """The array on the devices; the next step donates it, so keep a copy."""
        return self._leaves()[0][self._index]

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the array."""
        return self.value.shape

    @property
    def dtype(self) -> np.dtype:
        """Dtype of the array."""
        return np.dtype(self.value.dtype)

    def numpy(self) -> np.ndarray:
        """Returns a copy; all processes must call it for an array that is sharded over several."""
        check_can_read(self.value)
        return np.array(self._trainer.gather(self.value))

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        """Returns a copy for NumPy."""
        return np.array(self.numpy(), dtype)

    def assign(self, value: Any) -> None:
        """Replaces the array by one of its shape; all processes must call it alike."""
        check_changes_model(f"Assigning {self.path or 'an array'}")
        leaves, structure = self._leaves()
        old = leaves[self._index]
        if np.shape(value) != old.shape:
            raise ValueError(
                f"{self.path or 'The array'} has the shape {old.shape}, but was assigned one of "
                f"{np.shape(value)}."
            )
        leaves[self._index] = _jax.put(np.asarray(value, old.dtype), old.sharding)
        self._trainer.state = self._put(self._trainer.require_state(), structure.unflatten(leaves))
        if self._after is not None:
            self._after()

    def __repr__(self) -> str:
        """Shows path, shape and dtype."""
        return f"<StateVariable path={self.path}, shape={self.shape}, dtype={self.dtype}>"

    def _leaves(self) -> tuple[list[Any], Any]:
        return jax.tree.flatten(self._get(self._trainer.require_state()))


def state_variables(
    trainer: Trainer,
    get: Callable[[TrainState], Any],
    put: Callable[[TrainState, Any], TrainState],
    *,
    trainable: bool = False,
    after: Callable[[], None] | None = None,
) -> list[StateVariable]:
    """Returns a part of the trainer's state as `StateVariable`s, in the order of its leaves."""
    leaves = jax.tree_util.tree_leaves_with_path(get(trainer.require_state()))
    paths = [jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in leaves]
    return [
        StateVariable(trainer, get, put, index, path, trainable, after)
        for index, path in enumerate(paths)
    ]


class Rate(float):
    """A learning rate that can be set like a Keras variable: `learning_rate.assign(0.1)`."""

    _set: Callable[[Any], None]

    def assign(self, value: Any) -> None:
        """Sets the rate of the next step."""
        self._set(value)

    def numpy(self) -> np.ndarray:
        """Returns the rate as a float32 array of no dimensions."""
        return np.asarray(self, np.float32)

    @property
    def value(self) -> np.ndarray:
        """The rate as a float32 array of no dimensions."""
        return self.numpy()

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles and copies as a plain number."""
        return float, (float(self),)


class OptimizerView:
    """The optimizer of a compiled model, with the Keras attributes that callbacks use."""

    # Keras asks before it restores; the state exists once the model is built.
    built = True

    def __init__(self, optimizer: Optimizer, trainer: Trainer, start: Callable[[], None]) -> None:
        self._optimizer = optimizer
        self._trainer = trainer
        self._start = start
        self.name = optimizer.name
        self.use_ema = optimizer.use_ema

    @property
    def learning_rate(self) -> Rate:
        """Rate of the next step. Setting it takes effect at once, without recompilation.

        Raises:
            AttributeError: If the optimizer is an Optax transformation that was not built by
                `optax.inject_hyperparams`.
            TypeError: On setting, if a schedule decides the rate.
        """
        schedule, has_state = self._optimizer.learning_rate, self._trainer.state is not None
        if callable(schedule):
            step = int(self._state().step) if has_state else 0
            found = self._optimizer.rate_at(np.int32(step))
        else:
            found = read_learning_rate(self._state().opt_state) if has_state else schedule
        if found is None:
            raise AttributeError(_NO_RATE)
        rate = Rate(found)
        rate._set = self._set_rate
        return rate

    @learning_rate.setter
    def learning_rate(self, value: Any) -> None:
        """Sets the rate of the next step."""
        self._set_rate(value)

    def _set_rate(self, value: Any) -> None:
        check_changes_model("Setting the learning rate")
        if callable(self._optimizer.learning_rate):
            raise TypeError(
                "A schedule decides the learning rate, so it cannot be set; create the optimizer "
                "with a number."
            )
        if self._trainer.state is None:
            self._optimizer.learning_rate = float(value)
            return
        state = self._state()
        self._trainer.state = replace(
            state, opt_state=write_learning_rate(state.opt_state, float(value))
        )

    @property
    def inner_optimizer(self) -> "OptimizerView":
        """The optimizer inside a `LossScaleOptimizer`; others have no such attribute."""
        return OptimizerView(self._optimizer.inner_optimizer, self._trainer, self._start)  # pyright: ignore[reportAttributeAccessIssue]

    @property
    def __class__(self) -> type:
        """Keras's base class if Keras is imported, as its TensorBoard asks for it."""
        keras = sys.modules.get("keras")
        return OptimizerView if keras is None else keras.optimizers.Optimizer

    @property
    def iterations(self) -> int:
        """Number of updates so far; reading it waits for the running step."""
        steps_of_update = self._optimizer.gradient_accumulation_steps or 1
        return 0 if self._trainer.state is None else int(self._state().step) // steps_of_update

    @property
    def variables(self) -> list[StateVariable]:
        """The step count and the optimizer's arrays in the state's order; none before `build`."""
        if self._trainer.state is None:
            return []
        step = self._variables(
            lambda state: {"iteration": state.step},
            lambda state, new: replace(state, step=new["iteration"]),
        )
        own = self._variables(
            lambda state: state.opt_state, lambda state, new: replace(state, opt_state=new)
        )
        return step + own

    def get_config(self) -> dict[str, Any]:
        """Returns the configuration of the optimizer, with its current learning rate."""
        config = self.given.get_config()
        if callable(self._optimizer.learning_rate):
            return config
        return config | {"learning_rate": float(self.learning_rate)}

    def __getattr__(self, name: str) -> Any:
        """Returns a setting of the optimizer passed to `compile`, such as `beta_1`."""
        # Python also calls this if a property of this class has raised an AttributeError.
        if name.startswith("_") or name in vars(type(self)):
            raise AttributeError(
                _NO_RATE
                if name == "learning_rate"
                else f"{type(self).__name__} has no attribute {name!r}."
            )
        return getattr(self.given, name)

    @property
    def given(self) -> Any:
        """The optimizer passed to `compile`, which may be a Keras object."""
        return getattr(self._optimizer, "keras_optimizer", self._optimizer)

    def __setattr__(self, name: str, value: Any) -> None:
        """Sets the learning rate; an AttributeError for all that is part of the compiled step."""
        if not name.startswith("_") and name not in ("learning_rate", "name", "use_ema"):
            raise AttributeError(
                f"{name} is part of the compiled step: call compile() with an optimizer that has "
                "another one."
            )
        object.__setattr__(self, name, value)

    def swap_average(self) -> None:
        """Swaps the weights and their averages; a ValueError if the optimizer keeps none."""
        state = self._state()
        average = self._average()
        opt_state = optax.tree.set(state.opt_state, average=state.params)
        self._trainer.state = replace(state, params=average, opt_state=opt_state)

    def copy_weights_to_average(self) -> None:
        """Replaces the averages with the weights."""
        state = self._state()
        self._average()
        self._trainer.state = replace(
            state, opt_state=optax.tree.set(state.opt_state, average=_copy(state.params))
        )

    def use_average(self) -> None:
        """Replaces the weights with their averages."""
        state = self._state()
        self._trainer.state = replace(state, params=_copy(self._average()))

    # Keras's SwapEMAWeights works on these two lists.

    @property
    def _trainable_variables(self) -> list[StateVariable]:
        return self._variables(
            lambda state: state.params, lambda state, params: replace(state, params=params)
        )

    @property
    def _model_variables_moving_average(self) -> list[StateVariable]:
        if not self.use_ema:
            raise AttributeError(
                "The optimizer keeps no averaged weights: create it with use_ema=True."
            )

        def put(state: TrainState, average: Any) -> TrainState:
            return replace(state, opt_state=optax.tree.set(state.opt_state, average=average))

        return self._variables(lambda _: self._average(), put)

    def _variables(
        self, get: Callable[[TrainState], Any], put: Callable[[TrainState, Any], TrainState]
    ) -> list[StateVariable]:
        self._state()
        return state_variables(self._trainer, get, put)

    def _average(self) -> Any:
        state = self._state()
        average = self._optimizer.averaged_params(state.opt_state)
        # Averages may be sharded where weights are whole.
        return jax.tree.map(self._trainer.gather_like, average, state.params)

    def _state(self) -> TrainState:
        self._start()
        return self._trainer.require_state()


def _copy(tree: Any) -> Any:
    # Weights and averages are donated to the step separately.
    return jax.tree.map(lambda x: x.copy(), tree)
