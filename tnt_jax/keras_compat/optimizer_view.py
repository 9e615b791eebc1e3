"""`model.optimizer`: what callbacks may read and set of the optimizer that trains."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import numpy as np
import optax

from tnt_jax import _jax
from tnt_jax.keras_compat.callbacks.placement import check_changes_model
from tnt_jax.keras_compat.optimizers import Optimizer, read_learning_rate, write_learning_rate
from tnt_jax.loop import Trainer
from tnt_jax.state import TrainState


class Rate(float):
    """A learning rate that can also be set as Keras's variable is: `optimizer.learning_rate.assign(0.1)`."""

    _set: Callable[[Any], None]

    def assign(self, value: Any) -> None:
        """Sets the rate of the next step."""
        self._set(value)

    def numpy(self) -> np.ndarray:
        """Returns the rate as a float32 array of no dimensions."""
        return np.asarray(self, np.float32)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles and copies as a plain number."""
        return float, (float(self),)


class OptimizerView:
    """The optimizer of a compiled model, with the attributes of a Keras optimizer that callbacks use.

    Args:
        optimizer: Optimizer that `compile` was given.
        trainer: Whose state holds its numbers.
        start: Sees to it that the trainer's state is that of this optimizer.

    Attributes:
        name: Name of the optimizer.
        use_ema: Whether it keeps averaged weights.
    """

    # Keras asks before it restores; the state is there when the model is.
    built = True

    def __init__(self, optimizer: Optimizer, trainer: Trainer, start: Callable[[], None]) -> None:
        self._optimizer, self._trainer, self._start = optimizer, trainer, start
        self.name, self.use_ema = optimizer.name, optimizer.use_ema

    @property
    def learning_rate(self) -> Rate:
        """Rate of the next step. Setting it takes effect at once, and nothing is compiled again.

        Raises:
            AttributeError: If the optimizer is an Optax transformation that was not built by `optax.inject_hyperparams`.
            TypeError: On setting, if a schedule decides the rate.
        """
        if callable(self._optimizer.learning_rate):
            return self._rate(self._optimizer.learning_rate(np.int32(self.iterations)))  # pyright: ignore[reportArgumentType]
        if self._trainer.state is None:
            rate = self._optimizer.learning_rate
        else:
            rate = read_learning_rate(self._state().opt_state)
        if rate is None:
            raise AttributeError(
                "This Optax transformation holds no learning rate that can be read or set: build it with "
                "optax.inject_hyperparams(optax.sgd)(learning_rate=...), or use a tnt_jax.optimizers class."
            )
        return self._rate(rate)

    @learning_rate.setter
    def learning_rate(self, value: Any) -> None:
        """Sets the rate of the next step."""
        self._set_rate(value)

    def _rate(self, value: Any) -> Rate:
        rate = Rate(value)
        rate._set = self._set_rate
        return rate

    def _set_rate(self, value: Any) -> None:
        check_changes_model("Setting the learning rate")
        if callable(self._optimizer.learning_rate):
            raise TypeError("A schedule decides the learning rate, so it cannot be set; create the optimizer with a number.")
        if self._trainer.state is None:
            self._optimizer.learning_rate = float(value)
            return
        state = self._state()
        self._trainer.state = replace(state, opt_state=write_learning_rate(state.opt_state, float(value)))

    @property
    def iterations(self) -> int:
        """Number of updates so far; reading it waits for the step that runs."""
        return 0 if self._trainer.state is None else int(self._state().step)

    def swap_average(self) -> None:
        """Exchanges the weights and their averages.

        Raises:
            ValueError: If the optimizer keeps no averages.
        """
        state = self._state()
        average = self._average()
        opt_state = optax.tree.set(state.opt_state, average=state.params)
        self._trainer.state = replace(state, params=average, opt_state=opt_state)

    def copy_weights_to_average(self) -> None:
        """Replaces the averages by the weights."""
        state = self._state()
        self._average()
        self._trainer.state = replace(state, opt_state=optax.tree.set(state.opt_state, average=_copy(state.params)))

    def use_average(self) -> None:
        """Replaces the weights by their averages."""
        state = self._state()
        self._trainer.state = replace(state, params=_copy(self._average()))

    # Keras's SwapEMAWeights works on these two lists.

    @property
    def _trainable_variables(self) -> list["_Leaf"]:
        return self._leaves(lambda state: state.params, lambda state, params: replace(state, params=params))

    @property
    def _model_variables_moving_average(self) -> list["_Leaf"]:
        if not self.use_ema:
            raise AttributeError("The optimizer keeps no averaged weights: create it with use_ema=True.")

        def put(state: TrainState, average: Any) -> TrainState:
            return replace(state, opt_state=optax.tree.set(state.opt_state, average=average))

        return self._leaves(lambda _: self._average(), put)

    def _leaves(self, get: Callable[[TrainState], Any], put: Callable[[TrainState, Any], TrainState]) -> list["_Leaf"]:
        count = len(jax.tree.leaves(get(self._state())))
        return [_Leaf(self._trainer, get, put, index) for index in range(count)]

    def _average(self) -> Any:
        # Weights are whole on every rank, also where averages lie in parts.
        return self._optimizer.averaged_params(self._trainer.whole_state().opt_state)

    def _state(self) -> TrainState:
        self._start()
        assert self._trainer.state is not None
        return self._trainer.state


class _Leaf:
    """One array of the training state, read and assigned as Keras does with a variable."""

    def __init__(self, trainer: Trainer, get: Callable, put: Callable, index: int) -> None:
        self._trainer, self._get, self._put, self._index = trainer, get, put, index

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.array(jax.tree.leaves(self._get(self._trainer.state))[self._index], dtype)

    def assign(self, value: Any) -> None:
        state = self._trainer.state
        leaves, structure = jax.tree.flatten(self._get(state))
        old = leaves[self._index]
        leaves[self._index] = _jax.place(np.asarray(value, old.dtype), old.sharding)
        self._trainer.state = self._put(state, structure.unflatten(leaves))


def _copy(tree: Any) -> Any:
    # Weights and averages are donated to the step, each by itself.
    return jax.tree.map(lambda x: x.copy(), tree)
