"""How a process leaves its job, how the others learn of it, and the last words of each.

A process can end with its script, by `sys.exit`, by an exception or by `tnt_jax.shutdown()`, and
says so in the table of processes, where every process looks. One that waits for a process that has
left would wait indefinitely, so it ends, too, with the code of that process; one that does not
wait, because it writes its results, goes on to its own end.
"""

import asyncio
import atexit
import builtins
import contextlib
import inspect
import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import jax

from tnt_jax import _jax
from tnt_jax.distributed.elastic import link
from tnt_jax.distributed.liveness import table
from tnt_jax.distributed.liveness.phases import describe_wait, here
from tnt_jax.distributed.liveness.table import ExitNotice, LocalPeers
from tnt_jax.distributed.liveness.threads import Watcher, watcher
from tnt_jax.job import Slot
from tnt_jax.job import end_job as end_job_state
from tnt_jax.log import logger
from tnt_jax.settings import LOST_EXIT_CODE, STALLED_EXIT_CODE

# What the errors of collectives say whose peer has gone.
_SIGNS_OF_LOSS = (
    "gloo",
    "connection",
    "lost a neighbour",
    "nccl",
    "socket closed",
    "unavailable",
    "disconnected",
    "has ended or left the job",  # As in `shared_sums/sums.c`.
)


class PeerError(RuntimeError):
    """Another process, of that number, has failed, and this one cannot go on without it."""

    def __init__(self, process: int, text: str) -> None:
        super().__init__(text)
        self.process = process

    def __reduce__(self) -> tuple[Any, ...]:
        """Returns what makes the same error: pickle passes on the text alone."""
        return type(self), (self.process, *self.args)


def gist(error: BaseException) -> str:
    """Returns an error in one line; of one that quotes a traceback, that traceback's last."""
    lines = f"{type(error).__name__}: {error}".strip().splitlines()
    quotes = "Traceback (" in lines[0] or any(line.startswith("Traceback") for line in lines[1:])
    line = lines[-1 if quotes else 0]
    return line if len(line) <= 200 else line[:200] + "..."


def flush() -> None:
    """Writes out what was printed, before the process ends without leaving Python."""
    for stream in (sys.stdout, sys.stderr):
        # Nobody reads it any more, or it was closed.
        with contextlib.suppress(OSError, ValueError):
            stream.flush()


def tells_of_loss(error: BaseException) -> bool:
    """Returns whether an error is that of a collective whose peer has gone."""
    text = str(error).lower()
    # A program that fails while it is started raises a ValueError.
    is_of_collective = isinstance(error, (jax.errors.JaxRuntimeError, ConnectionError)) or (
        isinstance(error, ValueError) and text.startswith(("unknown: gloo", "unavailable: process"))
    )
    return is_of_collective and any(sign in text for sign in _SIGNS_OF_LOSS)


def say(first: str, *others: str) -> None:
    """Prints why this process ends."""
    print("\n".join([f"[tnt_jax] ERROR: {first}", *others]), file=sys.stderr)
    flush()


# Between two questions to the service; large jobs ask less often.
_TICK_S = 0.25
# Until the others have taken note, and how much later those end that end as a consequence: whoever
# watches sees the cause first.
_NOTICE_S, _CONSEQUENCE_DELAY_S = 8.0, 3.0
# How long an error of a collective waits for another process to tell its cause.
_CAUSE_S = 3.0
_REPORT_S = 60.0
# The service knows that a process has disconnected before that process does, which may be waiting
# for a core. The end of the service would abort it until then.
_DISCONNECTION_GRACE_S = 1.0
# A smaller change of the clock ends no job; JAX notices another one within a few seconds.
_LEAST_CHANGE_S, _RECENT_S = 1.0, 30.0
_NO_WATCH = "This process does not notice any more when another one ends:"


def _seconds_ahead() -> float:
    """Returns the time of the machine's clock minus the time that passes whatever it is set to."""
    return time.time() - time.monotonic()


