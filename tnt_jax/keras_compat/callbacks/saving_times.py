"""Decides when a callback saves: after each epoch, or after a number of batches."""

from typing import Literal

SaveFreq = int | Literal["epoch"]


class SavingTimes:
    """Counts batches up to the next save.

    Batch numbers may jump if several steps run in one program.

    Args:
        save_freq: `"epoch"`, or the number of batches between two saves.

    Raises:
        ValueError: If it is neither.
    """

    def __init__(self, save_freq: SaveFreq) -> None:
        if save_freq != "epoch" and (
            not isinstance(save_freq, int) or isinstance(save_freq, bool) or save_freq < 1
        ):
            raise ValueError(
                f"save_freq must be 'epoch' or a number of batches from 1, but is {save_freq!r}."
            )
        self.save_freq = save_freq
        self._since_last = 0
        self._last_batch: int | None = None

    def is_due_after_batch(self, batch: int) -> bool:
        """Counts the batches up to number `batch` of the epoch; returns whether a save is due."""
        is_new_epoch = self._last_batch is None or batch <= self._last_batch
        self._since_last += batch + 1 if is_new_epoch else batch - (self._last_batch or 0)
        self._last_batch = batch
        if not isinstance(self.save_freq, int) or self._since_last < self.save_freq:
            return False
        self._since_last = 0
        return True

    def start_at(self, batch: int) -> None:
        """Starts to count after `batch` batches of an epoch, right after a save."""
        self._since_last = 0
        self._last_batch = batch - 1 if batch else None
