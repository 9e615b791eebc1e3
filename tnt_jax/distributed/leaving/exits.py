"""Reports to the job how this process ends.

A process can end with its script, by `sys.exit`, by an exception or by `tnt_jax.shutdown()`.
"""

import atexit
import builtins
import sys
import threading
from collections.abc import Callable
from typing import Any

from tnt_jax import _jax
from tnt_jax.distributed.leaving.membership import Membership
from tnt_jax.distributed.liveness.causes import Cause
from tnt_jax.job import Slot
from tnt_jax.job import end_job as end_job_state


def _leave(joined: tuple[Membership, Callable[[], None]] | None) -> None:
    """Leaves the job, if this process was introduced to one, at `tnt_jax.shutdown()`."""
    if joined is None:
        return
    membership, unhook = joined
    membership.shut_down()
    unhook()


# With what undoes its hooks in the interpreter.
_membership = Slot[tuple[Membership, Callable[[], None]] | None](lambda: None, close=_leave)


def introduce(process: int, num_processes: int, *, disconnects: bool = True) -> None:
    """Makes the end of this process, whatever its cause, known to the job that it has just joined.

    Args:
        process: Number of this process.
        num_processes: Processes of the job.
        disconnects: Whether it also closes JAX's connection when it leaves.
    """
    own = Membership(_jax.coordination_client(), process, num_processes, disconnects)
    own.introduce()
    _membership.set((own, _hook_in(own)))


def _hook_in(own: Membership) -> Callable[[], None]:
    """Lets a membership see how the interpreter ends, and returns what undoes that."""
    report = sys.excepthook
    leave = sys.exit

    def report_exception(kind: Any, error: Any, trace: Any) -> None:
        own.report_exception(report, kind, error, trace)

    def remember_and_exit(status: Any = None, /) -> None:
        own.remember_exit(status)
        leave(status)

    hooks = [(sys, "excepthook", report_exception), (sys, "exit", remember_and_exit)]
    # They raise SystemExit themselves.
    hooks += [
        (builtins, name, remember_and_exit) for name in ("exit", "quit") if hasattr(builtins, name)
    ]
    originals = [getattr(owner, name) for owner, name, _ in hooks]
    for owner, name, hook in hooks:
        setattr(owner, name, hook)
    aborts_again = _jax.before_abort(own.end_without_service)
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


def end_job(cause: Cause, service_answers: bool) -> None:
    """Ends all processes of the job because of one; see `Membership.end_job`.

    Args:
        cause: The process, and why.
        service_answers: Whether the coordination service does.
    """
    if (joined := _membership.get()) is not None:
        joined[0].end_job(cause, service_answers)


def leave_after(thread: threading.Thread, what: str) -> None:
    """Leaves the job when a thread has ended, in whose process other work goes on.

    Args:
        thread: The thread that trains.
        what: Its end, in words.
    """
    if thread is threading.main_thread() or (joined := _membership.get()) is None:
        return
    membership = joined[0]

    def leave() -> None:
        thread.join()
        # Its end may be an exception, which the others must not take for success.
        membership.shut_down_by = (None, what)
        end_job_state()

    threading.Thread(target=leave, name="tnt_jax-end", daemon=True).start()


def has_failed_peer() -> bool:
    """Returns whether another process of the job is known to have failed or to be lost."""
    joined = _membership.get()
    return joined is not None and joined[0].has_failed_peer()


def watch() -> None:
    """Begins to look for processes that leave; every process must have introduced itself."""
    joined = _membership.get()
    assert joined is not None, "introduce() comes first."
    joined[0].watch()
