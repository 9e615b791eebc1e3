"""Loss scaling for float16: multiplying the loss keeps small gradients from underflowing.

The scale is part of the optimizer state. A step multiplies its loss by
`loss_scale(state.opt_state)`, sums the scaled gradients over the ranks and passes them to the
transformation, which divides them by the scale. A dynamic scale is updated from the sums, so that
all ranks have the same.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax


class LossScaleState(NamedTuple):
    """State of a gradient transformation with loss scaling.

    Attributes:
        scale: Factor of the loss of the next step, float32.
        finite_steps: Updates since the scale last changed, int32.
        inner: State of the transformation of the unscaled gradients.
    """

    scale: jax.Array
    finite_steps: jax.Array
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
    the inner state do not change, and the scale is halved.

    Args:
        optimizer: Transformation of the unscaled gradients.
        initial_scale: First scale.
        growth_steps: Updates in a row after which the scale is doubled.
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
    """Returns the factor of the loss before it is differentiated.

    The result is None if the optimizer does not scale the loss.
    """
    found = scale_alone(opt_state)
    return None if found is None else found.scale


def scale_alone(opt_state: Any) -> LossScaleState | None:
    """Returns the part of an optimizer's state that `loss_scale` needs.

    The result is None if the optimizer does not scale the loss.
    """
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
    """Raises a ValueError if an optimizer scales the loss, for use with compression.

    The residuals of compression would have another scale.
    """
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
