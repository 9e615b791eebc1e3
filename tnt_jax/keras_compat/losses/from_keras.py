"""Real Keras losses as losses of ours, so that they train on parts of a batch with Keras's numbers."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from tnt_jax.keras_compat.keras_objects import mask_of_outputs, require_jax_backend
from tnt_jax.keras_compat.losses.base import Loss


class KerasLoss(Loss):
    """A `keras.losses.Loss` whose `call` runs inside our step.

    Raises:
        ValueError: If Keras runs on another backend than JAX, or the loss compares rows with each other.
    """

    def __init__(self, loss: Any) -> None:
        keras = require_jax_backend()
        if isinstance(loss, keras.losses.Circle):
            raise ValueError(
                f"The Keras loss {loss.name!r} compares every row with every other, so it is not a sum over parts of a batch. "
                "Use a loss that has one value per row."
            )
        super().__init__(loss.name, loss.reduction)
        self.keras_loss = loss

    def call(self, y_true: Any, y_pred: Any) -> jax.Array:
        """Returns what the Keras loss returns for every row [batch, ...]."""
        # Keras converts targets to floating numbers before the loss sees them.
        y_true = jax.tree.map(lambda leaf: jnp.asarray(leaf, self.keras_loss.dtype), y_true)
        return self.keras_loss.call(y_true, y_pred)

    def valid(self, y_true: Any, y_pred: Any) -> jax.Array | None:
        """Returns the mask that the Keras loss attaches to its values, None if it attaches none."""
        return mask_of_outputs(self.call(y_true, y_pred))
