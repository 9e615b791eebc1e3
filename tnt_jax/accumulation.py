"""Updates from the mean gradient of several steps, with one exchange between ranks for each update."""

from collections.abc import Callable
from typing import Any

import jax

from tnt_jax import _jax
from tnt_jax.state import TrainState


def accumulate(
    state: TrainState,
    grads: Any,
    reduce: Callable[[Any], Any],
    update: Callable[[Any, Any, Any], tuple[Any, Any]],
    num_steps: int,
) -> tuple[Any, Any, Any]:
    """Adds a step's gradients to the sums and updates in every `num_steps`-th step, as Keras does; inside `shard_map`.

    Args:
        state: State before the step; its `accumulated` arrays are this rank's, `[1, ...]`.
        grads: This rank's part of the gradients of the step.
        reduce: Sums gradients over ranks.
        update: From mean gradients, parameters and optimizer state to those after an update.
        num_steps: Steps of an update.

    Returns:
        Parameters, optimizer state and sums after the step.
    """
    totals = jax.tree.map(lambda total, grad: total + grad[None], state.accumulated, grads)

    def update_by_mean(totals: Any) -> tuple[Any, Any, Any]:
        means = jax.tree.map(lambda total: total[0] / num_steps, totals)
        params, opt_state = update(reduce(means), state.params, state.opt_state)
        return params, opt_state, _jax.zeros_like(totals)

    def go_on(totals: Any) -> tuple[Any, Any, Any]:
        return state.params, state.opt_state, totals

    # The step number is the same on all ranks, so that they exchange gradients together or not at all.
    return jax.lax.cond((state.step + 1) % num_steps == 0, update_by_mean, go_on, totals)
