"""Agreement of all processes on the point at which they stop, for which any of them may ask.

All processes pass the same points in the same order, such as one before each step, and count them
(`Agreement`). A signal to any process (`StopSignals`) is a request to all of them to end their
calls at the same point (`Watch`). A callback asks by `SharedStop` for the end of one loop of steps.
"""

import asyncio
import atexit
import contextlib
import os
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import count
from typing import Any, NoReturn, TypeVar

import jax

from tnt_jax import _jax
from tnt_jax.distributed import leaving
from tnt_jax.distributed.host.comparison import name_processes
from tnt_jax.distributed.joining import runtime
from tnt_jax.distributed.liveness import table
from tnt_jax.distributed.liveness.rendezvous import meet, read_key
from tnt_jax.distributed.liveness.threads import start_thread, watcher
from tnt_jax.job import Slot
from tnt_jax.log import logger
from tnt_jax.settings import PREEMPTED_EXIT_CODE

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
# A cluster may send a signal to the launcher and to its processes, which then get it twice.
_SAME_S = 2.0
_CLOSE = 0
# Marks the bytes that `StopSignals._handle` writes.
_REPORTED = 0x80
_NO_SIGNALS = "Signals to this process do not save its state any more:"
_set_wakeup = partial(signal.set_wakeup_fd, warn_on_full_buffer=False)


class StopSignals:
    """Calls a function, in a thread, with the first of the signals; the second ends at once.

    Python runs the handler of a signal in the main thread between two bytecodes, which may be long
    waiting for others. The byte that Python's handler in C writes to a pipe wakes a thread at once.
    A handler that the script has set, before or after, stays: its signal is then left to it. So is
    SIGTERM if the script ignores it, and the others unless the launcher has had them ignored.
    """

    def __init__(self, on_first: Callable[[int], None]) -> None:
        self._on_first = on_first
        self._first_at: float | None = None
        self._previous: dict[int, Any] = {}
        self._read_fd, self._write_fd = os.pipe()
        os.set_blocking(self._write_fd, False)
        self._thread = start_thread(self._listen, name="signals", lost=_NO_SIGNALS)
        own = weakref.ref(self)

        def restore() -> None:
            # A process that os.fork has made, such as one that loads data, shares the pipe: a
            # signal to it would count as one to its parent.
            if (parent := own()) is not None:
                parent.restore()

        os.register_at_fork(after_in_child=restore)

    def install(self) -> None:
        """Takes the signals that nobody else handles; outside of the main thread, it warns."""
        if threading.current_thread() is not threading.main_thread():
            logger.warning(
                "fit does not run in the main thread: SIGTERM, SIGUSR1 and SIGUSR2 to this process "
                "do not save its state."
            )
            return
        for signum in SIGNALS:
            if signum not in self._previous and _is_free(signum):
                self._previous[signum] = signal.signal(signum, self._handle)
        if self._previous and (other := _set_wakeup(self._write_fd)) != -1:
            _set_wakeup(other)

    def restore(self) -> None:
        """Gives the signals back, except those that have been taken from it since."""
        if threading.current_thread() is not threading.main_thread():
            return
        for signum, handler in self._previous.items():
            if signal.getsignal(signum) == self._handle:
                signal.signal(signum, handler)
        self._previous.clear()
        if (current := _set_wakeup(-1)) != self._write_fd:
            _set_wakeup(current)

    def close(self) -> None:
        """Gives the signals back and ends the thread."""
        self.restore()
        os.write(self._write_fd, bytes([_CLOSE]))
        self._thread.join()
        os.close(self._read_fd)
        os.close(self._write_fd)

    def _handle(self, signum: int, frame: Any) -> None:
        """Reports a signal of which the thread has not been told."""
        # Its byte has gone to another's pipe, such as that of an event loop, or a handler of the
        # script calls this one.
        current = _set_wakeup(-1)
        _set_wakeup(current)
        if current != self._write_fd or signal.getsignal(signum) != self._handle:
            with contextlib.suppress(BlockingIOError):  # Full of signals already.
                os.write(self._write_fd, bytes([signum | _REPORTED]))

    def _listen(self) -> None:
        while True:
            for byte in os.read(self._read_fd, 64):
                if byte == _CLOSE:
                    return
                if byte & _REPORTED:
                    self._take(byte & ~_REPORTED)
                # Python's own handler in C tells of any signal that has a handler in Python.
                elif byte in SIGNALS and signal.getsignal(byte) == self._handle:
                    self._take(byte)

    def _take(self, signum: int) -> None:
        moment = time.monotonic()
        if self._first_at is None:
            self._first_at = moment
            self._on_first(signum)
        elif moment - self._first_at > _SAME_S:
            name = signal.Signals(signum).name
            sys.stderr.write(f"[tnt_jax] ERROR: {name} is the second signal: ending at once.\n")
            sys.stderr.flush()
            os._exit(128 + signum)


