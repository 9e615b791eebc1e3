"""Ends a job's calls on request, at a point on which all processes agree.

A signal to any process (`stop_signals`) is a request to all of them (`agreement`). The calls that
may end pass the same points in the same order on all processes, for instance one before each step:

    for batch in batches:
        if points.stops_here():
            ...  # All processes stop before the same step.
"""

import atexit
import os
import signal
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import NoReturn, TypeVar

import jax

from tnt_jax.distributed.joining import runtime
from tnt_jax.distributed.leaving import exits
from tnt_jax.distributed.leaving.stop_signals import StopSignals
from tnt_jax.distributed.liveness.rendezvous import meet
from tnt_jax.distributed.stopping.agreement import Agreement
from tnt_jax.job import Slot
from tnt_jax.log import logger
from tnt_jax.settings import PREEMPTED_EXIT_CODE

# How long the end of the thread is waited for.
_LONGEST_END_S = 3.0
_NEVER = 2**62
_END = object()
_T = TypeVar("_T")


class Preempted(BaseException):
    """Raised at the point where all processes stop; it is no error."""


class Points:
    """The points of a call at which it may end; of one that nobody can ask to end, none."""

    gives_up: Callable[[], bool] | None = None
    """Says whether to wait no longer for what comes after the next point."""

    def stops_here(self) -> bool:
        """Passes the next point; returns whether all processes stop there.

        After a request it waits until the processes have agreed.
        """
        return False

    def pass_one(self) -> None:
        """Passes the next point; raises Preempted if all processes stop there."""
        if self.stops_here():
            raise Preempted

    def before_each(self, items: Iterable[_T]) -> Iterator[_T]:
        """Yields items, with a point as of `pass_one` before each and one at their end."""
        iterator = iter(items)
        while True:
            item = next(iterator, _END)
            self.pass_one()
            if item is _END:
                return
            yield item  # pyright: ignore[reportReturnType]


class Watch(Points):
    """Takes requests to end, and knows where this process stops.

    `reason` is who asked, in words, and `signum` the signal. While `is_training`, calls within the
    callbacks of `fit` do not end.
    """

    def __init__(self) -> None:
        self.reason, self.signum = "", 0
        self.is_training = False
        self._pid = os.getpid()
        self._agreement = Agreement(
            "tnt_jax/preemption",
            self._answer,
            name="preemption",
            what="the step after which all processes stop",
            lost="Signals do not save the state of this job any more; a second one ends it:",
        )
        self._signals = StopSignals(self._ask)

    def take_signals(self) -> None:
        """Makes signals to this process requests, unless the script handles them."""
        self._signals.install()

    def leave_signals(self) -> None:
        """Lets signals do what they did before, unless somebody has asked."""
        if not self.reason:
            self._signals.restore()

    def stops_here(self) -> bool:
        """Passes the next point; returns whether all processes stop there."""
        return self._agreement.stops_here()

    def gives_up(self) -> bool:
        """Returns whether it is known that all processes stop at the next point."""
        end = self._agreement.end
        return end is not None and end <= self._agreement.passed + 1

    def stop(self) -> None:
        """Ends the threads; the other processes need not wait for points of this one."""
        if os.getpid() != self._pid or self._agreement.stopped.is_set():
            return
        self._signals.close()
        # After the script of process 0 has ended, the others end theirs.
        point = self._agreement.passed + 1 if jax.process_index() else _NEVER
        self._agreement.leave(point, wait_s=_LONGEST_END_S)

    def _ask(self, signum: int) -> None:
        """Asks all processes to stop; runs in the thread that takes signals."""
        if exits.has_failed_peer():
            # Whoever has seen that ends the others; together they can save nothing any more.
            os._exit(128 + signum)
        try:
            self._agreement.ask(f"{signum} {jax.process_index()}")
        except jax.errors.JaxRuntimeError as error:
            # The service has ended, and the job with it.
            logger.debug("The request to end was not posted: %s", error)

    def _answer(self, agreement: Agreement, request: str) -> int:
        """Returns the first point that this process has not passed."""
        signum, process = map(int, request.split())
        to = f" to process {process}" if jax.process_count() > 1 else ""
        self.reason, self.signum = f"{signal.Signals(signum).name} came{to}", signum
        agreement.is_closed = True
        return agreement.passed + 1


def _stop(watch: Watch | None) -> None:
    if watch is not None:
        watch.stop()
        atexit.unregister(watch.stop)


_watch = Slot[Watch | None](lambda: None, close=_stop)


def current() -> Watch | None:
    """Returns the watch of this job; None until `start`."""
    return _watch.get()


def start() -> Watch:
    """Begins to take requests as long as the job lives; every process of it must call this."""
    watch = _watch.get()
    if watch is None:
        runtime.init()
        watch = Watch()
        _watch.set(watch)
        # Before the process leaves its job: its thread must not be in a call to the service then.
        atexit.register(watch.stop)
    return watch


def renewed(points: Points) -> Points:
    """Returns points of the running call for the processes of another generation."""
    if not isinstance(points, Watch):
        return points
    watch = start()
    watch.is_training = points.is_training
    watch.take_signals()
    return watch


def leave(code: int) -> NoReturn:
    """Ends this process with an exit code once all processes have come here."""
    meet("the end of a preempted run")
    sys.exit(code)


@contextmanager
def ending_call() -> Iterator[Points]:
    """Yields the points of a call that has nothing to save, and ends the process where it stops.

    Within `fit`, where only a callback can make such a call, it does not end.
    """
    watch = current()
    try:
        yield Points() if watch is None or watch.is_training else watch
    except Preempted:
        assert watch is not None
        logger.warning("%s: ending with exit code %d.", watch.reason, PREEMPTED_EXIT_CODE)
        leave(PREEMPTED_EXIT_CODE)