@dataclass
class Membership:
    """A process's part in the job: its own leaving, and what it knows of the others'.

    Attributes:
        disconnects: Whether it, and not whoever made it, closes the connection to the service.
        shut_down_by: Exit code that `shut_down` means, None if unknown, and what calls it.
        unhook: Undoes its hooks in the interpreter.
    """

    client: Any
    process: int
    num_processes: int
    disconnects: bool = True
    shut_down_by: tuple[int | None, str] = (0, "tnt_jax.shutdown()")
    unhook: Callable[[], None] = lambda: None
    _pid: int = field(default_factory=os.getpid)
    # The clock's time less the time that passes, and the last change of that, with its moment.
    _ahead_s: float = field(default_factory=_seconds_ahead)
    _moved: tuple[float, float] = (0.0, 0.0)
    _exit_code: int | None = None
    _exit_text: str = "the end of its script"
    _is_leaving: bool = False
    _is_ending: bool = False
    # The exit code, once it is decided.
    _final_code: int | None = None
    _peers: LocalPeers = field(default_factory=LocalPeers)
    _watcher: Watcher = field(default_factory=watcher.get)
    _watching: Future[None] | None = None
    _waits_for_others: threading.Event = field(default_factory=threading.Event)
    _others: threading.Thread | None = None
    _is_forgotten: bool = False

    def watch(self) -> None:
        """Begins to look for processes that leave; every process must have introduced itself."""
        self._peers = table.local_peers(self.client, self.process)
        self._watching = self._watcher.begin(self._watch(), lost=_NO_WATCH)

    async def _watch(self) -> None:
        while not table.is_awake(self.client):
            await asyncio.sleep(max(_TICK_S, self.num_processes / 200))
            self._clock_change_s()
            self._report_lost()
        waited_s: float = 0
        has_answered = False
        while True:
            await asyncio.sleep(_TICK_S)
            self._end_if_stalled()
            has_answered = has_answered or table.answer_roll(self.client, self.process)
            cause = self._cause()
            place = None if cause is None else describe_wait()
            waited_s = 0 if place is None else waited_s + _TICK_S
            if cause is not None and place is not None and waited_s >= cause.patience_s:
                self._end(cause, f"Process {self.process} waits for it {place}")

    def _report_lost(self) -> None:
        """Reports as lost the processes of this machine that ended without saying so."""
        for process in self._peers.take_ended():
            if process not in (notice.process for notice in self._notices()):
                how = "a call of os._exit, a signal or a crash"
                self._announce(ExitNotice(process, None, how, is_lost=True))

    def _notices(self) -> list[ExitNotice]:
        return table.notices(self.client)

    def _cause(self) -> ExitNotice | None:
        """Returns another process's notice that no other one caused, a failure first; or None."""
        self._report_lost()
        # While this process waits among some processes alone, an orderly end of another is none.
        causes = [
            item
            for item in self._notices()
            if item.process != self.process
            and item.because is None
            and (item.is_failure or item.process in (here().members or [item.process]))
        ]
        return max(causes, key=lambda item: (item.is_failure, -item.process), default=None)

    def has_failed_peer(self) -> bool:
        """Returns whether another process is known to have failed or to be lost."""
        cause = self._cause()
        return cause is not None and cause.is_failure

    def end_job(self, stalled: ExitNotice, service_answers: bool) -> None:
        """Ends all processes because of one without progress; this one if no service answers."""
        if self._is_leaving or self._is_ending:
            return
        if not service_answers:
            self._tell_stalled(stalled)
            os._exit(STALLED_EXIT_CODE)
        if stalled.process not in (notice.process for notice in self._notices()):
            # Every process looks for those that leave, and finds it.
            self._announce(stalled)

    def _end_if_stalled(self) -> None:
        stalled = next((item for item in self._notices() if item.is_stalled), None)
        if stalled is None:
            return
        self._tell_stalled(stalled)
        is_cause = stalled.process == self.process
        if not is_cause:
            how = "could not go on"
            self._announce(ExitNotice(self.process, STALLED_EXIT_CODE, how, stalled.process))
        self._disconnect()
        time.sleep(0 if is_cause else _CONSEQUENCE_DELAY_S)
        os._exit(STALLED_EXIT_CODE)

    def _tell_stalled(self, stalled: ExitNotice) -> None:
        """Says why the job ends; the first process and the cause say all that is known."""
        self._is_ending = True
        self._final_code = STALLED_EXIT_CODE
        is_brief = self.process not in (0, stalled.process)
        first, *others = stalled.how.splitlines()
        say(
            f"{first} The job ends: process {self.process} ends with exit code "
            f"{STALLED_EXIT_CODE}.",
            *([] if is_brief else others),
        )

    def end_without_service(self) -> None:
        """Ends this process if the coordination service is gone or has failed by the clock.

        It is gone if process 0 is. JAX calls this from a thread of its own, before it aborts the
        process.
        """
        if os.getpid() != self._pid:
            return
        moved_s = self._clock_change_s()
        if not moved_s and _jax.coordinator_listens():
            return
        if self._final_code is not None:
            os._exit(self._final_code)
        if not self._is_ending:
            self._is_ending = True
            cause = (
                f"The clock of {socket.gethostname()} was changed by {moved_s:+.0f} s, or the "
                "machine was suspended: JAX's coordination service measures heartbeats by the "
                "clock, and takes processes for dead"
                if moved_s
                else "Process 0 has ended without leaving the job (a call of os._exit, a signal or "
                "a crash)"
            )
            say(
                f"{cause}. Process {self.process} cannot go on without it, and ends with exit code "
                f"{LOST_EXIT_CODE}."
            )
        os._exit(LOST_EXIT_CODE)

    def _clock_change_s(self) -> float:
        """Returns by how much the clock was set in the last half minute; is called regularly."""
        ahead_s, now_s = _seconds_ahead(), time.monotonic()
        if abs(ahead_s - self._ahead_s) > _LEAST_CHANGE_S:
            self._moved = ahead_s - self._ahead_s, now_s
        self._ahead_s = ahead_s
        return self._moved[0] if now_s - self._moved[1] < _RECENT_S else 0.0

    def forget(self) -> None:
        """Leaves a generation of an elastic job, of which processes may be lost."""
        self._is_leaving = self._is_forgotten = True
        self.stop_watching()
        self._waits_for_others.set()
        self.unhook()

    def shut_down(self) -> None:
        """Leaves the job before the end of the script."""
        if not self._is_leaving:
            self.leave(ExitNotice(self.process, *self.shut_down_by))
        self.unhook()

    def remember_exit(self, code: Any) -> None:
        """Takes note of the argument of a `sys.exit` that has ended the interpreter."""
        self._exit_code = code if isinstance(code, int) else int(code is not None)
        self._exit_text = f"sys.exit({code!r})"

    def leave_at_exit(self) -> None:
        """Leaves the job at the end of the interpreter."""
        if os.getpid() != self._pid:
            # A process that os.fork has made shares the connection to the service: to close it
            # would abort the job.
            _jax.skip_cleanup()
            if self._exit_code is not None:
                flush()
                os._exit(self._exit_code)
            return
        self._stay_if_ending()
        if jax.distributed.is_initialized() and not self._is_leaving:
            self.leave(ExitNotice(self.process, self._exit_code, self._exit_text))

    def leave(self, notice: ExitNotice) -> None:
        """Announces that this process leaves, gives the others time to note it, and disconnects."""
        self._is_leaving = True
        self._final_code = notice.code or 0
        self._announce(notice)
        self.stop_watching()
        if not self.disconnects:
            return
        failed = bool(notice.code)
        if self.process == 0:
            # The service runs in this process, and its end would end the others.
            self._wait_for_others(_NOTICE_S if failed else None)
        if failed:
            # What runs in this process may wait for the others, and JAX would wait for it.
            _jax.skip_cleanup()
        elif self.process != 0:
            # A process that waits for this one can say so before the connections are closed.
            deadline = time.monotonic() + _NOTICE_S
            while len(self._notices()) < self.num_processes and time.monotonic() < deadline:
                time.sleep(0.02)
        jax.distributed.shutdown()

    def leave_after(self, thread: threading.Thread) -> None:
        """Leaves the job when a thread that trains, beside others in the process, has ended."""
        if thread is threading.main_thread():
            return

        def leave() -> None:
            thread.join()
            # Its end may be an exception, which the others must not take for success.
            self.shut_down_by = (None, "the end of its training function")
            end_job_state()

        threading.Thread(target=leave, name="tnt_jax-end", daemon=True).start()

    def stop_watching(self) -> None:
        """Ends the looks for others: none must be in a call at the end of the interpreter."""
        if self._watching is not None:
            self._watcher.end(self._watching)

    def report_exception(
        self,
        report: Callable[..., Any],
        kind: type[BaseException],
        error: BaseException,
        trace: TracebackType | None,
    ) -> None:
        """Prints an uncaught exception by `report`, and ends without JAX's wait for the others."""
        if os.getpid() != self._pid or self._is_leaving:
            report(kind, error, trace)
            return
        self._stay_if_ending()
        self.stop_watching()
        cause = None if link() is not None else self._cause_of(error)
        if cause is not None:
            self._end(cause, f"Process {self.process}, which needs it, failed: {gist(error)}")
        self._is_leaving = True
        report(kind, error, trace)
        flush()
        self._final_code = code = 130 if isinstance(error, KeyboardInterrupt) else 1
        self._announce(ExitNotice(self.process, code, gist(error)))
        self._disconnect()
        os._exit(code)

    def _cause_of(self, error: BaseException) -> ExitNotice | None:
        if isinstance(error, PeerError):
            return self._await_notice(error.process)
        if not tells_of_loss(error):
            return None
        table.call_roll(self.client, self.process)
        began = time.monotonic()
        while (waited_s := time.monotonic() - began) < table.ANSWER_TIMEOUT_S:
            cause = self._cause()
            if cause is not None or (waited_s > _CAUSE_S and not self._missing()):
                return cause
            time.sleep(_TICK_S)
        for process in self._missing():
            how = "it does not answer, and a connection broke"
            self._announce(ExitNotice(process, None, how, is_lost=True))
        return self._cause()

    def _await_notice(self, process: int) -> ExitNotice | None:
        """Returns how a process has failed, so that it ends first; None if it does not soon."""
        for _ in range(round(_CAUSE_S / _TICK_S)):
            for item in self._notices():
                if item.process == process and item.is_failure:
                    return item
            time.sleep(_TICK_S)
        return None

    def _missing(self) -> set[int]:
        left = {notice.process for notice in self._notices()}
        silent = table.unanswered(self.client, self.num_processes)
        return silent - left - self._peers.running()

    def _end(self, cause: ExitNotice, consequence: str) -> None:
        """Ends this process, which cannot go on without the one that left."""
        self._is_ending = True
        self._final_code = code = cause.code_of_others
        left = "has ended without leaving the job" if cause.is_lost else "has left the job"
        say(
            f"Process {cause.process} {left} ({cause.how}). {consequence}, and ends with exit code "
            f"{code}."
        )
        self._announce(ExitNotice(self.process, code, "could not go on", because=cause.process))
        self._disconnect()
        time.sleep(_CONSEQUENCE_DELAY_S)
        os._exit(code)

    def _disconnect(self) -> None:
        """Leaves the coordination service; process 0 leaves after all others."""
        if self.process == 0:
            # The end of the service aborts every process that is still connected.
            self._wait_for_others(_NOTICE_S)
            time.sleep(_DISCONNECTION_GRACE_S)
        else:
            with contextlib.suppress(jax.errors.JaxRuntimeError):  # It has ended.
                self.client.shutdown()

    def _stay_if_ending(self) -> None:
        """Waits for the end that another thread has begun, with its exit code."""
        while self._is_ending:
            time.sleep(_CONSEQUENCE_DELAY_S)

    def _announce(self, notice: ExitNotice) -> None:
        table.post_notice(self.client, self.process, notice)

    def _wait_for_others(self, timeout_s: float | None) -> None:
        """Waits until all other processes have disconnected or are lost."""
        others = self._others
        assert others is not None
        self._waits_for_others.set()
        began = reported = time.monotonic()
        while others.is_alive() and (timeout_s is None or time.monotonic() - began < timeout_s):
            others.join(_TICK_S)
            self._report_lost()
            gone = {notice.process: notice for notice in self._notices()}
            there = [process for process in range(self.num_processes) if process not in gone]
            if not there and any(notice.is_lost for notice in gone.values()):
                break
            if there and time.monotonic() - reported > _REPORT_S:
                reported = time.monotonic()
                logger.warning(
                    "Process 0 has ended its script and waits for the end of process %s.",
                    ", ".join(map(str, there)),
                )
        waiting = [
            str(notice.process) for notice in self._notices() if notice.because == self.process
        ]
        if waiting and timeout_s is None:
            logger.warning(
                "Process 0 has left the job while process %s waited for it.", ", ".join(waiting)
            )

    def start_waiter(self) -> None:
        """Starts the thread that waits for the others at the end, when Python 3.12 starts none."""
        self._others = threading.Thread(
            target=self._await_disconnection, name="tnt_jax-others", daemon=True
        )
        self._others.start()

    def _await_disconnection(self) -> None:
        self._waits_for_others.wait()
        if self._is_forgotten:
            return
        with contextlib.suppress(jax.errors.JaxRuntimeError):  # One of them was lost.
            _jax.await_disconnection(self.client, self.num_processes)


