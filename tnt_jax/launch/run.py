"""Runs a job: connects to the hosts, gathers facts, plans, starts and waits.

After a failure it starts the job again, on the hosts that are left. It cleans up after jobs, too.
"""

import logging
import os
import re
import secrets
import shlex
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import FrameType

from tnt_jax.cluster.clusters import Job
from tnt_jax.launch.planning.facts import (
    Facts,
    choose_address,
    find_missing_caches,
    find_obstacles,
    find_remedy,
    find_unreachable,
    share_machine,
)
from tnt_jax.launch.planning.options import Options
from tnt_jax.launch.planning.plan import (
    SECRET,
    Host,
    Launch,
    Process,
    carried_environment,
    choose_devices,
    plan_processes,
)
from tnt_jax.launch.processtree import hangup, reap_orphans
from tnt_jax.launch.remote.connection import (
    Connection,
    srun_command,
    ssh_command,
    supervisor_command,
)
from tnt_jax.launch.remote.hosts import HostEntry, job_hosts, taking_hosts
from tnt_jax.launch.remote.screen import say
from tnt_jax.launch.remote.session import Ending, HostError, Session, Write
from tnt_jax.settings import PREEMPTED_EXIT_CODE

_END_TIMEOUT_S = 10.0
# Seconds after which a silent process of an elastic job is lost, unless TNT_HEARTBEAT_TIMEOUT_S is
# set: threads of a busy machine wait for some.
_SILENCE_S = 15
_SECRET_BYTES = 32
LONGEST_DELAY_S = 60.0
"""The longest delay before a restart; an attempt that ran longer begins the delays anew."""
ABANDONED_HOST_S = 8.0
"""The shortest delay after the loss of a host, which ends its processes within this time."""
# It notices one second later than the launcher at most, and kills them after five seconds.
_NEVER_AGAIN = (0, 128 + signal.SIGINT)
_logger = logging.getLogger("tnt_jax.launch")


