"""Keeps steps that are not finite out of the training state, inside the program of a step.

A step is computed as without, and then taken or left, by one flag that is the same on every rank. A
step that is left changes nothing: no weight, no state of the optimizer or of the model, no
residual, no accumulated gradient, no sum of the logs, and no count of steps, so that training goes
on as if its batch had not been in the data.

Loss scaling for float16: multiplying the loss keeps small gradients from underflowing. The scale is
part of the optimizer state. A step multiplies its loss by `loss_scale(state.opt_state)`, sums the
scaled gradients over the ranks and passes them to the transformation, which divides them by the
scale. A dynamic scale is updated from the sums, so that all ranks have the same.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax

from tnt_jax.train.state import TrainState


class LossScaleState(NamedTuple):
    """State of a gradient transformation with loss scaling, around that of another one."""

    scale: jax.Array  # That of the next step, float32.
    finite_steps: jax.Array  # Updates since the scale changed, int32.
    inner: Any


class DynamicLossScaleState(LossScaleState):
    """State of a transformation that adapts the scale itself when gradients are not finite."""


def with_fixed_scale(
    optimizer: optax.GradientTransformation, scale: float
) -> optax.GradientTransformation:
    """Returns a transformation for gradients of a loss that is multiplied by `scale`."""

    def init(params: Any) -> LossScaleState:
        return _initial(optimizer, scale, params)

    def update(grads: Any, state: LossScaleState, params: Any = None) -> tuple[Any, LossScaleState]:
        updates, inner = optimizer.update(_divided(grads, state.scale), state.inner, params)
        return updates, state._replace(inner=inner)

    return optax.GradientTransformation(init, update)  # pyright: ignore[reportArgumentType]


def with_dynamic_scale(
    optimizer: optax.GradientTransformation,
    *,
    initial_scale: float = 2.0**15,
    growth_steps: int = 2000,
) -> optax.GradientTransformation:
    """Returns a transformation for gradients of a scaled loss that adapts the scale.

    It works as `keras.optimizers.LossScaleOptimizer`: if a gradient is not finite, parameters and
    the inner state do not change, and the scale is halved; it is doubled after `growth_steps`
    updates in a row.
    """

    def init(params: Any) -> LossScaleState:
        return DynamicLossScaleState(*_initial(optimizer, initial_scale, params))

    def update(grads: Any, state: LossScaleState, params: Any = None) -> tuple[Any, LossScaleState]:
        def apply() -> tuple[Any, LossScaleState]:
            grows = state.finite_steps == growth_steps - 1
            scale = jnp.where(grows, state.scale * 2, state.scale)
            updates, inner = optimizer.update(_divided(grads, state.scale), state.inner, params)
            return updates, DynamicLossScaleState(
                scale, jnp.where(grows, 0, state.finite_steps + 1), inner
            )

        def skip() -> tuple[Any, LossScaleState]:
            updates = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(apply)[0])
            return updates, DynamicLossScaleState(
                state.scale / 2, jnp.zeros((), jnp.int32), state.inner
            )

        return jax.lax.cond(all_finite(grads), apply, skip)

    return optax.GradientTransformation(init, update)  # pyright: ignore[reportArgumentType]


def loss_scale(opt_state: Any) -> jax.Array | None:
    """Returns the factor of the loss before it is differentiated; None if there is none."""
    found = scale_alone(opt_state)
    return None if found is None else found.scale


def scale_alone(opt_state: Any) -> LossScaleState | None:
    """Returns the part of an optimizer's state that `loss_scale` needs; None if there is none."""
    states = [x for x in jax.tree.leaves(opt_state, is_leaf=_is_scaled) if _is_scaled(x)]
    return states[0]._replace(inner=None) if states else None


def adapts_scale(opt_state: Any) -> bool:
    """Returns whether the optimizer lowers a loss scale when gradients are not finite."""
    return isinstance(scale_alone(opt_state), DynamicLossScaleState)


