"""Starts a job again after a failure, on the hosts that are left, and cleans up after jobs."""

import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from types import FrameType

from tnt_jax.launch.planning.hostfile import HostEntry
from tnt_jax.launch.planning.options import Options
from tnt_jax.launch.processtree import reap_orphans
from tnt_jax.launch.remote.screen import say
from tnt_jax.launch.remote.session import HostError
from tnt_jax.launch.run import (
    Attempt,
    Ending,
    job_hosts,
    new_job_id,
    open_session,
    run_attempt,
    taking_hosts,
)
from tnt_jax.settings import PREEMPTED_EXIT_CODE

LONGEST_DELAY_S = 60.0
"""The longest delay before a restart; an attempt that ran longer begins the delays anew."""
ABANDONED_HOST_S = 8.0
"""The shortest delay after the loss of a host, which needs this long to end its own processes.

It notices one second later than the launcher at most, gives its processes five seconds, and kills
them.
"""
_NEVER_AGAIN = (0, 128 + signal.SIGINT)

Run = Callable[[Attempt], Ending]


def clean_up(options: Options, environ: Mapping[str, str]) -> int:
    """Ends the processes of the job `options.cleanup`, or lists jobs; returns 1 if any are left."""
    with open_session(job_hosts(options, environ), options) as session:
        if not options.cleanup:
            print(_describe(session.ask("list_jobs", {})))
            return 0
        arguments = {"job_id": options.cleanup, "force": options.force}
        answers = session.ask("end_job", arguments)
    for host, (found, left) in answers.items():
        print(f"{host}: {found - len(left)} of {found} process(es) ended")
        for process in left:
            print(f"  still there: {process}" + ("" if options.force else " (--force kills it)"))
    return int(any(left for _, left in answers.values()))


def _describe(jobs_by_host: dict[str, dict[str, list[str]]]) -> str:
    lines = []
    for host, jobs in jobs_by_host.items():
        for job_id, processes in jobs.items():
            lines.append(f"{host}: job {job_id}")
            lines += [f"  {process}" for process in processes]
    return "\n".join(lines) or "No process of a job is running."


class _Signalled(BaseException):
    """Raised where a signal to the launcher arrives while no process of the job runs."""


def run_with_restarts(options: Options, environ: Mapping[str, str]) -> int:
    """Runs a job, starts it again after failures, and returns the exit code of the last attempt.

    The launcher does not know how far a job has come: the script itself goes on from its last
    checkpoint. `max_restarts` limits the restarts; starts that found too few hosts count.

    Returns:
        The exit code of the last attempt that ran (`Session.run`); 75 if a signal came between two
        attempts.

    Raises:
        ValueError, FileNotFoundError, HostError: As `run_attempt` at the first start.
        KeyboardInterrupt: At Ctrl-C between two attempts.
    """
    run = partial(run_attempt, options=options, environ=environ)
    with taking_hosts(options, environ) as read_hosts:
        first = Attempt(new_job_id(options.script_name), read_hosts())
        if not options.max_restarts:
            return run_on_hosts_left(first, options.min_hosts, run).code
        try:
            with _raising_on_signals():
                return _repeat(first, options, run, read_hosts)
        except _Signalled:
            say("Ended by a signal before a restart.")
            return PREEMPTED_EXIT_CODE


def _repeat(
    attempt: Attempt, options: Options, run: Run, read_hosts: Callable[[], list[HostEntry]]
) -> int:
    began_at = time.monotonic()
    ending = run_on_hosts_left(attempt, options.min_hosts, run)
    code, in_a_row = ending.code, 0
    while ending.code not in _NEVER_AGAIN and not ending.was_signalled:
        if attempt.restart_count == options.max_restarts:
            say(f"The job has failed after {options.max_restarts} restart(s).")
            return code
        in_a_row = 0 if time.monotonic() - began_at > LONGEST_DELAY_S else in_a_row
        delay_s = delay_before_restart(in_a_row, has_lost_hosts=bool(ending.silent_hosts))
        in_a_row += 1
        attempt = replace(attempt, restart_count=attempt.restart_count + 1)
        moment = time.strftime("%H:%M:%S", time.localtime(time.time() + delay_s))
        say(
            f"Restart {attempt.restart_count} of {options.max_restarts} follows in {delay_s:g} s, "
            f"at {moment}. Cause: {ending.because}"
        )
        time.sleep(delay_s)
        reap_orphans()
        began_at = time.monotonic()
        try:
            attempt = replace(attempt, entries=read_hosts())
            ending = run_on_hosts_left(attempt, options.min_hosts, run)
            code = ending.code
        except (HostError, ValueError, OSError) as error:
            say(f"Restart {attempt.restart_count} has not started: {error}")
            ending = Ending(code, because="it could not start")
    return ending.code


def delay_before_restart(in_a_row: int, *, has_lost_hosts: bool) -> float:
    """Returns the seconds to wait: 1, 2, 4 and so on up to a minute, longer after lost hosts.

    `in_a_row` are the restarts just before this one whose attempt ran for less than a minute.
    """
    delay_s = min(LONGEST_DELAY_S, 2.0 ** min(in_a_row, 10))
    return max(delay_s, ABANDONED_HOST_S) if has_lost_hosts else delay_s


def run_on_hosts_left(attempt: Attempt, min_hosts: int | None, run: Run) -> Ending:
    """Runs an attempt without the hosts that cannot take part, as long as enough are left.

    At least `min_hosts` must be left, or all if that is None; else a `HostError` names those that
    were left out.
    """
    fewest = len(attempt.entries) if min_hosts is None else min_hosts
    if fewest > len(attempt.entries):
        raise ValueError(
            f"--min-hosts ({fewest}) must not be above the number of hosts, which is "
            f"{len(attempt.entries)}."
        )
    reasons: dict[str, str] = {}
    while True:
        entries = [entry for entry in attempt.entries if entry.name not in reasons]
        try:
            return run(replace(attempt, entries=entries, left_out=dict(reasons)))
        except HostError as error:
            if not set(error.reasons) - set(reasons):
                raise
            reasons.update(error.reasons)
            if len(attempt.entries) - len(reasons) < fewest:
                raise HostError(reasons) from error


@contextmanager
def _raising_on_signals() -> Iterator[None]:
    """Ends the launcher at a signal that comes while no session handles signals."""

    def end(signum: int, frame: FrameType | None) -> None:
        raise _Signalled

    taken = [signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2]
    previous = {signum: signal.signal(signum, end) for signum in taken}
    # Also where the launcher was started with SIGINT ignored: sessions handle it there, too.
    previous[signal.SIGINT] = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        for signum, handler in previous.items():
            signal.signal(signum, handler)
