"""Everything that training changes, as one immutable pytree."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TrainState:
    """What a step takes and returns; the same on every rank.

    Attributes:
        step: Number of updates so far, int32 scalar.
        params: Trained arrays.
        model_state: Arrays that the model itself changes in training, such as BatchNorm's moving statistics.
        opt_state: State of the Optax transformation.
        key: Threefry key of the run; the key of a step is `fold_in(key, step)`.
    """

    step: jax.Array
    params: Any
    model_state: Any
    opt_state: Any
    key: jax.Array


def create_state(params: Any, model_state: Any, optimizer: optax.GradientTransformation, *, seed: int) -> TrainState:
    """Returns the state before the first update.

    Args:
        params: Arrays to train.
        model_state: Arrays that the model changes itself.
        optimizer: Transformation whose state is initialised for `params`.
        seed: Seed of dropout and of other random streams of the step.
    """
    return TrainState(jnp.zeros((), jnp.int32), params, model_state, optimizer.init(params), jax.random.key(seed))
