"""Warns of a loss far above the losses before it."""

import math
from collections import deque

import numpy as np

from tnt_jax.distributed import stall
from tnt_jax.log import logger

# Losses that are compared, and how many spreads above their median is far. Losses of batches spread
# about as normal numbers do, whose median absolute deviation is 0.67 standard deviations.
_WINDOW, _FACTOR = 64, 20.0
# Least spread, as a part of the median: a loss that hardly changes has none.
_LEAST_SPREAD = 0.01


class LossSpikes:
    """Compares each loss that was read with those before it.

    A loss is far if it exceeds the median of the last 64 by 20 times their median absolute
    deviation, or by a fifth of the median if that is more. One warning is given until a loss is
    below that bound again.
    """

    def __init__(self) -> None:
        self._losses: deque[float] = deque(maxlen=_WINDOW)
        self._bound, self._median = math.inf, math.nan
        self._num_seen = 0
        self._is_told = False

    def see(self, loss: float, step: int) -> None:
        """Warns if a loss is far above those before it.

        Args:
            loss: Loss of one step; one that is not finite is no spike.
            step: Number of the step in the epoch, from 1 on.
        """
        if not math.isfinite(loss):
            return
        if loss > self._bound:
            if not self._is_told:
                self._is_told = True
                logger.warning(
                    "The loss of step %d of epoch %d is %.4g, far above the median %.4g of the %d "
                    "losses before.",
                    step, stall.here().epoch, loss, self._median, _WINDOW,
                )  # fmt: skip
        else:
            self._is_told = False
        self._losses.append(loss)
        self._num_seen += 1
        if self._num_seen % _WINDOW == 0:
            self._renew()

    def _renew(self) -> None:
        losses = np.array(self._losses)
        self._median = float(np.median(losses))
        spread = float(np.median(np.abs(losses - self._median)))
        self._bound = self._median + _FACTOR * max(spread, _LEAST_SPREAD * abs(self._median))
