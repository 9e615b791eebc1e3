"""Estimates how long this process is in each phase without waiting for others, by samples.

A thread looks at the position of the process (`stall`) many times a minute and counts the time
since its last look under the phase that it finds. The steps themselves thus read no clock.
"""

import random
import threading
import time
from collections.abc import Callable

from tnt_jax.distributed.stall import Here, Phase

_LONGEST_PERIOD_S = 0.25
# Samples of the window that is judged.
_SAMPLES = 200


class OwnTimes:
    """The seconds of this process in each phase, without those in which it waits for others.

    Args:
        here: The position of the process.
        window_s: Seconds over which times will be compared.
        is_waiting: Whether the devices of the process wait for others.

    Attributes:
        seconds: By phase.
    """

    def __init__(
        self, here: Here, window_s: float, is_waiting: Callable[[], bool] = lambda: False
    ) -> None:
        self.seconds: dict[Phase, float] = {}
        self._here = here
        self._is_waiting = is_waiting
        self._period_s = min(window_s / _SAMPLES, _LONGEST_PERIOD_S)

    def run(self, stopped: threading.Event) -> None:
        """Samples until an event is set."""
        before_s = time.monotonic()
        # Periods of random length, as steps may have a fixed one. The global generator belongs to
        # the user.
        lengths = random.Random()
        while not stopped.wait(self._period_s * lengths.uniform(0.5, 1.5)):
            now_s = time.monotonic()
            self.sample(now_s - before_s)
            before_s = now_s

    def sample(self, passed_s: float) -> None:
        """Counts the seconds since the last sample under the phase of this moment.

        Those in which the process waits for others count under none.
        """
        phase = self._here.doing[0]
        own_s = 0.0 if self._here.awaits or self._is_waiting() else passed_s
        # Replaced whole, as another thread reads it.
        self.seconds = {**self.seconds, phase: self.seconds.get(phase, 0.0) + own_s}
