"""Ends a loop of steps after the same step on all processes, though one alone may ask for it.

A step completes only if every process starts it, so a process that stopped alone would leave the
others waiting. The process that asks after program k waits there until all have answered, once they
have started program k: those that ask, too, with k, the others with k + `ahead`. Nobody can be
further than that: program k + 1 needs the process that waits, and a process is at most `ahead` - 1
programs ahead of the last complete one.
"""

import contextlib
from collections.abc import Iterator
from itertools import count

import jax

from tnt_jax.distributed.host.comparison import name_processes
from tnt_jax.distributed.stopping.agreement import Agreement
from tnt_jax.job import Slot
from tnt_jax.log import logger

_numbers = Slot(count)
_TICK_S = 0.005


@contextlib.contextmanager
def shared_stop(*, ahead: int, is_watched: bool) -> Iterator["SharedStop"]:
    """Surrounds a loop of steps; see `SharedStop`.

    If the loop ends without an error, all processes have met since its last step.
    """
    stop = SharedStop(ahead=ahead, is_watched=is_watched)
    try:
        yield stop
    except BaseException:
        if stop.agreement is not None:
            stop.agreement.leave(None)
        raise
    if stop.agreement is not None:
        stop.agreement.clean()


class SharedStop:
    """The decision of all processes to end one loop of steps; all make them in the same order.

    `ahead` is the number of programs after which every process has seen the request of one that has
    stopped; `is_watched` says, on all processes alike, if one may ask between the steps.
    """

    def __init__(self, *, ahead: int, is_watched: bool) -> None:
        self.is_asked = self.is_over = False
        self.agreement: Agreement | None = None
        self._ahead = ahead
        self._is_alone = jax.process_count() == 1
        # The program after which this process has asked, and the one of the request that counts.
        self._asked_at = self._request = 0
        if is_watched and not self._is_alone:
            self.agreement = Agreement(
                f"tnt_jax/stop/{next(_numbers.get())}",
                self._answer,
                name="stop",
                what="end of training",
                lost="This process does not answer one that asks for the end of training:",
            )

    def after_program(self, asks: bool) -> bool:
        """Returns whether the loop ends after the program that was just started."""
        agreement = self.agreement
        if agreement is None:
            self.is_over = asks and self._is_alone
            return self.is_over
        number = agreement.passed + 1
        if asks and not self.is_asked:
            self._asked_at, self.is_asked = number, True
            self._request = int(agreement.ask(str(number)))
        if self.is_asked and number == self._request:
            agreement.answer(number)
        self.is_over = agreement.stops_here()
        if agreement.has_asked and number == self._request and not self.is_over:
            asking = [one for one, point in enumerate(agreement.answers) if point == number]
            logger.warning(
                "stop_training was set on %s alone. All processes end training together, %d "
                "program(s) later or with the epoch. A callback should decide alike on every "
                "process.",
                name_processes(asking),
                self._ahead,
                extra={"on_every_process": True},
            )
        return self.is_over

    def _answer(self, agreement: Agreement, request: str) -> int | None:
        """Returns the first program after which this process can stop, once it has started it."""
        number = int(request)
        while agreement.passed < number:
            if agreement.stopped.wait(_TICK_S):
                return None
        return number if self.is_asked and self._asked_at <= number else number + self._ahead
