"""What a model's outputs are like, before and besides the loops of the trainer."""

from typing import Any

import jax
import numpy as np

from tnt_jax import _jax
from tnt_jax.distributed import stall
from tnt_jax.train.contracts import Batch
from tnt_jax.train.step import make_predict_step
from tnt_jax.train.trainer import Trainer

_FIRST = np.uint32(0)  # Rows of the data before the batch.


def steps_per_program(trainer: Trainer, wanted: int, batch: Batch) -> int:
    """Returns how many steps of evaluation or prediction share a program.

    They are as many as wanted, but 1 where that is slow.

    Args:
        trainer: Trainer with variables.
        wanted: Steps that the user wants in one program.
        batch: This process's rows of a batch.
    """
    if wanted == 1 or trainer.steps.fused is None or trainer.runtime.platform != "cpu":
        return wanted
    # As in training: XLA's CPU convolutions are many times slower in a program of several steps.
    state = trainer.require_state()
    inputs = trainer.put(batch.inputs)
    is_slow = _jax.convolves(trainer.predict_step, state.params, state.model_state, inputs, _FIRST)
    return 1 if is_slow else wanted


def trace_outputs(trainer: Trainer, batch: Batch) -> tuple[Any, Any]:
    """Returns shapes and dtypes of the model's outputs, and what made each of them last.

    The second tree holds `"sigmoid"`, `"softmax"` or `""`.

    Args:
        trainer: Trainer that was built.
        batch: Batch of this process's rows.
    """
    state = trainer.described()
    # Steps that run one by one have several programs, none of which says it alone.
    is_one = trainer.steps.fused is not None
    fast = (
        trainer.predict_step
        if is_one
        else make_predict_step(trainer.adapter.apply, trainer.runtime.mesh)
    )
    inputs = trainer.put(batch.inputs)
    traced = fast.trace(state.params, state.model_state, inputs, _FIRST)  # pyright: ignore
    activations = [activation or "" for activation in _jax.last_activations(traced)]
    return traced.out_info, jax.tree.unflatten(jax.tree.structure(traced.out_info), activations)


def local_outputs(trainer: Trainer, batch: Batch) -> Any:
    """Returns the model's outputs for this process's rows of a batch, as host arrays.

    The rows of padding are included.

    Args:
        trainer: Trainer with variables.
        batch: Batch of this process's rows.
    """
    state = trainer.require_state()
    with stall.in_phase("step"):
        outputs = _jax.finished(
            trainer.predict_step(state.params, state.model_state, trainer.put(batch.inputs), _FIRST)
        )
    return jax.tree.map(
        lambda x: np.concatenate([np.asarray(s.data) for s in _in_row_order(x)]), outputs
    )


def _in_row_order(x: jax.Array) -> list[Any]:
    return sorted(x.addressable_shards, key=lambda shard: shard.index[0].start or 0)
