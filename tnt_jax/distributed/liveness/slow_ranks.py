"""Names a process that is slower than the others, by the time that each spends outside of waiting.

All processes make the same steps, so that in the same time one that is faster waits more. What each
phase has taken comes with the notes (`phases`), without a collective. Where the compiler's
collectives sum gradients, not memory that processes share, a process cannot tell computing from
waiting for the others: both are time in the step, and only data and callbacks can be compared.

A thread estimates how long this process is in each phase without waiting: it looks at its position
many times a minute, so that the steps themselves read no clock.
"""

import random
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from statistics import median
from typing import Any

from tnt_jax.distributed.liveness.phases import Here, Phase

_LONGEST_PERIOD_S = 0.25
# Samples of the window that is judged.
_SAMPLES = 200


class OwnTimes:
    """The `seconds` of this process in each phase, without those in which it waits for others.

    They will be compared over `window_s` seconds; `is_waiting` tells whether its devices wait.
    """

    def __init__(self, here: Here, window_s: float, is_waiting: Callable[[], bool]) -> None:
        self.seconds: dict[Phase, float] = {}
        self._here = here
        self._is_waiting = is_waiting
        self._period_s = min(window_s / _SAMPLES, _LONGEST_PERIOD_S)

    def run(self, stopped: threading.Event, then: Callable[[float], None]) -> None:
        """Samples until an event is set, and gives `then` the seconds since the last one."""
        before_s = time.monotonic()
        # Periods of random length, as steps may have a fixed one. The global generator belongs to
        # the user.
        lengths = random.Random()
        while not stopped.wait(self._period_s * lengths.uniform(0.5, 1.5)):
            now_s = time.monotonic()
            self.sample(now_s - before_s)
            then(now_s - before_s)
            before_s = now_s

    def sample(self, passed_s: float) -> None:
        """Counts seconds under the phase of this moment, or under none while the process waits."""
        phase = self._here.doing[0]
        own_s = 0.0 if self._here.awaits or self._is_waiting() else passed_s
        # Replaced whole, as another thread reads it.
        self.seconds = {**self.seconds, phase: self.seconds.get(phase, 0.0) + own_s}


_FACTOR = 1.5
# Of the time that has passed: less costs the job little, whatever the factor.
_LEAST_SHARE = 0.2
# How old the times may be, of the window: less than makes a process slow.
_OLDEST_SHARE = _LEAST_SHARE / 2
_OF_HOST: tuple[Phase, ...] = ("data", "callback", "save")
# In these a process may wait for others without knowing it.
_OF_DEVICE: tuple[Phase, ...] = ("step", "steps", "loop")
_WORDS: dict[Phase, str] = {
    "data": "reading data",
    "callback": "in callbacks",
    "save": "saving",
    "step": "computing on its devices",
    "steps": "computing on its devices",
    "loop": "in the body of its loop",
}

Times = Mapping[Any, float]


class SlowRanks:
    """Compares the processes every `window_s` seconds, and names each that is slow once."""

    def __init__(self, window_s: float) -> None:
        self._window_s = window_s
        self._began_s = 0.0
        self._before: Sequence[Times] | None = None
        self._named: set[tuple[int, Phase]] = set()

    def look(
        self,
        now_s: float,
        times: Sequence[Times],
        *,
        calls: Collection[str] = (),
        silent_s: float = 0.0,
    ) -> str | None:
        """Returns a sentence on a process that has been slow, or None.

        `times` are the seconds of each process so far in each phase, outside of waiting, the oldest
        `silent_s` old. Nothing is compared in the first stretch of time, in which programs are
        compiled, while processes are in different calls, and while the times of one are old: a
        process that has left its call by an error, or is stopped, would make those that wait for it
        look slow.
        """
        if len(set(calls)) > 1:
            self._before = None
            return None
        if now_s - self._began_s < self._window_s or silent_s > _OLDEST_SHARE * self._window_s:
            return None
        passed_s, self._began_s = now_s - self._began_s, now_s
        before, self._before = self._before, times
        if before is None or not all(before):
            return None
        spent = [
            {phase: own.get(phase, 0.0) - old.get(phase, 0.0) for phase in (*_OF_HOST, *_OF_DEVICE)}
            for own, old in zip(times, before, strict=True)
        ]
        found = find_slow(spent, passed_s)
        if found is None or found in self._named:
            return None
        self._named.add(found)
        return _describe(*found, spent, passed_s)


def find_slow(spent: Sequence[Times], passed_s: float) -> tuple[int, Phase] | None:
    """Returns the slowest process and what it spends its time with, if it is slow.

    It is if it spends 1.5 times what the others do, at the median, and a fifth of all time more.
    """
    for phases in (_OF_HOST, (*_OF_HOST, *_OF_DEVICE)):
        sums = [sum(own.get(phase, 0.0) for phase in phases) for own in spent]
        process = max(range(len(sums)), key=sums.__getitem__)
        others = median(sums[:process] + sums[process + 1 :])
        if sums[process] > max(_FACTOR * others, others + _LEAST_SHARE * passed_s):
            own = spent[process]
            excess = {x: own.get(x, 0.0) - _of_others(spent, process, x) for x in phases}
            return process, max(phases, key=excess.__getitem__)
    return None


def _of_others(spent: Sequence[Times], process: int, phase: Phase) -> float:
    return median(own.get(phase, 0.0) for number, own in enumerate(spent) if number != process)


def _describe(process: int, phase: Phase, spent: Sequence[Times], passed_s: float) -> str:
    return (
        f"Process {process} is slower than the others, which wait for it: of the last "
        f"{passed_s:.0f} s it spent {spent[process].get(phase, 0.0):.1f} s {_WORDS[phase]}, the "
        f"others {_of_others(spent, process, phase):.1f} s at the median."
    )
