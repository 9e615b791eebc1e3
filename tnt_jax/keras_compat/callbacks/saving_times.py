"""Decides when a callback saves: after each epoch, after a number of batches, or of seconds."""

import math
import time
from collections.abc import Callable
from typing import Literal

import numpy as np

from tnt_jax.distributed.collectives import broadcast
from tnt_jax.settings import parse_save_freq

SaveFreq = int | Literal["epoch"]

# Processes agree on the time in few steps: after half of what is left, at most so long after the
# last time. As the time of the first steps says little, at most twice as many steps follow as came
# before.
_LONGEST_WAIT_S = 2.0
# The last part of an interval is not halved any more.
_LAST_PART = 0.05


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


class SavingSeconds:
    """Says every so many seconds that a save is due, on all processes after the same batch.

    The clock is that of process 0, which the others ask in few steps: it tells them whether a save
    is due, and after how many steps they ask again, by the time that steps have taken so far.

    Args:
        interval_s: Seconds between two saves.
        alone: Whether this process decides by itself.
        clock: Returns seconds.

    Attributes:
        interval_s: See above.
    """

    def __init__(
        self, interval_s: float, *, alone: bool, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.interval_s = interval_s
        self._alone = alone
        self._clock = clock
        self.start_at(0)

    def is_due_after_batch(self, batch: int) -> bool:
        """Counts a call after a batch; returns whether a save is due."""
        del batch
        if self._alone:
            is_due = self._clock() - self._last_s >= self.interval_s
        else:
            self._calls += 1
            if self._calls < self._wait:
                return False
            is_due = self._ask()
        if is_due:
            self._last_s = self._clock()
        return is_due

    def start_at(self, batch: int) -> None:
        """Starts to count, right after a save."""
        del batch
        self._last_s = self._asked_s = self._clock()
        self._calls, self._wait, self._total = 0, 1, 0

    def _ask(self) -> bool:
        """Returns whether process 0 finds that a save is due, and learns when to ask again."""
        is_due, self._wait = map(int, broadcast(np.array(self._decide(), np.int64)))
        self._total += self._calls
        self._calls, self._asked_s = 0, self._clock()
        return bool(is_due)

    def _decide(self) -> tuple[bool, int]:
        """Returns whether a save is due, and after how many calls to decide again."""
        now_s = self._clock()
        left_s = self.interval_s - (now_s - self._last_s)
        is_due = left_s <= 0
        if is_due:
            left_s = self.interval_s
        part = 1.0 if left_s < _LAST_PART * self.interval_s else 0.5
        call_s = max((now_s - self._asked_s) / self._calls, 1e-6)
        calls = math.ceil(min(part * left_s, _LONGEST_WAIT_S) / call_s)
        return is_due, min(calls, 2 * (self._total + self._calls))


def saving_times(save_freq: SaveFreq | str, *, alone: bool) -> SavingTimes | SavingSeconds:
    """Returns what says when a save is due.

    Args:
        save_freq: `"epoch"`, a number of batches, or a time such as `"30s"`, `"5m"` or `"1h"`.
        alone: Whether this process decides by itself.

    Raises:
        ValueError: If it is none of them.
    """
    if not isinstance(save_freq, str):
        return SavingTimes(save_freq)
    chosen = parse_save_freq(save_freq)
    return SavingSeconds(chosen, alone=alone) if isinstance(chosen, float) else SavingTimes(chosen)
