"""Gradient accumulation: one update, and one exchange between ranks, for several steps."""

from collections.abc import Callable
from typing import Any

import jax

from tnt_jax import _jax
from tnt_jax.train.state import TrainState


def accumulate(
    state: TrainState,
    grads: Any,
    update: Callable[[Any, Any, Any], tuple[Any, Any]],
    num_steps: int,
) -> tuple[Any, Any, Any]:
    """Adds a step's gradients to the sums and updates in every `num_steps`-th step, as Keras does.

    Called inside `shard_map`.

    Args:
        state: State before the step; its `accumulated` arrays are this rank's, `[1, ...]`, or None
            if every step updates.
        grads: This rank's part of the gradients of the step.
        update: Maps mean gradients, parameters and optimizer state to the updated parameters and
            optimizer state; it sums the gradients over the ranks unless they are summed already.
        num_steps: Steps per update.

    Returns:
        Parameters, optimizer state and sums after the step.
    """
    if num_steps == 1:
        return *update(grads, state.params, state.opt_state), None
    totals = with_step(state.accumulated, grads)

    def update_by_mean(totals: Any) -> tuple[Any, Any, Any]:
        means = jax.tree.map(lambda total: total[0] / num_steps, totals)
        params, opt_state = update(means, state.params, state.opt_state)
        return params, opt_state, _jax.zeros_like(totals)

    def go_on(totals: Any) -> tuple[Any, Any, Any]:
        return state.params, state.opt_state, totals

    # The step number is the same on all ranks, so either all of them exchange gradients or none.
    return jax.lax.cond((state.step + 1) % num_steps == 0, update_by_mean, go_on, totals)


def with_step(accumulated: Any, grads: Any) -> Any:
    """Returns a rank's accumulated gradients `[1, ...]` with those of a further step."""
    return jax.tree.map(lambda total, grad: total + grad[None], accumulated, grads)
