"""Keras losses as tnt_jax losses, which train on parts of a batch with Keras's numbers."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from tnt_jax.keras_compat.keras_objects import mask_of_outputs, require_jax_backend
from tnt_jax.keras_compat.losses.base import Loss


class KerasLoss(Loss):
    """A `keras.losses.Loss` whose `call` runs inside a tnt_jax step.

    Raises:
        ValueError: If Keras uses a backend other than JAX.
    """

    def __init__(self, loss: Any) -> None:
        require_jax_backend()
        super().__init__(loss.name, loss.reduction, loss.dtype)
        self.keras_loss = loss

    def call(self, y_true: Any, y_pred: Any) -> jax.Array:
        """Returns the values of the Keras loss [batch, ...]."""
        # Keras converts targets to floating numbers before the loss sees them.
        y_true = jax.tree.map(lambda leaf: jnp.asarray(leaf, self.keras_loss.dtype), y_true)
        return self.keras_loss.call(y_true, y_pred)

    def valid(self, y_true: Any, y_pred: Any) -> jax.Array | None:
        """Returns the mask that the Keras loss attaches to its values, or None."""
        return mask_of_outputs(self.call(y_true, y_pred))
