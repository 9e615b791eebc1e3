"""Runs a plan: talks to the supervisors until every process has ended, and reports on ends."""

import json
import logging
import math
import os
import re
import selectors
import signal
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

from tnt_jax.launch.membership import Actions, Membership
from tnt_jax.launch.planning.plan import Process
from tnt_jax.launch.processtree import catch_signals, hangup
from tnt_jax.launch.remote.connection import Connection
from tnt_jax.launch.remote.screen import Screen, say
from tnt_jax.settings import (
    EXPLAIN_MARK,
    LOST_EXIT_CODE,
    PREEMPTED_EXIT_CODE,
    RECORD_MARK,
    STALLED_EXIT_CODE,
)

HOST_TIMEOUT_S = 8.0
"""Seconds after which a silent host counts as lost, and a silent launcher as dead."""
FAILURE_GRACE_S = 5.0
ASK_TIMEOUT_S = 60.0
_TICK_S = 0.5
_MOST_REPORTS = 4
# How often a host that an elastic job has lost is tried again. By then a supervisor that has lost
# the launcher has ended its processes.
_AGAIN_S = 15.0
# The exit codes of a process that was asked, and then forced, to end.
_ENDED_CODES = (128 + signal.SIGTERM, 128 + signal.SIGKILL)
# What JAX prints before it aborts a process that has lost its coordinator or a peer.
_FATAL_OF_JAX = b"JAX distributed service detected fatal errors"
# Takes a piece of output: the rank, "stdout" or "stderr", and the data.
Write = Callable[[int, str, bytes], None]
_logger = logging.getLogger("tnt_jax.launch")


class HostError(RuntimeError):
    """Raised if hosts cannot take part in a job, with the reason for each."""

    def __init__(self, reasons: Mapping[str, str]) -> None:
        super().__init__("\n".join(f"{host}: {reason}" for host, reason in reasons.items()))
        self.reasons = dict(reasons)


@dataclass(frozen=True)
class Ending:
    """How an attempt ended."""

    code: int
    because: str = ""  # Why it failed, in one line.
    was_signalled: bool = False  # By a signal to the launcher, or the end of its reader.
    silent_hosts: tuple[str, ...] = ()  # Those on which processes of the job may still run.


