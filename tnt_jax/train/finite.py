"""Keeps steps that are not finite out of the training state, inside the program of a step.

A step is computed as without, and then taken or left, by one flag that is the same on every rank.
A step that is left changes nothing: no weight, no state of the optimizer or of the model, no
residual, no accumulated gradient, no sum of the logs, and no count of steps, so that training goes
on as if its batch had not been in the data.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from tnt_jax.train.loss_scale import adapts_scale, all_finite
from tnt_jax.train.state import TrainState

OnNaN = Literal["raise", "skip", "rollback"]
"""What follows a step whose loss or gradients are not finite."""

CHECKED = "checked"
"""Key of the sums of an epoch under which the counts of `first_counts` lie."""


def first_counts(in_a_row: int = 0, *, skipped: int = 0) -> np.ndarray:
    """Returns the counts of steps that were left, as they are at the beginning.

    Args:
        in_a_row: Steps in a row, up to the last one, that were left.
        skipped: Steps of the epoch that were left.

    Returns:
        float32 `[3]`: the steps in a row, the loss of the last step, and the steps of the epoch.
    """
    return np.array([in_a_row, 0, skipped], np.float32)


def is_finite_step(
    state: TrainState, model_state: Any, loss: jax.Array, grads: Any, *, found: Any = True
) -> jax.Array:
    """Returns whether a step may be taken: whether loss, gradients and model state are finite.

    Gradients of a loss whose scale adapts itself may be infinite, which lowers the scale. Model
    state may hold what is not finite if it did so before the step.

    Args:
        state: State before the step.
        model_state: Model state after it.
        loss: Loss of the global batch.
        grads: Gradients, summed over the ranks; None if they are not known.
        found: Further condition.
    """
    is_finite = all_finite(loss) & found
    if not adapts_scale(state.opt_state):
        is_finite &= all_finite(grads)
    for old, new in zip(
        jax.tree.leaves(state.model_state), jax.tree.leaves(model_state), strict=True
    ):
        if jnp.issubdtype(new.dtype, jnp.inexact):
            is_finite &= jnp.all(jnp.isfinite(new) | ~jnp.isfinite(old))
    return is_finite


def can_be_summed(state: TrainState, grads: Any, num_ranks: int) -> jax.Array:
    """Returns whether a rank's gradients are finite, and their sum over the ranks is, too.

    Args:
        state: State before the step.
        grads: This rank's part of the gradients.
        num_ranks: Ranks that add theirs.
    """
    if adapts_scale(state.opt_state):
        return jnp.asarray(True)
    return all_finite(jax.tree.map(lambda x: x * num_ranks, grads))


def take_or_leave(
    on_nan: OnNaN,
    is_finite: jax.Array,
    before: tuple[TrainState, Any],
    finish: Callable[[], tuple[TrainState, Any]],
    *,
    loss: jax.Array,
    platform: str,
    in_parts: bool = False,
) -> tuple[TrainState, Any]:
    """Returns state and sums after a step that is taken if it is finite, and left if not.

    Unless steps are skipped, all steps after the first that was left are left as well, until the
    host has read the counts and decided what follows.

    Args:
        on_nan: What follows a step that is not finite.
        is_finite: Whether the step is finite, the same on every rank.
        before: State and sums before the step.
        finish: Makes the update; returns state and sums after the step, the sums without counts.
        loss: Loss of the step.
        platform: Platform of the devices.
        in_parts: Whether each rank updates a part of the arrays alone.
    """
    state, sums = before
    in_a_row, _, skipped = sums[CHECKED]
    if on_nan != "skip":
        is_finite &= in_a_row == 0
    in_a_row = jnp.where(is_finite, 0.0, in_a_row + 1)
    checked = jnp.stack([in_a_row, loss.astype(jnp.float32), skipped + ~is_finite])
    old = state, {name: value for name, value in sums.items() if name != CHECKED}
    new_state, new_sums = finish()
    pick = _branch if platform == "cpu" else _select
    if in_parts:
        new_state, new_sums = pick(is_finite, (new_state, new_sums), old)
    else:
        new_rest, old_rest = (_without_update(*pair) for pair in ((new_state, new_sums), old))
        step, model_state, new_sums = pick(is_finite, new_rest, old_rest)
        new_state = replace(new_state, step=state.step, model_state=state.model_state)
        new_state = replace(
            _select(is_finite, new_state, state), step=step, model_state=model_state
        )
    return new_state, new_sums | {CHECKED: checked}


def _without_update(state: TrainState, sums: Any) -> Any:
    """Returns what an optimizer does not change: count of steps, model state, and sums."""
    return state.step, state.model_state, sums


def _select(is_finite: jax.Array, new: Any, old: Any) -> Any:
    return jax.tree.map(partial(jnp.where, is_finite), new, old)


def _branch(is_finite: jax.Array, new: Any, old: Any) -> Any:
    """Returns one of two trees of arrays that exist.

    A choice of each element would be compiled into the loop that makes it, which XLA's CPU compiler
    may then round otherwise. A copy is made, and on other devices the host has to wait.
    """
    return jax.lax.cond(is_finite, lambda: new, lambda: old)