def all_finite(tree: Any) -> jax.Array:
    """Returns whether all floating arrays of a tree are finite."""
    # Zero times infinity or NaN is NaN. XLA vectorizes this sum, but no `all` of `isfinite`: on
    # CPUs that takes twice as long.
    zeros = [
        jnp.real(jnp.sum(leaf * jnp.zeros((), leaf.dtype))).astype(jnp.float32)
        for leaf in map(jnp.asarray, jax.tree.leaves(tree))
        if jnp.issubdtype(leaf.dtype, jnp.inexact)
    ]
    return jnp.isfinite(jnp.sum(jnp.stack(zeros))) if zeros else jnp.asarray(True)


def check_uncompressed(opt_state: Any) -> None:
    """Raises a ValueError if the loss is scaled: residuals of compression would change theirs."""
    if scale_alone(opt_state) is not None:
        raise ValueError(
            "gradient_compression cannot be combined with a scaled loss (LossScaleOptimizer, "
            "loss_scale_factor): its residuals would change their scale, and a gradient that is "
            "not finite would remain in them. Leave one of the two out."
        )


def _initial(optimizer: optax.GradientTransformation, scale: float, params: Any) -> LossScaleState:
    return LossScaleState(
        jnp.asarray(scale, jnp.float32), jnp.zeros((), jnp.int32), optimizer.init(params)
    )


def _divided(grads: Any, scale: jax.Array) -> Any:
    return jax.tree.map(lambda grad: (grad / scale).astype(grad.dtype), grads)


def _is_scaled(node: Any) -> bool:
    return isinstance(node, LossScaleState)


OnNaN = Literal["raise", "skip", "rollback"]
"""Reaction to a step whose loss or gradients are not finite."""

CHECKED = "checked"
"""Key, in the sums of an epoch, of the counts of steps that were left, float32 `[3]`.

They are the steps in a row up to the last one, its loss, and the steps of the epoch.
"""


def is_finite_step(
    state: TrainState, model_state: Any, loss: jax.Array, grads: Any, *, found: Any = True
) -> jax.Array:
    """Returns whether a step may be taken: whether loss, gradients and model state are finite.

    Gradients, summed over the ranks, count if they are known, and no scale adapts itself to
    infinite ones. Model state may hold what is not finite if it did so before the step. `found` is
    a further condition.
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
    """Returns whether a rank's gradients are finite, and their sum over the ranks is, too."""
    if adapts_scale(state.opt_state):
        return jnp.asarray(True)
    return all_finite(jax.tree.map(lambda x: x * num_ranks, grads))


def take_or_leave(
    on_nan: OnNaN | None,
    judge: Callable[[], jax.Array],
    before: tuple[TrainState, Any],
    finish: Callable[[], tuple[TrainState, Any]],
    *,
    loss: jax.Array,
    platform: str,
    in_parts: bool = False,
) -> tuple[TrainState, Any]:
    """Returns state and sums after a step that is taken if `judge` says so, and left if not.

    If `on_nan` is None, it is taken unjudged. Unless steps are skipped, all steps after the first
    that was left are left as well, until the host has read the counts and decided what follows.
    `finish` makes the update; with `in_parts` each rank updates a part of the arrays alone.
    """
    if on_nan is None:
        return finish()
    state, sums = before
    in_a_row, _, skipped = sums[CHECKED]
    is_finite = judge()
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
        # What an optimizer does not change.
        new_rest = new_state.step, new_state.model_state, new_sums
        old_rest = state.step, state.model_state, old[1]
        step, model_state, new_sums = pick(is_finite, new_rest, old_rest)
        new_state = replace(new_state, step=state.step, model_state=state.model_state)
        chosen = _select(is_finite, new_state, state)
        new_state = replace(chosen, step=step, model_state=model_state)
    return new_state, new_sums | {CHECKED: checked}


def _select(is_finite: jax.Array, new: Any, old: Any) -> Any:
    return jax.tree.map(partial(jnp.where, is_finite), new, old)


def _branch(is_finite: jax.Array, new: Any, old: Any) -> Any:
    # XLA's CPU compiler would compile a choice of each element into the loop that makes it, and may
    # then round otherwise. This makes a copy, for which the host has to wait on other devices.
    return jax.lax.cond(is_finite, lambda: new, lambda: old)