class Session:
    """The launcher's event loop over the supervisors of a job."""

    def __init__(
        self, hosts: Iterable[str], connect: Callable[[str], Connection], *, grace_period_s: float
    ) -> None:
        self._connect, self._grace_period_s = connect, grace_period_s
        self._connections = {host: connect(host) for host in hosts}
        self._selector = selectors.DefaultSelector()
        for connection in self._connections.values():
            self._hear(connection)
        self._answers: dict[str, Mapping[str, Any]] = {}
        self._starting, self._began_at = 0, 0.0
        self._started = False
        self._lost: dict[str, str] = {}
        self._screen = Screen([])
        self._write: Write = self._screen.write
        self._running: dict[int, str] = {}
        self._ended_well: list[int] = []
        self._exit_code = self._failures = 0
        self._stop_at = self._time_out_at = self._give_up_at = math.inf
        self._caught: int | None = None
        # Of an elastic job, with the plan of each of its processes.
        self._membership: Membership | None = None
        self._plans: dict[int, Process] = {}
        # When each host that was lost is tried next, and the connections whose hosts have not
        # answered yet.
        self._again_at: dict[str, float] = {}
        self._coming: dict[str, Connection] = {}
        # Whether SIGUSR1 or SIGUSR2, which may announce a preemption, has come.
        self.has_passed_on = False
        self._because = ""  # Why the job failed or was preempted, in one line, if it was.
        self._turned_at = time.monotonic()

    @property
    def connections(self) -> list[Connection]:
        """All connections that are open, or were so until they were lost."""
        return [*self._connections.values(), *self._coming.values()]

    def close(self) -> None:
        """Ends the event loop for good."""
        self._selector.close()

    # Before the start.

    def ask(
        self,
        question: str,
        arguments: Mapping[str, Any],
        *,
        hosts: Iterable[str] | None = None,
        timeout_s: float = ASK_TIMEOUT_S,
    ) -> dict[str, Any]:
        """Asks hosts, by default all, to call a function of `supervisor`; returns their answers.

        A `HostError` names all that cannot be reached or that do not answer in time.
        """
        asked = list(self._connections if hosts is None else hosts)
        self._answers = {}
        for host in asked:
            self._connections[host].send("ask", question=question, arguments=arguments)
        deadline = time.monotonic() + timeout_s
        while set(asked) - {*self._answers, *self._lost} and time.monotonic() < deadline:
            self._turn()
            if self._caught is not None:
                raise KeyboardInterrupt
        failures = dict(self._lost)
        for host in asked:
            if host not in self._answers:
                failures.setdefault(host, f"no answer within {timeout_s:g} seconds")
            elif "error" in self._answers[host]:
                failures[host] = self._answers[host]["error"]
        if failures:
            raise HostError(failures)
        return {host: self._answers[host]["answer"] for host in asked}

    # The job.

    def run(
        self,
        processes: Sequence[Process],
        *,
        write: Write | None = None,
        timeout_s: float | None = None,
        at_least: int | None = None,
        silence_s: float = 0.0,
    ) -> Ending:
        """Starts the processes, and returns when all have ended, or were ended after `timeout_s`.

        Their output is passed to `write`, by default shown on the launcher's screen. An elastic job
        goes on with `at_least` processes, without those that are lost or silent for `silence_s`.
        The code is 0 if all succeeded; 75 if they saved their state because of a signal; 128 + its
        number if a signal ended the job otherwise; else the exit code of the first that failed.
        """
        self._screen = Screen([] if write else processes)
        self._write = write or self._screen.write
        self._began_at = time.monotonic()
        self._time_out_at = self._began_at + (math.inf if timeout_s is None else timeout_s)
        self._running = {process.rank: process.host for process in processes}
        self._started = True
        self._starting = len(processes)
        if at_least is not None:
            self._plans = {process.rank: process for process in processes}
            actions = Actions(
                tell=self._tell_member,
                start=self._start_again,
                kill=partial(self._send_to_host, "kill"),
                show=partial(self._send_to_host, "show"),
                say=say,
                give_up=partial(self._fail, 1),
            )
            self._membership = Membership(
                self._running, at_least=at_least, silence_s=silence_s, actions=actions
            )
        for host, connection in self._connections.items():
            self._start(connection, [item for item in processes if item.host == host])
            if connection.is_remote:
                connection.outbox.beat_for_ever()
        connections = self._connections.values()
        while time.monotonic() <= self._give_up_at and not all(
            connection.finished or connection.closed for connection in connections
        ):
            self._turn()
            self._keep_time()
        code, has_saved = self._exit_code, self._exit_code == PREEMPTED_EXIT_CODE
        ended = "it was preempted" if has_saved else "it ended"
        return Ending(
            code,
            self._because or f"{ended} with exit code {code}.",
            self._caught is not None or (self.has_passed_on and has_saved),
            tuple(connection.host for connection in connections if not connection.finished),
        )

    def _start(self, connection: Connection, processes: Sequence[Process]) -> None:
        connection.send(
            "start",
            processes=[asdict(process) for process in processes],
            silence_s=HOST_TIMEOUT_S if connection.is_remote else None,
            stays=self._membership is not None,
        )

    def watch_signals(self) -> Callable[[], None]:
        """Handles the signals that end or concern a job; returns a function that restores them."""
        caught = (signal.SIGINT, signal.SIGTERM, *hangup(), signal.SIGUSR1, signal.SIGUSR2)
        is_remote = any(connection.is_remote for connection in self._connections.values())
        # The hosts would take a stopped launcher for dead.
        read_fd, restore = catch_signals(caught, ignored=(signal.SIGTSTP,) if is_remote else ())
        self._listen(read_fd, lambda: self._catch(os.read(read_fd, 64)))
        return restore

    def _listen(self, descriptor: int, action: Callable[[], None]) -> None:
        self._selector.register(descriptor, selectors.EVENT_READ, action)

    def _catch(self, caught: bytes) -> None:
        for signum in caught:
            if signum in (signal.SIGUSR1, signal.SIGUSR2):
                self.has_passed_on = True
                self._tell_all("signal", signum=signum)
            elif signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                self._end_by(signal.SIGTERM if signum == signal.SIGHUP else signum)

    def _end_by(self, signum: int) -> None:
        if self._caught is not None and signum == signal.SIGINT:
            self._stop(0.0)
            return
        if self._caught is None:  # Otherwise the time limit is already running.
            name = signal.Signals(signum).name
            _logger.warning("Passing on %s; %g seconds to end.", name, self._grace_period_s)
            self._caught = signum
            self._stop_at = time.monotonic() + self._grace_period_s
        self._tell_all("signal", signum=signum)

    def _turn(self) -> None:
        for connection in self._connections.values():
            connection.outbox.flush()
        for key, _ in self._selector.select(_TICK_S):
            key.data()
        moment = time.monotonic()
        if moment - self._turned_at > 4 * _TICK_S:
            # Showing output took this long, because a terminal or a pager was full; messages of
            # hosts are still unread.
            for connection in self._connections.values():
                connection.heard_at = moment
        self._turned_at = moment

    def _keep_time(self) -> None:
        if time.monotonic() > self._stop_at:
            self._stop_at = math.inf
            self._stop(0.0)
        if time.monotonic() > self._time_out_at:
            self._time_out_at = math.inf
            self._fail(1, "The processes did not end in time.")
        if (membership := self._open_membership) is not None:
            membership.tick()
            self._seek_hosts(membership)
        for connection in self._connections.values():
            silent_s = time.monotonic() - connection.heard_at
            if connection.is_remote and not connection.closed and silent_s > HOST_TIMEOUT_S:
                self._lose(connection, f"it has been silent for {silent_s:.0f} seconds")

    def _tell_all(self, kind: str, **fields: Any) -> None:
        for connection in self._connections.values():
            if not connection.finished:
                connection.send(kind, **fields)

    def _stop(self, grace_s: float) -> None:
        self._tell_all("stop", grace_s=grace_s)
        self._give_up_at = time.monotonic() + grace_s + HOST_TIMEOUT_S

    def _fail(self, exit_code: int, report: str) -> None:
        """Records a failure: the first one decides the exit code, later ones are consequences."""
        self._failures += 1
        if self._exit_code:
            # Two processes that fail together are seen in any order, and the second may hold the
            # reason, so a few failures are reported in full.
            if self._caught is None and self._failures <= _MOST_REPORTS:
                say(report)
            return
        if self._caught is not None:
            self._exit_code = 128 + self._caught
        else:
            self._exit_code = exit_code
            self._because = gist(report)
            say(report)
            self._stop(FAILURE_GRACE_S)

    # From the hosts.

    def _hear(self, connection: Connection) -> None:
        self._listen(connection.stdout, partial(self._receive, connection))
        self._listen(connection.stderr, partial(self._read_complaints, connection))

    def _receive(self, connection: Connection) -> None:
        # What a lost host still says is of processes that are given up.
        for message in [] if connection.closed else connection.receive():
            if (kind := message.pop("kind")) != "beat":
                getattr(self, f"_on_{kind}")(connection, **message)
        if connection.closed:
            self._selector.unregister(connection.stdout)
            if not connection.finished:
                self._lose(connection, connection.reason())

    def _read_complaints(self, connection: Connection) -> None:
        data = connection.read_complaints()
        if data is None:
            self._selector.unregister(connection.stderr)
        elif data and self._started and self._coming.get(connection.host) is not connection:
            say(f"{connection.host}: {data.decode(errors='replace').rstrip()}")

    def _lose(self, connection: Connection, reason: str) -> None:
        if connection.host in self._lost:
            connection.abort()  # It was lost before, or could not be reached again.
            if self._coming.get(connection.host) is connection:
                self._note_absence(connection.host, reason)
            return
        self._lost[connection.host] = reason
        connection.closed = True
        connection.abort()
        lost = [rank for rank, host in self._running.items() if host == connection.host]
        if not lost:
            return
        report = f"Lost {connection.host} with rank {', '.join(map(str, lost))}: {reason}"
        if (membership := self._open_membership) is not None:
            say(report)
            for rank in lost:
                self._running.pop(rank)
            if membership.lost_host(connection.host, reason):
                self._again_at[connection.host] = time.monotonic() + _AGAIN_S
                self._release_if_over()
                return
        self._fail(1, report)

    def _on_answer(self, connection: Connection, **message: Any) -> None:
        self._answers[connection.host] = message

    def _on_started(self, connection: Connection, rank: int, pid: int) -> None:
        _logger.info("Rank %d runs on %s as process %d.", rank, connection.host, pid)
        self._starting -= 1
        if self._starting == 0:
            _logger.debug(
                "Start-up: starting the processes took %.2f s.", time.monotonic() - self._began_at
            )

    def _on_refused(self, connection: Connection, rank: int, reason: str) -> None:
        if (membership := self._open_membership) is not None and membership.is_joining(rank):
            # On a host that has come back, or on another one in its place.
            self._running.pop(rank)
            self._starting -= 1
            membership.lost(rank, f"cannot be started: {reason}")
            self._release_if_over()
        else:
            self._fail(1, f"Rank {rank} cannot be started on {connection.host}: {reason}")

    def _on_output(self, connection: Connection, rank: int, stream: str, data: str) -> None:
        self._show(self._write, rank, stream, data.encode("latin-1"))

    def _show(self, write: Callable[..., None], *arguments: Any) -> None:
        """Writes output; ends the job if the output has been closed."""
        try:
            write(*arguments)
        except BrokenPipeError:
            # Like a program that a closed pipe of a shell has ended.
            self._caught = self._caught or signal.SIGPIPE
            self._exit_code = self._exit_code or 128 + self._caught
            self._stop(FAILURE_GRACE_S)

    def _on_exit(self, connection: Connection, **message: Any) -> None:
        rank, code = message["rank"], message["code"]
        report = failure_report(connection.host, message, shown=self._screen.shows(rank))
        self._running.pop(rank)
        if self._goes_on_without(rank, code, report):
            self._release_if_over()
            return
        self._show(self._screen.finish, rank)
        _logger.debug("Rank %d on %s ended with code %d.", rank, connection.host, code)
        tail = message["tail"].encode("latin-1")
        has_lost = code == LOST_EXIT_CODE or (
            code == 128 + signal.SIGABRT and _FATAL_OF_JAX in tail
        )
        # All end with it, the process that held up the job first.
        has_stalled = code == self._exit_code == STALLED_EXIT_CODE
        is_consequence = self._exit_code and (has_lost or has_stalled or code in _ENDED_CODES)
        if code == 0:
            self._ended_well.append(rank)
        elif code == PREEMPTED_EXIT_CODE:
            self._take_preemption(rank, tail)
        elif has_lost and self._ended_well and not self._exit_code:
            self._fail(LOST_EXIT_CODE, loss_report(rank, connection.host, self._ended_well))
        elif not is_consequence:
            self._fail(code, report)
        self._release_if_over()

    # Of an elastic job.

    @property
    def _open_membership(self) -> Membership | None:
        """The membership of an elastic job that has not begun to end."""
        is_ending = self._exit_code or self._caught is not None or self._give_up_at < math.inf
        return None if is_ending else self._membership

    def _goes_on_without(self, rank: int, code: int, report: str) -> bool:
        """Returns whether the others of an elastic job go on after the end of a process."""
        if (membership := self._open_membership) is None:
            return False
        if code == 0:
            membership.ended(rank)
            return False
        # An error of the script is that of all processes, but for one that has not joined them.
        if not _is_of_signal(code) and not membership.is_joining(rank):
            return False
        _logger.info("%s", report)
        return membership.lost(rank, how_it_ended(code))

    def _release_if_over(self) -> None:
        if self._membership is not None and not self._running:
            self._tell_all("release")

    def _start_again(self, rank: int) -> None:
        plan = self._plans[rank]
        environment = {**plan.environment, "TNT_ELASTIC_JOINS": "1"}
        self._running[rank] = plan.host
        self._starting += 1
        # It is not the master, whoever was so before.
        shown = self._plans[max(self._plans)].shown
        again = replace(plan, environment=environment, shown=shown)
        self._start(self._connections[plan.host], [again])

    def _seek_hosts(self, membership: Membership) -> None:
        """Lets hosts that were lost take part again once they answer; tries them now and then."""
        for host, again_at in list(self._again_at.items()):
            if host in self._coming and "answer" in self._answers.get(host, {}):
                self._take_back(host)
                membership.returned_host(host)
            elif time.monotonic() > again_at:
                if (silent := self._coming.pop(host, None)) is not None:
                    if not silent.closed:
                        self._note_absence(host, "it does not answer")
                    self._drop(silent)
                del self._again_at[host]
                if membership.may_return(host):
                    self._try_again(host)

    def _try_again(self, host: str) -> None:
        self._answers.pop(host, None)
        self._again_at[host] = time.monotonic() + _AGAIN_S
        self._coming[host] = connection = self._connect(host)
        self._hear(connection)
        connection.send("ask", question="read_clock", arguments={})

    def _note_absence(self, host: str, reason: str) -> None:
        """Says why a host that was lost cannot take part again, unless it is what was known."""
        if reason != self._lost[host]:
            self._lost[host] = reason
            say(f"{host} is tried again every {_AGAIN_S:g} seconds, but cannot be used: {reason}")

    def _take_back(self, host: str) -> None:
        del self._again_at[host], self._lost[host]
        self._drop(self._connections[host])
        self._connections[host] = connection = self._coming.pop(host)
        if connection.is_remote:
            connection.outbox.beat_for_ever()
        say(f"{host} {connection.returned}.")

    def _drop(self, connection: Connection) -> None:
        """Ends a connection between two turns, after which nobody listens to it."""
        for descriptor in (connection.stdout, connection.stderr):
            with suppress(KeyError):
                self._selector.unregister(descriptor)
        connection.release()

    def _tell_member(self, rank: int, **message: Any) -> None:
        connection = self._connections[self._plans[rank].host]
        if not (connection.finished or connection.closed):
            connection.send("member", rank=rank, message=json.dumps(message) + "\n")

    def _send_to_host(self, kind: str, rank: int) -> None:
        self._connections[self._plans[rank].host].send(kind, rank=rank)

    def _on_member(self, connection: Connection, rank: int, message: str) -> None:
        if (membership := self._open_membership) is not None:
            membership.heard(rank, json.loads(message))

    def _take_preemption(self, rank: int, tail: bytes) -> None:
        """Handles a process that has saved its state and ended: the others do the same."""
        if self._exit_code not in (0, PREEMPTED_EXIT_CODE):
            return  # It was asked to end because another had failed.
        if self._exit_code == 0:
            say(f"Rank {rank} has saved its state and ended. The same command goes on from there.")
            self._exit_code = PREEMPTED_EXIT_CODE
        # Not all processes say which signal it was.
        self._because = self._because or preemption_cause(tail)
        if self._stop_at == math.inf:
            self._stop_at = time.monotonic() + self._grace_period_s

    def _on_asked_to_end(self, connection: Connection, signum: int) -> None:
        if self._caught is None:
            _logger.warning("%s was asked to end.", connection.host)
            self._end_by(signum)

    def _on_done(self, connection: Connection, leftover: Sequence[int]) -> None:
        connection.finished = True
        if left := ", ".join(map(str, leftover)):
            say(f"Processes on {connection.host} that cannot be killed: {left}")


