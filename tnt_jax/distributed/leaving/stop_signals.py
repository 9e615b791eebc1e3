"""The signals that ask a process to save its state and end: SIGTERM, SIGUSR1 and SIGUSR2.

Python runs the handler of a signal in the main thread between two bytecodes, so a process that
waits for others or compiles would not take note of it. The byte that Python's own handler in C
writes to a pipe wakes a thread at once, whatever the main thread does.
"""

import contextlib
import os
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

from tnt_jax.distributed.liveness.threads import start_thread
from tnt_jax.log import logger

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
# A cluster may send a signal to the launcher and to its processes, which then get it twice.
_SAME_S = 2.0
_END = 0
# Marks the bytes that `StopSignals._handle` writes.
_REPORTED = 0x80
_NO_SIGNALS = "Signals to this process do not save its state any more:"


class StopSignals:
    """Calls a function, in a thread, with the first of the signals; the second ends at once.

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
        os.register_at_fork(after_in_child=lambda: _forget(own()))

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
        if self._previous and (other := self._set_wakeup(self._write_fd)) != -1:
            self._set_wakeup(other)

    def restore(self) -> None:
        """Gives the signals back, except those that have been taken from it since."""
        if threading.current_thread() is not threading.main_thread():
            return
        for signum, handler in self._previous.items():
            if signal.getsignal(signum) == self._handle:
                signal.signal(signum, handler)
        self._previous.clear()
        if (current := self._set_wakeup(-1)) != self._write_fd:
            self._set_wakeup(current)

    def close(self) -> None:
        """Gives the signals back and ends the thread."""
        self.restore()
        os.write(self._write_fd, bytes([_END]))
        self._thread.join()
        os.close(self._read_fd)
        os.close(self._write_fd)

    def _handle(self, signum: int, frame: Any) -> None:
        """Reports a signal of which the thread has not been told.

        Its byte has gone to another's pipe, such as that of an event loop, or a handler of the
        script calls this one.
        """
        current = self._set_wakeup(-1)
        self._set_wakeup(current)
        if current != self._write_fd or signal.getsignal(signum) != self._handle:
            with contextlib.suppress(BlockingIOError):  # Full of signals already.
                os.write(self._write_fd, bytes([signum | _REPORTED]))

    def _set_wakeup(self, descriptor: int) -> int:
        return signal.set_wakeup_fd(descriptor, warn_on_full_buffer=False)

    def _listen(self) -> None:
        while True:
            for byte in os.read(self._read_fd, 64):
                if byte == _END:
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


def _forget(parent: StopSignals | None) -> None:
    """Lets a process that os.fork has made, such as one that loads data, take signals as before.

    It shares the pipe: a signal to it would count as one to its parent.
    """
    if parent is not None:
        parent.restore()