def _is_free(signum: int) -> bool:
    handler = signal.getsignal(signum)
    is_ignored_by_launcher = signum != signal.SIGTERM and "TNT_JOB_ID" in os.environ
    return handler == signal.SIG_DFL or (handler == signal.SIG_IGN and is_ignored_by_launcher)


_LEFT = "left"
_TICK_S, _SELDOM_S = 0.005, 0.25


class Agreement:
    """The points that all processes pass, and the one at which they stop.

    Its keys in the coordination service begin with `folder`. `answer` returns, for this and the
    text of a request, the first point at which this process can stop, or None if that is not known
    yet; it runs in the watcher's thread, and may close the points. `what` and `lost` are for
    messages.

    Attributes:
        passed: Points so far.
        is_closed: Whether this process waits for the end at the next point.
        end: The point where all stop; None until it is known from the `answers`.
        has_asked: Whether the request of this process is the one that counts.
        has_left: Whether this process passes no more points.
    """

    def __init__(
        self,
        folder: str,
        answer: Callable[["Agreement", str], int | None],
        *,
        what: str,
        lost: str,
    ) -> None:
        self.passed = 0
        self.is_closed = self.has_asked = self.has_left = self._has_answered = False
        self.end: int | None = None
        self.answers: list[int] = []
        self._lock = threading.Lock()
        self._folder, self._answer, self._what = folder, answer, what
        self._process, self._num_processes = jax.process_index(), jax.process_count()
        if self._num_processes > 1:
            self._client = _jax.coordination_client()
            self._watcher = watcher.get()
            self._agreeing = self._watcher.begin(self._agree(), lost=lost)

    def ask(self, text: str) -> str:
        """Asks all processes to stop; returns the request that counts, which is the first."""
        if self._num_processes == 1:
            self.end = self._answer(self, text)
            return text
        key = f"{self._folder}/request"
        try:
            self._client.key_value_set(key, text)
            self.has_asked = True
        except jax.errors.JaxRuntimeError as error:
            if "ALREADY_EXISTS" not in str(error):
                raise
        return _jax.value_of_key(self._client, key) or text

    def stops_here(self) -> bool:
        """Passes the next point; returns whether all stop there, after all answers once closed."""
        # Before the look at `is_closed`: the watcher closes the points, and then reads the number.
        self.passed += 1
        return self.is_closed and self._await_end() <= self.passed

    def answer(self, point: int) -> None:
        """Closes the points and answers, unless this process has."""
        self.is_closed = True
        self._post(str(point))

    def leave(self, answer: int | None) -> None:
        """Passes no more points; answers in place of them, with None after an error."""
        self.has_left = True
        if self._num_processes > 1:
            self._watcher.end(self._agreeing)
            with contextlib.suppress(jax.errors.JaxRuntimeError):  # The service has ended.
                self._post(_LEFT if answer is None else str(answer))

    def clean(self) -> None:
        """Deletes what this process has posted; all have passed their last point and met."""
        self._watcher.end(self._agreeing)
        if self._has_answered:
            self._client.key_value_delete(f"{self._folder}/{self._process}")
        if self.has_asked:
            self._client.key_value_delete(f"{self._folder}/request")

    def _post(self, answer: str) -> None:
        with self._lock:
            if self._has_answered:
                return
            self._has_answered = True
        self._client.key_value_set(f"{self._folder}/{self._process}", answer)

    def _await_end(self) -> int:
        while self.end is None:
            if self._num_processes == 1:
                time.sleep(_TICK_S)  # The thread of the signal is about to set it.
                continue
            texts = [
                read_key(f"{self._folder}/{process}", self._what) or ""
                for process in range(self._num_processes)
            ]
            if _LEFT in texts:
                raise RuntimeError(
                    f"Process {texts.index(_LEFT)} has left the training loop by an error, while "
                    "this one was asked to end it."
                )
            self._settle(texts)
        return self.end

    async def _agree(self) -> None:
        """Waits for a request, answers, and learns the end."""
        request = await self._value("request")
        while (point := self._answer(self, request)) is None:
            await asyncio.sleep(_TICK_S)
        self.answer(point)
        texts = [await self._value(process) for process in range(self._num_processes)]
        if _LEFT not in texts:
            self._settle(texts)

    async def _value(self, name: str | int) -> str:
        # It need not come: unlike in `read_key`, the process does not count as waiting.
        while (value := table.peek(self._client, f"{self._folder}/{name}")) is None:
            await asyncio.sleep(max(_SELDOM_S, self._num_processes / 200))
        return value

    def _settle(self, texts: Iterable[str]) -> None:
        self.answers = list(map(int, texts))
        self.end = max(self.answers)


