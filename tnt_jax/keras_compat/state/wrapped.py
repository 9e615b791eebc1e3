"""Exchanges variables between a model and a wrapped NNX module or Keras model."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import jax
import numpy as np

from tnt_jax import _jax
from tnt_jax.adapters.base import Variables
from tnt_jax.distributed.host import collectives
from tnt_jax.keras_compat.callbacks.base import check_changes_model
from tnt_jax.train.state import TrainState
from tnt_jax.train.trainer import Trainer


def write_back(trainer: Trainer) -> None:
    """Stores the trained variables in the wrapped object, if it holds variables."""
    if trainer.adapter.holds_variables and trainer.state is not None:
        trainer.adapter.write_back(trainer.variables())


@contextmanager
def writing_back(trainer: Trainer) -> Iterator[None]:
    """Stores the trained variables in the wrapped object when the `with` block ends.

    It does so also after an exception or a keyboard interrupt. After an exception in a job of
    several processes nothing is stored: the others may wait for this process, which is about to
    end.
    """
    try:
        yield
    except BaseException:
        if jax.process_count() == 1 and trainer.state is not None and _is_whole(trainer.state):
            write_back(trainer)
        raise
    write_back(trainer)


def take_over_changes(trainer: Trainer, inputs: Any) -> bool:
    """Reads the variables of the wrapped object again if the user has changed them.

    On every process the variables of the master count. The optimizer keeps its state, unless other
    variables or layers than before are trained: then the result is True, and steps are compiled
    anew.
    """
    adapter = trainer.adapter
    if not adapter.holds_variables or trainer.owner is not None:
        return False
    if (state := trainer.state) is None:
        return False
    trains_others = adapter.trains_others()
    if not collectives.broadcast(np.int8(trains_others or adapter.has_assigned())):
        return False
    variables = Variables(*collectives.broadcast(tuple(adapter.init(inputs, seed=0))))
    if _shapes(tuple(variables)) != _shapes((state.params, state.model_state)):
        trainer.build_from(variables)
    else:
        _put(trainer, state, variables)
    return trains_others


def read_assigned(trainer: Trainer) -> None:
    """Reads the variables that a callback has assigned in the wrapped object while `fit` runs.

    Every process must have assigned the same.
    """
    state = trainer.state
    if state is None or not trainer.adapter.has_assigned():
        return
    check_changes_model("Assigning a variable of the wrapped object")
    held = Variables(state.params, state.model_state)
    _put(trainer, state, trainer.adapter.with_assigned(held))


def _put(trainer: Trainer, state: TrainState, variables: Variables) -> None:
    """Replaces the variables of the state by host arrays or by its own."""

    def put(new: Any, old: jax.Array) -> jax.Array:
        return old if new is old else _jax.put(np.asarray(new, old.dtype), old.sharding)

    params, model_state = jax.tree.map(put, tuple(variables), (state.params, state.model_state))
    trainer.state = replace(state, params=params, model_state=model_state)


def _shapes(tree: Any) -> Any:
    return jax.tree.map(lambda x: (x.shape, x.dtype), tree)


def _is_whole(state: TrainState) -> bool:
    """Returns whether no array was donated to a step whose results never arrived."""
    return not any(x.is_deleted() for x in jax.tree.leaves((state.params, state.model_state)))