_END_OF_OUTPUT = " End of its output:"
_LAST_LINES = 30
_TRACEBACK = re.compile(r"\s*Traceback \(most recent call last\):")
# What a process says of the one without which it cannot go on: the first sentence of the messages
# of distributed/leaving.py and distributed/liveness/.
_CULPRIT = re.compile(
    r"\[tnt_jax\] ERROR: ((?:The clock of \S+ was changed|Process \d+(?: has left the job"
    r"| has ended without leaving the job| has not posted| has made no progress"
    r"|, which coordinates the job, has not answered)).*?)\.(?=\s)"
)


def failure_report(host: str, message: Mapping[str, Any], *, shown: bool) -> str:
    """Returns the report on a failed process, from what its supervisor says of its end.

    It has the end of the process's output unless the user has seen that. If the process said that
    another one was the cause, the report begins with that.
    """
    rank, code, pid = message["rank"], message["code"], message["pid"]
    text = f"Rank {rank} on {host} {how_it_ended(code)}. It was process {pid}."
    if code == 128 + signal.SIGKILL and message["memory_kills"]:
        text += (
            f" The kernel of {host} has killed {message['memory_kills']} process(es) for lack of "
            "memory since the start."
        )
    tail = message["tail"].encode("latin-1").decode(errors="replace")
    if culprits := _CULPRIT.findall(tail + "\n"):
        text = f"{culprits[-1]}. {text}"
    lines = tail.rstrip().splitlines()
    last = excerpt([line for line in lines if not line.startswith((RECORD_MARK, EXPLAIN_MARK))])
    if shown or not last:
        return text
    return "\n".join([text + _END_OF_OUTPUT, *(f"  {line}" for line in last)])


