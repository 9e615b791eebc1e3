"""Ends a job's calls on request, at a point on which all processes agree.

A signal to any process (`stop_signals`) is a request to all of them, which travels through the
job's coordination service. The calls that may end pass the same points in the same order on all
processes, for instance one before each step, and count them:

    for batch in batches:
        if points.stops_here():
            ...  # All processes stop before the same step.

A point costs two attributes as long as nobody has asked. Then a thread of each process closes the
points and posts the number of those passed, whatever its main thread does; all stop at the first
point that no process has passed. No device takes part.
"""

import atexit
import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn, TypeVar

import jax

from tnt_jax import _jax
from tnt_jax.distributed.joining import runtime
from tnt_jax.distributed.leaving import exits
from tnt_jax.distributed.leaving.stop_signals import StopSignals
from tnt_jax.distributed.liveness import phases
from tnt_jax.distributed.liveness.rendezvous import await_key, meet
from tnt_jax.distributed.liveness.threads import start_thread
from tnt_jax.job import Slot
from tnt_jax.log import logger
from tnt_jax.settings import PREEMPTED_EXIT_CODE

_REQUEST, _PASSED, _LAST = (f"tnt_jax/preemption/{name}" for name in ("request", "passed", "last"))
_TICK_S = 0.25
# How long the end of the thread is waited for.
_LONGEST_END_S = 3.0
# After the script of process 0 has ended, the others end theirs.
_NEVER = 2**62
_END = object()
_NO_AGREEMENT = "Signals do not save the state of this job any more; a second one ends it:"
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
        """Passes the next point.

        Raises:
            Preempted: If all processes stop there.
        """
        if self.stops_here():
            raise Preempted

    def before_each(self, items: Iterable[_T]) -> Iterator[_T]:
        """Yields items, with a point before each and one at their end.

        Raises:
            Preempted: At the point where all processes stop.
        """
        iterator = iter(items)
        while True:
            item = next(iterator, _END)
            self.pass_one()
            if item is _END:
                return
            yield item  # pyright: ignore[reportReturnType]


class Watch(Points):
    """Takes requests to end, and knows where this process stops.

    Attributes:
        reason: Who asked, in words; empty if nobody has.
        signum: The signal; 0 if there was none.
        is_training: Whether `fit` runs: then calls within its callbacks do not end.
    """

    def __init__(self) -> None:
        self.reason, self.signum = "", 0
        self.is_training = False
        self._pid = os.getpid()
        self._process, self._num_processes = jax.process_index(), jax.process_count()
        self._client: Any = _jax.coordination_client() if self._num_processes > 1 else None
        self._passed = 0
        self._is_closed = self._has_posted = False
        self._last: int | None = None
        self._is_settled, self._stopped = threading.Event(), threading.Event()
        if self._client is not None:
            self._thread = start_thread(self._agree, name="preemption", lost=_NO_AGREEMENT)
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
        # Before the look at `_is_closed`: the thread closes the points, and then reads the number.
        self._passed += 1
        return self._is_closed and self._await_last() < self._passed

    def gives_up(self) -> bool:
        """Returns whether it is known that all processes stop at the next point."""
        return self._last is not None and self._last <= self._passed

    def stop(self) -> None:
        """Ends the threads; the other processes need not wait for points of this one."""
        if os.getpid() != self._pid or self._stopped.is_set():
            return
        self._stopped.set()
        self._signals.close()
        if self._client is not None:
            self._thread.join(_LONGEST_END_S)
            with contextlib.suppress(jax.errors.JaxRuntimeError):  # The service has ended.
                self._post_passed()
                if self._process == 0 and self._last is None:
                    self._client.key_value_set(_LAST, str(_NEVER))

    def _await_last(self) -> int:
        with phases.waiting("the step after which all processes stop"):
            while self._last is None:
                self._is_settled.wait(_TICK_S)
        return self._last

    def _ask(self, signum: int) -> None:
        """Asks all processes to stop; runs in the thread that takes signals."""
        if self._client is None:
            self._close(signum, "")
            self._settle(self._passed)
            return
        if exits.has_failed_peer():
            # Whoever has seen that ends the others; together they can save nothing any more.
            os._exit(128 + signum)
        try:
            self._client.key_value_set(_REQUEST, f"{signum} {self._process}")
        except jax.errors.JaxRuntimeError as error:
            # Another process has asked, or the service has ended and the job with it.
            logger.debug("The request to end was not posted: %s", error)

    def _agree(self) -> None:
        """Waits for a request and agrees with the other processes on the last step."""
        request = self._read(_REQUEST)
        if request is None:
            return
        signum, process = request.split()
        self._close(int(signum), f" to process {process}")
        self._post_passed()
        if self._process == 0 and (last := self._find_last()) is not None:
            self._client.key_value_set(_LAST, str(last))
        if (text := self._read(_LAST)) is not None:
            self._settle(int(text))

    def _close(self, signum: int, to: str) -> None:
        self.reason, self.signum = f"{signal.Signals(signum).name} came{to}", signum
        self._is_closed = True

    def _settle(self, last: int) -> None:
        self._last = last
        self._is_settled.set()

    def _post_passed(self) -> None:
        if not self._has_posted:
            self._has_posted = True
            self._client.key_value_set(f"{_PASSED}/{self._process}", str(self._passed))

    def _find_last(self) -> int | None:
        """Returns the number of the last point that a process has passed."""
        texts = [self._read(f"{_PASSED}/{process}") for process in range(self._num_processes)]
        return max((int(text) for text in texts if text is not None), default=None)

    def _read(self, key: str) -> str | None:
        """Returns the value of a key once it exists; None if the job ends before."""
        return await_key(key, is_over=self._stopped.is_set)


def _stop(watch: Watch | None) -> None:
    if watch is not None:
        watch.stop()
        atexit.unregister(watch.stop)


_watch = Slot[Watch | None](lambda: None, close=_stop)


def current() -> Watch | None:
    """Returns the watch of this job; None until `start`."""
    return _watch.get()


def start() -> Watch:
    """Begins to take requests, and returns the watch; every process of the job must call it.

    It lives as long as the job.
    """
    watch = _watch.get()
    if watch is None:
        runtime.init()
        watch = Watch()
        _watch.set(watch)
        # Before the process leaves its job: its thread must not be in a call to the service then.
        atexit.register(watch.stop)
    return watch


def leave(code: int) -> NoReturn:
    """Ends this process with an exit code once all processes have come here.

    Raises:
        SystemExit: Always.
    """
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
