"""Arrays of the training state with the attributes and methods of Keras's variables."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from tnt_jax import _jax
from tnt_jax.keras_compat.callbacks.base import check_can_read, check_changes_model
from tnt_jax.train.state import TrainState
from tnt_jax.train.trainer import Trainer


class StateVariable:
    """One array of the training state, read and assigned like a Keras variable.

    It shows the current value of the array.

    Args:
        trainer: The trainer whose state holds it.
        get: Maps the state to the pytree that holds it.
        put: Maps the state and another such pytree to the state with that pytree.
        index: Index of the array among the leaves.
        path: Path of the array.
        trainable: Whether training changes it by gradients.
        after: Called after an assignment.

    Attributes:
        path: Path of the array, such as `Dense_0/kernel`.
        name: Last part of the path.
        trainable: Whether training changes it by gradients.
    """

    def __init__(
        self,
        trainer: Trainer,
        get: Callable[[TrainState], Any],
        put: Callable[[TrainState, Any], TrainState],
        index: int,
        path: str = "",
        *,
        trainable: bool = False,
        after: Callable[[], None] | None = None,
    ) -> None:
        self._trainer = trainer
        self._get = get
        self._put = put
        self._index = index
        self._after = after
        self.path = path
        self.name = path.rpartition("/")[2]
        self.trainable = trainable

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
        """Returns a copy.

        All processes must call it for an array that is sharded over several processes.
        """
        check_can_read(self.value)
        return np.array(self._trainer.gather(self.value))

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        """Returns a copy for NumPy."""
        return np.array(self.numpy(), dtype)

    def assign(self, value: Any) -> None:
        """Replaces the array on every process; all must call it with the same value.

        Raises:
            ValueError: If the shape differs.
        """
        check_changes_model(f"Assigning {self.path or 'an array'}")
        leaves, structure = self._leaves()
        old = leaves[self._index]
        if np.shape(value) != old.shape:
            raise ValueError(
                f"{self.path or 'The array'} has the shape {old.shape}, but was assigned one of "
                f"{np.shape(value)}."
            )
        leaves[self._index] = _jax.put(np.asarray(value, old.dtype), old.sharding)
        state = self._trainer.state
        assert state is not None
        self._trainer.state = self._put(state, structure.unflatten(leaves))
        if self._after is not None:
            self._after()

    def __repr__(self) -> str:
        """Shows path, shape and dtype."""
        return f"<StateVariable path={self.path}, shape={self.shape}, dtype={self.dtype}>"

    def _leaves(self) -> tuple[list[Any], Any]:
        assert self._trainer.state is not None
        return jax.tree.flatten(self._get(self._trainer.state))


def state_variables(
    trainer: Trainer,
    get: Callable[[TrainState], Any],
    put: Callable[[TrainState, Any], TrainState],
    *,
    trainable: bool = False,
    after: Callable[[], None] | None = None,
) -> list[StateVariable]:
    """Returns the arrays of one part of a trainer's state, in the order of its leaves.

    The arguments are those of `StateVariable`.
    """
    assert trainer.state is not None
    paths = [
        jax.tree_util.keystr(path, simple=True, separator="/")
        for path, _ in jax.tree_util.tree_leaves_with_path(get(trainer.state))
    ]
    return [
        StateVariable(trainer, get, put, index, path, trainable=trainable, after=after)
        for index, path in enumerate(paths)
    ]
