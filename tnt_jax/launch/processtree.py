"""Linux calls that keep a job's processes together, and find their descendants."""

import contextlib
import ctypes
import os
import signal
import time
from collections.abc import Iterable
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_libc = ctypes.CDLL(None, use_errno=True)


def adopt_orphans() -> None:
    """Makes this process the parent of all descendants whose own parent ends.

    This way `descendants` finds all of them.
    """
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def leave_orphans() -> None:
    """Reverts `adopt_orphans`.

    A program that replaces this process would not wait for orphans.
    """
    _prctl(_PR_SET_CHILD_SUBREAPER, 0)


def die_with_parent() -> None:
    """Has the kernel kill this process when the thread that started it ends.

    Call it between fork and exec.
    """
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _prctl(option: int, value: int) -> None:
    if _libc.prctl(option, value, 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"prctl({option}): {os.strerror(number)}")


def descendants(pid: int) -> list[int]:
    """Returns the ids of the children of `pid`, their children and so on, without zombies."""
    children: dict[int, list[int]] = {}
    for child, parent, state in _all_processes():
        if state not in "ZX":
            children.setdefault(parent, []).append(child)
    found: list[int] = []
    frontier = [pid]
    while frontier:
        frontier = [child for parent in frontier for child in children.get(parent, [])]
        found += frontier
    return found


def processes_with(variable: str) -> list[tuple[int, str]]:
    """Returns (process id, value) of this user's processes with an environment variable.

    They were started with the variable set.
    """
    prefix = f"{variable}=".encode()
    found = []
    for pid, _, state in _all_processes():
        if state in "ZX":
            continue
        try:
            environment = Path(f"/proc/{pid}/environ").read_bytes()
        except (PermissionError, FileNotFoundError, ProcessLookupError):
            continue  # It belongs to another user, or has ended.
        found += [
            (pid, entry[len(prefix) :].decode())
            for entry in environment.split(b"\0")
            if entry.startswith(prefix)
        ]
    return found


def send_signal(pids: Iterable[int], signum: int) -> None:
    """Sends a signal to each process, ignoring those that have ended."""
    for pid in pids:
        try:
            os.kill(pid, signum)
        except ProcessLookupError:
            continue


def is_handled(pid: int, signum: int) -> bool:
    """Returns whether a process has a handler for a signal."""
    try:
        status = Path(f"/proc/{pid}/status").read_text(errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return False
    caught = next(line.split()[1] for line in status.splitlines() if line.startswith("SigCgt:"))
    return bool(int(caught, 16) >> (signum - 1) & 1)


def kill_descendants(pid: int, *, patience_s: float = 5.0) -> list[int]:
    """Kills all descendants of `pid` and returns those still there after `patience_s` seconds.

    A process can start another while it is being killed, and a process in an uninterruptible system
    call dies late, so the list is read again until it is empty.
    """
    deadline = time.monotonic() + patience_s
    while (left := descendants(pid)) and time.monotonic() < deadline:
        send_signal(left, signal.SIGKILL)
        time.sleep(0.02)
    return left


def count_memory_kills() -> int:
    """Returns how many processes the kernel of this machine has killed for lack of memory so far.

    It counts those that went over the limit of a control group, too.
    """
    lines = Path("/proc/vmstat").read_text().splitlines()
    return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), 0)


def reap_orphans() -> None:
    """Takes note of the end of adopted processes, which the kernel would list for ever otherwise.

    Call it while this process has no children of its own: they would seem to be orphans.
    """
    # ChildProcessError: there is none.
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            continue


def _all_processes() -> list[tuple[int, int, str]]:
    """Returns (process id, parent's id, state letter) of every process."""
    found = []
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        try:
            stat = Path(f"/proc/{name}/stat").read_text(errors="replace")
        except (FileNotFoundError, ProcessLookupError):
            continue
        # The command name is in parentheses and may itself contain spaces and parentheses.
        state, parent = stat.rpartition(")")[2].split()[:2]
        found.append((int(name), int(parent), state))
    return found


_PATIENCE_S = 5.0


def list_jobs() -> dict[str, list[str]]:
    """Returns the commands of this user's running processes by the id of their job."""
    jobs: dict[str, list[str]] = {}
    for pid, job_id in processes_with("TNT_JOB_ID"):
        jobs.setdefault(job_id, []).append(f"{pid} {_command(pid)}")
    return jobs


def end_job(job_id: str, *, force: bool) -> tuple[int, list[str]]:
    """Asks all processes of a job to end, or kills them.

    Args:
        job_id: Id of the job, which stands for all its attempts, or of one attempt.
        force: Whether to kill.

    Returns:
        Number of processes found, and those still running after five seconds.
    """
    found = _processes_of(job_id)
    deadline = time.monotonic() + _PATIENCE_S
    send_signal(found, signal.SIGKILL if force else signal.SIGTERM)
    while (left := _processes_of(job_id)) and time.monotonic() < deadline:
        if force:
            # A process may start another while it is being killed.
            send_signal(left, signal.SIGKILL)
        time.sleep(0.05)
    return len(found), [f"{pid} {_command(pid)}" for pid in left]


def _processes_of(job_id: str) -> list[int]:
    return [
        pid
        for pid, found in processes_with("TNT_JOB_ID")
        if (found == job_id or found.startswith(f"{job_id}.")) and pid != os.getpid()
    ]


def _command(pid: int) -> str:
    try:
        return (
            Path(f"/proc/{pid}/cmdline")
            .read_bytes()
            .replace(b"\0", b" ")
            .decode(errors="replace")
            .strip()
        )
    except (FileNotFoundError, ProcessLookupError):
        return "(has ended)"
