"""Linux calls that keep a job's processes together, and find their descendants."""

import contextlib
import ctypes
import os
import re
import signal
import time
from collections.abc import Callable, Iterable
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_PATIENCE_S = 5.0
_libc = ctypes.CDLL(None, use_errno=True)


def adopt_orphans() -> None:
    """Makes this process the parent of all descendants whose own parent ends, to find them all."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def leave_orphans() -> None:
    """Reverts `adopt_orphans`: a program that replaces this process would not wait for orphans."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 0)


def die_with_parent() -> None:
    """Has the kernel kill this process, between fork and exec, when the thread that forked ends."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _prctl(option: int, value: int) -> None:
    if _libc.prctl(option, value, 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"prctl({option}): {os.strerror(number)}")


def descendants(pid: int) -> list[int]:
    """Returns the ids of the children of `pid`, their children and so on, without zombies."""
    children: dict[int, list[int]] = {}
    for child, parent in _all_processes():
        children.setdefault(parent, []).append(child)
    found: list[int] = []
    frontier = [pid]
    while frontier:
        frontier = [child for parent in frontier for child in children.get(parent, [])]
        found += frontier
    return found


def orphans_of_group(group: int) -> list[int]:
    """Returns the processes of a process group that this process has adopted."""
    own = os.getpid()
    return [pid for pid, parent in _all_processes() if parent == own and os.getpgid(pid) == group]


def processes_of_jobs() -> list[tuple[int, str]]:
    """Returns (process id, id of the job) of this user's processes that belong to one."""
    prefix = b"TNT_JOB_ID="
    return [
        (pid, entry[len(prefix) :].decode())
        for pid, _ in _all_processes()
        for entry in _read(pid, "environ").split(b"\0")
        if entry.startswith(prefix)
    ]


def send_signal(pids: Iterable[int], signum: int) -> None:
    """Sends a signal to each process, ignoring those that have ended."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signum)


def is_handled(pid: int, signum: int) -> bool:
    """Returns whether a process has a handler for a signal."""
    caught = re.search(rb"^SigCgt:\s*(\w+)", _read(pid, "status"), re.MULTILINE)
    return caught is not None and bool(int(caught[1], 16) >> (signum - 1) & 1)


def kill_descendants(pid: int) -> list[int]:
    """Kills all descendants of `pid` and returns those still there after five seconds."""
    return _await_end(lambda: descendants(pid), kill=True)


def _await_end(find: Callable[[], list[int]], *, kill: bool) -> list[int]:
    """Waits until no process is found, and returns those still there after five seconds."""
    # A process can start another while it is being killed, and a process in an uninterruptible
    # system call dies late, so the list is read again until it is empty.
    deadline = time.monotonic() + _PATIENCE_S
    while (left := find()) and time.monotonic() < deadline:
        if kill:
            send_signal(left, signal.SIGKILL)
        time.sleep(0.02)
    return left


def count_memory_kills() -> int:
    """Returns how many processes this machine's kernel has killed for lack of memory so far."""
    # It counts those that went over the limit of a control group, too.
    lines = Path("/proc/vmstat").read_text().splitlines()
    return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), 0)


def reap_orphans() -> None:
    """Takes note of the end of adopted processes, which the kernel would list for ever otherwise.

    Call it while this process has no children of its own: they would seem to be orphans.
    """
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            continue


def _all_processes() -> list[tuple[int, int]]:
    """Returns (process id, parent's id) of every process, without zombies."""
    found = []
    for pid in map(int, filter(str.isdigit, os.listdir("/proc"))):
        # The command name is in parentheses and may itself contain spaces and parentheses.
        words = _read(pid, "stat").rpartition(b")")[2].split()
        if words and words[0] not in b"ZX":
            found.append((pid, int(words[1])))
    return found


def _read(pid: int, name: str) -> bytes:
    """Returns what /proc tells of a process; nothing if it has ended, or is another user's."""
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes()
    except (PermissionError, FileNotFoundError, ProcessLookupError):
        return b""


def list_jobs() -> dict[str, list[str]]:
    """Returns the commands of this user's running processes by the id of their job."""
    jobs: dict[str, list[str]] = {}
    for pid, job_id in processes_of_jobs():
        jobs.setdefault(job_id, []).append(f"{pid} {_command(pid)}")
    return jobs


def end_job(job_id: str, *, force: bool) -> tuple[int, list[str]]:
    """Asks all processes of a job, or of one attempt of it, to end, or kills them.

    Returns the number of processes found, and those still running after five seconds.
    """
    found = _processes_of(job_id)
    send_signal(found, signal.SIGKILL if force else signal.SIGTERM)
    left = _await_end(lambda: _processes_of(job_id), kill=force)
    return len(found), [f"{pid} {_command(pid)}" for pid in left]


def _processes_of(job_id: str) -> list[int]:
    return [
        pid
        for pid, found in processes_of_jobs()
        if (found == job_id or found.startswith(f"{job_id}.")) and pid != os.getpid()
    ]


def _command(pid: int) -> str:
    words = _read(pid, "cmdline").replace(b"\0", b" ")
    return words.decode(errors="replace").strip() or "(has ended)"


def hangup() -> list[int]:
    """Returns SIGHUP as a signal to catch, unless nohup has this program ignore it."""
    is_ignored = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    return [] if is_ignored else [signal.SIGHUP]


def catch_signals(
    caught: Iterable[int], ignored: Iterable[int] = ()
) -> tuple[int, Callable[[], None]]:
    """Has signals written to a pipe instead of ending this process, and ignores others.

    Returns the end of the pipe to read, and a function that restores everything; it passes signals
    that nobody has read on to the handlers from before.
    """
    read_fd, write_fd = os.pipe()
    for descriptor in (read_fd, write_fd):
        os.set_blocking(descriptor, False)
    previous_fd = signal.set_wakeup_fd(write_fd, warn_on_full_buffer=False)
    previous = {signum: signal.signal(signum, lambda signum, frame: None) for signum in caught}
    previous |= {signum: signal.signal(signum, signal.SIG_IGN) for signum in ignored}

    def restore() -> None:
        for signum, handler in previous.items():
            signal.signal(signum, handler)
        signal.set_wakeup_fd(previous_fd)
        with contextlib.suppress(BlockingIOError):
            for signum in os.read(read_fd, 64):
                signal.raise_signal(signum)
        os.close(read_fd)
        os.close(write_fd)

    return read_fd, restore