_NEVER = 2**62
_T = TypeVar("_T")


class Preempted(BaseException):
    """Raised at the point where all processes stop; it is no error."""


class Points:
    """The points of a call at which it may end; of one that nobody can ask to end, none."""

    gives_up: Callable[[], bool] | None = None
    """Says whether to wait no longer for what comes after the next point."""

    def stops_here(self) -> bool:
        """Passes the next point; returns whether all stop there, once they have agreed on one."""
        return False

    def pass_one(self) -> None:
        """Passes the next point; raises Preempted if all processes stop there."""
        if self.stops_here():
            raise Preempted

    def before_each(self, items: Iterable[_T]) -> Iterator[_T]:
        """Yields items, with a point as of `pass_one` before each and one at their end."""
        for item in items:
            self.pass_one()
            yield item
        self.pass_one()


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
        """See `Points`."""
        return self._agreement.stops_here()

    def gives_up(self) -> bool:
        """Returns whether it is known that all processes stop at the next point."""
        end = self._agreement.end
        return end is not None and end <= self._agreement.passed + 1

    def stop(self) -> None:
        """Ends the threads; the other processes need not wait for points of this one."""
        if os.getpid() != self._pid or self._agreement.has_left:
            return
        atexit.unregister(self.stop)
        self._signals.close()
        # After the script of process 0 has ended, the others end theirs.
        point = self._agreement.passed + 1 if jax.process_index() else _NEVER
        self._agreement.leave(point)

    def _ask(self, signum: int) -> None:
        """Asks all processes to stop; runs in the thread that takes signals."""
        if leaving.has_failed_peer():
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


_watch = Slot[Watch | None](lambda: None, close=Watch.stop)
current = _watch.get
"""Returns the watch of this job; None until `start`."""


def start() -> Watch:
    """Begins to take requests as long as the job lives; every process of it must call this."""
    watch = _watch.get()
    if watch is None:
        runtime.init()
        watch = Watch()
        _watch.set(watch)
        # Before the process leaves its job.
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


_numbers = Slot(count)


class SharedStop:
    """The decision of all processes to end one loop of steps; all make them in the same order.

    `ahead` is the number of programs after which every process has seen the request of one that has
    stopped; `is_watched` says, on all processes alike, if one may ask between the steps. It
    surrounds the loop; if that ends without an error, all processes have met since its last step.
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
                what="end of training",
                lost="This process does not answer one that asks for the end of training:",
            )

    def __enter__(self) -> "SharedStop":
        return self

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        if self.agreement is not None and error is None:
            self.agreement.clean()
        elif self.agreement is not None:
            self.agreement.leave(None)

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
        if number == self._request:
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
        if agreement.passed < number:
            return None
        return number if self.is_asked and self._asked_at <= number else number + self._ahead
