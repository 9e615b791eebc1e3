"""Ends training when the loss is not finite."""

import math
from collections.abc import Mapping

from tnt_jax.keras_compat.callbacks.base import Callback


class TerminateOnNaN(Callback):
    """Ends training after the first step whose loss is NaN or infinite.

    All ranks stop at the same step.

    It reads the loss of every step, so the host waits for each one, and sees it when the weights
    have changed already. `compile(on_nan="raise")` ends training before, without waiting.

    Args:
        raise_error: Whether to raise an error instead of ending training; `on_train_end` then does
            not run.
    """

    def __init__(self, raise_error: bool = False) -> None:
        super().__init__()
        self.raise_error = raise_error

    def on_train_batch_end(self, batch: int, logs: Mapping[str, float] | None = None) -> None:
        """Checks the loss.

        Raises:
            RuntimeError: If the loss is not finite and `raise_error` is set.
        """
        loss = (logs or {}).get("loss")
        if loss is None or math.isfinite(loss):
            return
        if self.raise_error:
            raise RuntimeError(
                f"The loss is {loss} after batch {batch}. Check the inputs, or lower the learning "
                "rate."
            )
        print(f"Batch {batch}: Invalid loss, terminating training", flush=True)
        self.model.stop_training = True