_membership = Slot[Membership | None](lambda: None, close=Membership.shut_down)


def introduce(process: int, num_processes: int, *, disconnects: bool = True) -> Membership:
    """Makes the end of this process, whatever its cause, known to the job that it has just joined.

    The returned membership watches the others once all have introduced themselves. `disconnects`
    says whether this process closes JAX's connection when it leaves.
    """
    own = Membership(_jax.coordination_client(), process, num_processes, disconnects)
    table.post_pid(own.client, process)
    if process == 0:
        own.start_waiter()
    own.unhook = _hook_in(own)
    _membership.set(own)
    return own


class _Exit(SystemExit):
    """What `sys.exit` raises: the job learns its code if it ends the interpreter."""

    def __getattribute__(self, name: str) -> Any:
        value = super().__getattribute__(name)
        own, frame = _membership.get(), inspect.currentframe()
        # Once no code has caught it, Python asks for the code without a frame of any function.
        if name == "code" and own and frame and frame.f_back is None:
            own.remember_exit(value)
        return value


def _hook_in(own: Membership) -> Callable[[], None]:
    """Lets a membership see how the interpreter ends, and returns what undoes that."""
    report = sys.excepthook
    leave = sys.exit

    def report_exception(kind: Any, error: Any, trace: Any) -> None:
        own.report_exception(report, kind, error, trace)

    def exit_noted(status: Any = None, /) -> None:
        try:
            leave(status)
        except SystemExit as error:
            raise _Exit(*error.args) from None

    hooks = [(sys, "excepthook", report_exception), (sys, "exit", exit_noted)]
    # They raise SystemExit themselves.
    hooks += [(builtins, name, exit_noted) for name in ("exit", "quit") if hasattr(builtins, name)]
    originals = [getattr(owner, name) for owner, name, _ in hooks]
    for owner, name, hook in hooks:
        setattr(owner, name, hook)
    # In an elastic job `_jax.stop_threads_that_fail` prevents aborts.
    aborts_again = _jax.before_abort(own.end_without_service) if link() is None else lambda: None
    # Once Python has ended, a function of Python cannot be called.
    atexit.register(aborts_again)
    # Runs before JAX's own, which was registered earlier.
    atexit.register(own.leave_at_exit)

    def undo() -> None:
        atexit.unregister(own.leave_at_exit)
        atexit.unregister(aborts_again)
        aborts_again()
        for (owner, name, hook), original in zip(hooks, originals, strict=True):
            # Another library may have put its own hook around this one.
            if getattr(owner, name) is hook:
                setattr(owner, name, original)

    return undo


def forget_generation() -> None:
    """Lets this process leave its generation without a word: it goes on with other processes."""
    if (own := _membership.get()) is not None:
        own.forget()
        _membership.set(None)


def end_job(stalled: ExitNotice, service_answers: bool) -> None:
    """Ends all processes of the job because of one; see `Membership.end_job`."""
    if (own := _membership.get()) is not None:
        own.end_job(stalled, service_answers)


def has_failed_peer() -> bool:
    """Returns whether another process of the job is known to have failed or to be lost."""
    own = _membership.get()
    return own is not None and own.has_failed_peer()
