"""The progress of training, evaluation or prediction.

The code between the steps writes it, and callbacks read it.
"""

from dataclasses import dataclass
from typing import Any

from tnt_jax.keras_compat.callbacks import History


@dataclass
class Progress:
    """The progress of the running call.

    Attributes:
        stop_training: Set to True by a callback to end training after the current step.
        stop_evaluating: Set to True by a callback to end an evaluation after the current step.
        stop_predicting: The same for a prediction.
        rows_in_batch: Real rows of the global batch in the current step.
        epoch_sums: Sums from which the logs of the epoch so far are computed, on the devices; None
            if there are none.
        history: The history of the last `fit`, which its callback stores here; None before the
            first.
        is_compiling: Whether the next step is compiled first, because its batch has a new shape.
        epoch: Number of the epoch in training, from 0; the next one once its callbacks have run.
        batches_done: Training batches of that epoch so far.
        rows_done: Their real rows.
        training_sums: Their sums, on the devices; None before the first.
    """

    stop_training: bool = False
    stop_evaluating: bool = False
    stop_predicting: bool = False
    rows_in_batch: int = 0
    epoch_sums: Any = None
    history: History | None = None
    is_compiling: bool = False
    epoch: int = 0
    batches_done: int = 0
    rows_done: int = 0
    training_sums: Any = None

    def enter_epoch(self, epoch: int, batches_done: int, rows_done: int, sums: Any) -> None:
        """Sets where training is in the epochs."""
        self.epoch, self.batches_done, self.rows_done = epoch, batches_done, rows_done
        self.training_sums = sums
