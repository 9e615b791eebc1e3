"""Uses the averaged weights for evaluation and saving."""

from collections.abc import Mapping
from typing import Any

from tnt_jax.keras_compat.callbacks.base import Callback


class SwapEMAWeights(Callback):
    """Swaps the averaged weights of an optimizer with `use_ema=True` in for evaluations.

    It works as Keras's callback.

    Args:
        swap_on_epoch: Whether the averages are also in the model at the end of each epoch, for
            later callbacks such as `ModelCheckpoint`.
    """

    def __init__(self, swap_on_epoch: bool = False) -> None:
        super().__init__()
        self.swap_on_epoch = swap_on_epoch
        self._average_is_in_model = False

    def state(self) -> dict[str, Any]:
        """Returns whether the averages are in the model."""
        return {"average_is_in_model": self._average_is_in_model}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Restores the state of an interrupted run."""
        self._average_is_in_model = state["average_is_in_model"]

    def on_epoch_begin(self, epoch: int, logs: Mapping[str, float] | None = None) -> None:
        """Swaps the averages out."""
        if self.swap_on_epoch:
            self._put_average(False)

    def on_epoch_end(self, epoch: int, logs: Mapping[str, float] | None = None) -> None:
        """Swaps the averages in."""
        if self.swap_on_epoch and not self._average_is_in_model:
            self._put_average(True)
            if epoch == self.params["epochs"] - 1:
                # The end of training swaps the averages in again.
                self.model.optimizer.copy_weights_to_average()

    def on_test_begin(self, logs: Mapping[str, float] | None = None) -> None:
        """Swaps the averages in."""
        self._put_average(True)

    def on_test_end(self, logs: Mapping[str, float] | None = None) -> None:
        """Swaps the averages out."""
        self._put_average(False)

    def on_predict_begin(self, logs: Mapping[str, float] | None = None) -> None:
        """Swaps the averages in."""
        self._put_average(True)

    def on_predict_end(self, logs: Mapping[str, float] | None = None) -> None:
        """Swaps the averages out."""
        self._put_average(False)

    def _put_average(self, wanted: bool) -> None:
        if self._average_is_in_model != wanted:
            self.model.optimizer.swap_average()
            self._average_is_in_model = wanted
