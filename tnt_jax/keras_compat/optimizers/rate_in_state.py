"""Reads and sets the learning rate inside the state of an optimizer."""

from typing import Any

import jax
import numpy as np


def read_learning_rate(opt_state: Any) -> jax.Array | None:
    """Returns the learning rate in a state, or None if it holds none.

    It is the rate of the last update or, before the first update, of the next.
    """
    injected = _injected(opt_state)
    return injected[0].hyperparams["learning_rate"] if injected else None


def write_learning_rate(opt_state: Any, learning_rate: Any) -> Any:
    """Returns the state with another learning rate, without retracing.

    The dtype and the placement of the rate are kept.

    Args:
        opt_state: State of the transformation of an optimizer.
        learning_rate: The rate, a number or scalar.

    Raises:
        TypeError: If a schedule sets the rate.
        ValueError: If the state holds no rate, as for an Optax transformation not built by
            `optax.inject_hyperparams`.
    """
    injected = _injected(opt_state)
    if not injected:
        raise ValueError(
            "This optimizer's state holds no learning rate to set. Build the Optax transformation "
            "with optax.inject_hyperparams(optax.sgd)(learning_rate=...), or use a "
            "tnt_jax.optimizers class."
        )
    if any("learning_rate" in state.hyperparams_states for state in injected):
        raise TypeError(
            "A schedule decides the learning rate, so it cannot be set; create the optimizer with "
            "a number."
        )

    def replaced(node: Any) -> Any:
        if not _is_injected(node):
            return node
        old = node.hyperparams["learning_rate"]
        return node._replace(
            hyperparams={**node.hyperparams, "learning_rate": _like(old, learning_rate)}
        )

    return jax.tree.map(replaced, opt_state, is_leaf=_is_injected)


def _like(old: Any, value: Any) -> Any:
    """Returns a number as an array with the dtype and, on devices, the sharding of another."""
    value = np.asarray(value, old.dtype)
    # Each process creates its own copies: device_put to several processes would communicate.
    return (
        jax.make_array_from_callback((), old.sharding, lambda _: value)
        if isinstance(old, jax.Array)
        else value
    )


def _is_injected(node: Any) -> bool:
    return "learning_rate" in getattr(node, "hyperparams", ()) and hasattr(
        node, "hyperparams_states"
    )


def _injected(opt_state: Any) -> list[Any]:
    """Returns the states of `inject_hyperparams` within a state that hold a learning rate."""
    return [node for node in jax.tree.leaves(opt_state, is_leaf=_is_injected) if _is_injected(node)]