@dataclass(frozen=True)
class Attempt:
    """One start of a job: `left_out` has the reason for each host that cannot take part."""

    job_id: str
    entries: Sequence[HostEntry]
    restart_count: int = 0
    left_out: Mapping[str, str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The id that marks the processes of this attempt."""
        return f"{self.job_id}.{self.restart_count}" if self.restart_count else self.job_id


def run_attempt(
    attempt: Attempt,
    options: Options,
    environ: Mapping[str, str],
    part: Job | None = None,
    *,
    write: Write | None = None,
    timeout_s: float | None = None,
) -> Ending:
    """Starts the script on all devices of the hosts, waits for it, and returns how it ended.

    `part` is the position of this launcher among several that a cluster has started for one job;
    None if it is the only one. Output and time limit are as of `Session.run`. Raises a ValueError
    if the options do not fit the hosts, a FileNotFoundError if a program that an option needs does
    not exist, and a `HostError`, which names hosts with reasons, if they cannot take part.
    """
    entries = attempt.entries
    launched_at, began = time.time(), time.monotonic()
    with open_session(entries, options) as session:
        facts = ask_facts(session, options, environ)
        if attempt.restart_count:
            _end_earlier_attempts(session, attempt)
        began = _end_phase("connecting to the hosts", began)
        hosts = hosts_of(entries, facts)
        check(find_obstacles(facts))
        devices = choose_devices(hosts, options)
        missing_caches = find_missing_caches(facts) if options.compilation_cache else []
        for warning in [*devices.warnings, *missing_caches]:
            _logger.warning(warning)
        if part:
            address = part.coordinator_address
        else:
            address = find_coordinator_address(session, hosts, options, devices.kind)
        launch = Launch(
            job_id=attempt.name,
            restart_count=attempt.restart_count,
            coordinator_address=address,
            cwd=working_directory(environ),
            environ=environ,
            launched_at=launched_at,
            terminals=tuple(
                stream.name[1:-1] for stream in (sys.stdout, sys.stderr) if stream.isatty()
            ),
            columns=shutil.get_terminal_size().columns,
            num_parts=part.num_processes if part else 1,
            part=part.process_id if part else 0,
            # Launchers that a cluster has started cannot agree on one.
            secret="" if part else secrets.token_hex(_SECRET_BYTES),
        )
        processes = plan_processes(hosts, devices, options, launch)
        at_least = _fewest_processes(options, len(processes))
        _end_phase("planning", began)
        if options.dry_run:
            print(_describe_plan(processes, launch))
            return Ending(0)
        _logger.info(
            "Job %s: %d process(es) on %d host(s).", launch.job_id, len(processes), len(hosts)
        )
        if attempt.restart_count and session.has_passed_on:
            return Ending(PREEMPTED_EXIT_CODE, was_signalled=True)
        _say_where(attempt)
        return session.run(
            processes,
            write=write,
            timeout_s=timeout_s,
            at_least=at_least,
            silence_s=int(environ.get("TNT_HEARTBEAT_TIMEOUT_S") or _SILENCE_S),
        )


def _fewest_processes(options: Options, planned: int) -> int | None:
    fewest = options.min_processes or 1
    if options.elastic and fewest > planned:
        raise ValueError(
            f"--min-processes ({fewest}) must not be above the number of processes, which is "
            f"{planned}."
        )
    return fewest if options.elastic else None


def _say_where(attempt: Attempt) -> None:
    for host, reason in attempt.left_out.items():
        say(f"Without {host}: {reason}")
    if attempt.restart_count:
        names = ", ".join(entry.name for entry in attempt.entries)
        say(f"Restart {attempt.restart_count} starts on {names}.")


def _end_phase(name: str, began: float) -> float:
    """Logs how long a phase of the start took; returns when it ended, by `time.monotonic`."""
    ended = time.monotonic()
    _logger.debug("Start-up: %s took %.2f s.", name, ended - began)
    return ended


def hosts_of(entries: Sequence[HostEntry], facts: Mapping[str, Facts]) -> list[Host]:
    """Returns hosts with their facts."""
    return [Host(each.name, facts[each.name], each.slots, not each.is_local) for each in entries]


def _connect(entry: HostEntry, options: Options) -> Connection:
    if entry.is_local:
        return Connection(entry.name, supervisor_command(), is_remote=False)
    if entry.through == "ray":
        returned = "has a node of Ray again"
        return Connection(entry.name, entry.command, is_remote=True, returned=returned)
    by_ssh = ssh_command(entry.name, options.ssh_args)
    command = srun_command(entry.name) if entry.through == "srun" else by_ssh
    return Connection(entry.name, command, is_remote=True)


@contextmanager
def open_session(entries: Sequence[HostEntry], options: Options) -> Iterator[Session]:
    """Connects to all hosts; at the end, however it comes, the supervisors end their processes."""
    by_name = {entry.name: entry for entry in entries}
    session = Session(
        by_name,
        lambda host: _connect(by_name[host], options),
        grace_period_s=options.grace_period_s,
    )
    restore_signals = session.watch_signals()
    try:
        yield session
    finally:
        for connection in session.connections:
            connection.close()
        restore_signals()
        deadline = time.monotonic() + _END_TIMEOUT_S
        for connection in session.connections:
            connection.wait(max(0.0, deadline - time.monotonic()))
        session.close()
        for connection in session.connections:
            connection.release()


def ask_facts(session: Session, options: Options, environ: Mapping[str, str]) -> dict[str, Facts]:
    """Returns the facts of each host; a `HostError` adds the usual remedy."""
    visible = {name: value for name, value in options.exports if name == "CUDA_VISIBLE_DEVICES"}
    request = {
        "cwd": working_directory(environ),
        "script": options.script,
        "interpreter": options.interpreter[0] if options.interpreter else "",
        "environment": {**carried_environment(environ), **visible},
    }
    try:
        answers = session.ask("inspect", request)
    except HostError as error:
        reasons = {
            host: f"{reason.rstrip('.')}. {find_remedy(host, reason)}".strip()
            for host, reason in error.reasons.items()
        }
        raise HostError(reasons) from error
    return {host: Facts.from_json(fields) for host, fields in answers.items()}


def _end_earlier_attempts(session: Session, attempt: Attempt) -> None:
    """Kills what a lost host or a killed supervisor has left of the job's earlier attempts."""
    answers = session.ask("end_job", {"job_id": attempt.job_id, "force": True})
    check(
        {
            host: f"processes of an earlier attempt cannot be killed there: {', '.join(left)}"
            for host, (_, left) in answers.items()
            if left
        }
    )


def check(obstacles: Mapping[str, str]) -> None:
    """Raises a `HostError` if there are obstacles."""
    if obstacles:
        raise HostError(obstacles)


def find_coordinator_address(
    session: Session, hosts: Sequence[Host], options: Options, device_kind: str
) -> str:
    """Returns an address of the first host at which all others can reach it."""
    first, *others = (host.name for host in hosts)
    try:
        port = session.ask("listen", {"port": options.port}, hosts=[first])[first]
    except HostError as error:
        reason = (
            f"port {options.port} cannot be used: {error.reasons[first]}. Leave --port out, or "
            "choose another."
        )
        raise HostError({first: reason}) from error
    address = "127.0.0.1"
    if others and not share_machine(host.facts for host in hosts):
        check(find_unreachable({host.name: host.facts for host in hosts}, device_kind))
        candidates = hosts[0].facts.addresses(first)
        arguments = {"hosts": candidates, "port": port}
        reachable = session.ask("find_reachable", arguments, hosts=others)
        address, unreached = choose_address(candidates, reachable)
        reason = (
            f"it cannot reach {first} at {' or '.join(candidates)}, port {port}. Is there a "
            "firewall? --port chooses the port."
        )
        check(dict.fromkeys(unreached, reason))
    session.ask("stop_listening", {}, hosts=[first])
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"


def working_directory(environ: Mapping[str, str]) -> str:
    """Returns the working directory as the user's shell spells it, as other hosts may know it."""
    spelled = environ.get("PWD", "")
    if os.path.isabs(spelled) and os.path.isdir(spelled) and os.path.samefile(spelled, "."):
        return spelled
    return os.getcwd()


def new_job_id(script: str) -> str:
    """Returns a unique name for a job."""
    name = re.sub(r"\W+", "_", Path(script).stem)[:32]
    return f"{name}-{time.strftime('%m%d-%H%M%S')}-{secrets.token_hex(2)}"


def _describe_plan(processes: Sequence[Process], launch: Launch) -> str:
    """Returns a plan as text: for each process its host, variables and command, for a shell."""
    address = launch.coordinator_address
    lines = [f"job {launch.job_id}: {len(processes)} process(es), meeting at {address}"]
    for process in processes:
        where = f"on {process.host} (local rank {process.local_rank}), in {process.cwd}"
        settings = [*process.environment.items(), *process.exports]
        lines += [f"rank {process.rank} {where}:", describe_command(settings, process.command)]
    return "\n".join(lines)


def describe_command(settings: Iterable[tuple[str, str]], command: Sequence[str]) -> str:
    """Returns variables, without the job's secret, and a command as text, for a shell."""
    shown = [f"{name}={shlex.quote(value)}" for name, value in settings if name != SECRET]
    return "\n".join(f"  {line}" for line in [*shown, shlex.join(command)])


Run = Callable[[Attempt], Ending]


def clean_up(options: Options, environ: Mapping[str, str]) -> int:
    """Ends the processes of the job `options.cleanup`, or lists jobs; returns 1 if any are left."""
    with open_session(job_hosts(options, environ), options) as session:
        if not options.cleanup:
            print(_describe_jobs(session.ask("list_jobs", {})))
            return 0
        arguments = {"job_id": options.cleanup, "force": options.force}
        answers = session.ask("end_job", arguments)
    for host, (found, left) in answers.items():
        print(f"{host}: {found - len(left)} of {found} process(es) ended")
        for process in left:
            print(f"  still there: {process}" + ("" if options.force else " (--force kills it)"))
    return int(any(left for _, left in answers.values()))


def _describe_jobs(jobs_by_host: dict[str, dict[str, list[str]]]) -> str:
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

    That is 75 if a signal came between two attempts, where Ctrl-C raises a KeyboardInterrupt. The
    launcher does not know how far a job has come: the script itself goes on from its last
    checkpoint. `max_restarts` limits the restarts; starts that found too few hosts count. Raises
    what `run_attempt` raises at the first start.
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

    taken = [signal.SIGTERM, *hangup(), signal.SIGUSR1, signal.SIGUSR2]
    previous = {signum: signal.signal(signum, end) for signum in taken}
    # Also where the launcher was started with SIGINT ignored: sessions handle it there, too.
    previous[signal.SIGINT] = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        for signum, handler in previous.items():
            signal.signal(signum, handler)