def gist(report: str) -> str:
    """Returns a report in one line, without the output of the failed process."""
    return report.splitlines()[0].removesuffix(_END_OF_OUTPUT)


def how_it_ended(code: int) -> str:
    """Returns how a process ended, after its name, by its exit code."""
    if not _is_of_signal(code):
        return f"failed with exit code {code}"
    try:
        name = f" ({signal.Signals(code - 128).name})"
    except ValueError:  # A real-time signal.
        name = ""
    return f"was ended by signal {code - 128}{name}"


def _is_of_signal(code: int) -> bool:
    return code - 128 in signal.valid_signals()


def excerpt(lines: Sequence[str]) -> list[str]:
    """Returns the last lines of an output, preceded by the errors of earlier tracebacks."""
    begin = max(0, len(lines) - _LAST_LINES)
    errors: list[int] = []
    for index, line in enumerate(lines):
        if _TRACEBACK.match(line):
            margin = len(line) - len(line.lstrip())
            ends = (
                i
                for i in range(index + 1, len(lines))
                if lines[i].strip() and lines[i][: margin + 1].strip()
            )
            errors.append(next(ends, len(lines)))
    found = [line for index in errors if index < begin for line in (lines[index], "...")]
    return [*found, *lines[begin:]]


def preemption_cause(tail: bytes) -> str:
    """Returns what preempted a process, from the end of its output; "" if it does not say."""
    found = re.search(rb"(SIG[A-Z0-9]+ came(?: to process \d+)?): the state ", tail)
    return f"it was preempted: {found[1].decode()}, and the state is saved" if found else ""


def loss_report(rank: int, host: str, ended: Sequence[int]) -> str:
    """Returns the report on a process that could not continue without others, which had ended."""
    listed = ", ".join(map(str, ended))
    names = f"Rank {listed}" if len(ended) == 1 else f"One of the ranks {listed}"
    return (
        f"{names} ended with exit code 0, but without leaving the job; rank {rank} on {host} "
        "needed it and could not go on."
    )
