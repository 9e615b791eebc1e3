"""Keras's three ways to clip gradients, on lists of arrays."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

Clip = Callable[[list[jax.Array]], list[jax.Array]]


def choose(
    *, clipnorm: float | None, clipvalue: float | None, global_clipnorm: float | None
) -> Clip:
    """Returns the function that clips gradients.

    A bound that is None or not positive clips nothing.
    """
    given = {"clipnorm": clipnorm, "clipvalue": clipvalue, "global_clipnorm": global_clipnorm}
    if sum(bound is not None for bound in given.values()) > 1:
        raise ValueError(
            f"Only one of clipnorm, clipvalue and global_clipnorm may be given, got {given}."
        )
    if clipnorm is not None and clipnorm > 0:
        return lambda grads: [clip_norm(grad, clipnorm) for grad in grads]
    if clipvalue is not None and clipvalue > 0:
        return lambda grads: [jnp.clip(grad, -clipvalue, clipvalue) for grad in grads]
    if global_clipnorm is not None and global_clipnorm > 0:
        return lambda grads: clip_global_norm(grads, global_clipnorm)
    return lambda grads: grads


def clip_norm(grad: jax.Array, bound: float) -> jax.Array:
    """Returns the gradient scaled down to a norm of at most `bound`."""
    return grad * bound / jnp.maximum(jnp.sqrt(jnp.sum(jnp.square(grad))), bound)


def clip_global_norm(grads: list[jax.Array], bound: float) -> list[jax.Array]:
    """Returns all gradients scaled by one factor, to a joint norm of at most `bound`.

    They are NaN if the norm is not finite.
    """
    norm = jnp.sqrt(sum((jnp.sum(jnp.square(grad)) for grad in grads), start=jnp.zeros(())))
    # norm - norm is 0, or NaN for an infinite norm, as in Keras: a factor of 0 must not hide an
    # overflow.
    scale = bound * jnp.minimum(1 / norm, 1 / bound) + (norm - norm)
    return [(grad * scale).astype(grad.dtype) for grad in grads]
