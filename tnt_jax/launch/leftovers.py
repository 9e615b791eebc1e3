"""Finds and ends the processes that a job left on this host, by the job's id."""

import os
import signal
import time
from pathlib import Path

from tnt_jax.launch.processtree import processes_with, send_signal

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
