"""Exchanges variables between a model and a wrapped NNX module or Keras model."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import jax
import numpy as np

from tnt_jax import _jax
from tnt_jax.adapters.base import Variables
from tnt_jax.distributed import collectives
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


def take_over_changes(trainer: Trainer, inputs: Any) -> None:
    """Reads the variables of the wrapped object again if the user has changed them.

    On every process the variables of the master count. The optimizer keeps its state, unless other
    variables than before are trained.

    Args:
        trainer: Trainer of the model.
        inputs: Inputs of the data at hand.
    """
    adapter = trainer.adapter
    if not adapter.holds_variables or trainer.owner is not None:
        return
    if (state := trainer.state) is None:
        return
    if not collectives.broadcast(np.int8(adapter.has_changed())):
        return
    variables = Variables(*collectives.broadcast(tuple(adapter.init(inputs, seed=0))))
    if _shapes(tuple(variables)) != _shapes((state.params, state.model_state)):
        trainer.build_from(variables)
        return
    places = jax.tree.map(lambda x: x.sharding, (state.params, state.model_state))
    params, model_state = _jax.put(tuple(variables), places)
    trainer.state = replace(state, params=params, model_state=model_state)


def _shapes(tree: Any) -> Any:
    return jax.tree.map(lambda x: (x.shape, x.dtype), tree)


def _is_whole(state: TrainState) -> bool:
    """Returns whether no array was donated to a step whose results never arrived."""
    return not any(x.is_deleted() for x in jax.tree.leaves((state.params, state.model_state)))
