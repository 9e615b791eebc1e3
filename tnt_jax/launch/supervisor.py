"""The program that starts a host's processes, relays their output and ends all of them.

It is started once on each host and communicates with the launcher through its standard input and
output (`remote/connection.py`). When that connection ends, for whatever reason, or falls silent, it
ends its processes and everything they started.
"""

import contextlib
import errno
import fcntl
import json
import math
import os
import re
import selectors
import signal
import socket
import subprocess
import sys
import termios
import time
import tty
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from io import FileIO
from typing import Any

from tnt_jax.launch.planning.facts import examine, inspect_host
from tnt_jax.launch.processtree import (
    adopt_orphans,
    catch_signals,
    count_memory_kills,
    descendants,
    die_with_parent,
    end_job,
    is_handled,
    kill_descendants,
    list_jobs,
    orphans_of_group,
    send_signal,
)
from tnt_jax.launch.remote.connection import BEAT_INTERVAL_S, GREETING, Lines, Outbox, encode
from tnt_jax.settings import PREEMPTED_EXIT_CODE

TAIL_BYTES = 1 << 16
NOTICES = (signal.SIGUSR1, signal.SIGUSR2)
"""Signals that end nobody: they are kept for a process that does not handle them yet."""
LINK = "TNT_ELASTIC_FD"
"""Variable with the descriptor over which a process of an elastic job talks to the launcher."""
# How long a line waits for a process that does not read.
_TELL_S = 1.0
_REQUESTS = (signal.SIGTERM, *NOTICES)
_VARIABLE = re.compile(r"\\\$|\$(\w+)|\$\{(\w+)\}")
# Gloo, the library for CPU collectives, prints a line for each group of processes.
_BEGIN = b"[Gloo] Rank "
_GREETING = re.compile(
    rb"\[Gloo\] Rank \d+ is connected to \d+ peer ranks\. Expected number of connected peer "
    rb"ranks is : \d+\r?\n"
)
_LONGEST_BYTES = 128


class _WithoutGreetings:
    """Passes on a stream without Gloo's greetings; what may become one waits for its end."""

    def __init__(self) -> None:
        self._waiting = b""

    def feed(self, data: bytes) -> bytes:
        data = _GREETING.sub(b"", self._waiting + data)
        begin = data.rfind(_BEGIN)
        is_open = begin >= 0 and b"\n" not in data[begin:] and len(data) - begin < _LONGEST_BYTES
        data, self._waiting = (data[:begin], data[begin:]) if is_open else (data, b"")
        return data

    def flush(self) -> bytes:
        rest, self._waiting = self._waiting, b""
        return rest


def expand(value: str, environ: Mapping[str, str]) -> str:
    r"""Expands `$NAME` and `${NAME}` as a shell does in double quotes.

    Unset names expand to nothing, `\$` is a dollar sign.

    Example:
        >>> expand(r"${HOME}/data:$UNSET:\$5", {"HOME": "/home/ada"})
        '/home/ada/data::$5'
    """
    return _VARIABLE.sub(
        lambda found: environ.get(name, "") if (name := found[1] or found[2]) else "$", value
    )


class Child:
    """A started process with its output pipes."""

    def __init__(self, process: Mapping[str, Any]) -> None:
        self.rank: int = process["rank"]
        self.shown: frozenset[str] = frozenset(process["shown"])
        self._tails = {"stdout": b"", "stderr": b""}
        self._filters = {name: _WithoutGreetings() for name in self._tails}
        self._log: FileIO | None = None
        if path := process["log_file"]:
            os.makedirs(os.path.dirname(path), exist_ok=True)
            # Behind what the process wrote in whose place it comes.
            self._log = FileIO(path, "a" if "TNT_ELASTIC_JOINS" in process["environment"] else "w")
        # The ends of its standard output and error that the process writes and that we read.
        pairs = {
            name: _open_stream(process["columns"] if name in process["terminals"] else None)
            for name in self._tails
        }
        # The ends of a socket over which a process of an elastic job talks to the launcher.
        self.link, link_end = socket.socketpair() if process["is_elastic"] else (None, None)
        write_fds = {name: write_fd for name, (_, write_fd) in pairs.items()}
        try:
            self._popen = _start(process, write_fds, link_end)
        finally:
            for _, write_fd in pairs.values():
                os.close(write_fd)
            if link_end is not None:
                link_end.close()
        if self.link is not None:
            self.link.setblocking(False)
        self.pid = self._popen.pid  # Also that of its process group.
        # The open file descriptors, by name ("stdout", "stderr").
        self.streams = {name: read_fd for name, (read_fd, _) in pairs.items()}
        self.code: int | None = None  # As a shell states it: 128 + signal number.
        self.lost_log = ""  # Why its log ends before its output, until that has been shown.
        self._received = Lines()
        self._kept: int | None = None
        self._asked = 0  # The last signal that was to end it.
        self._awaited = {self.pid}

    def read(self, name: str) -> bytes | None:
        """Returns data of a stream without Gloo's greetings; None if it has ended or was closed."""
        try:
            data = os.read(self.streams[name], 65536)
        except BlockingIOError:
            return b""
        except OSError as error:
            if error.errno != errno.EIO:
                raise
            return None  # The terminal has no writer any more.
        if not data:
            return None
        # A hidden piece must not look like the end of the data.
        return self._take(name, self._filters[name].feed(data)) or self.read(name)

    def rest(self, name: str) -> bytes:
        """Returns what was held back as a possible greeting of Gloo, once a stream has ended."""
        return self._take(name, self._filters[name].flush())

    def _take(self, name: str, data: bytes) -> bytes:
        self._tails[name] = (self._tails[name] + data)[-TAIL_BYTES:]
        if self._log is not None:
            try:
                self._log.write(data)
            except OSError as error:
                self._log, self.lost_log = None, f"{self._log.name} ends here: {error}."
        return data

    def hear(self) -> list[bytes] | None:
        """Returns the lines that the process has sent over its link; None at its end."""
        assert self.link is not None
        try:
            data = self.link.recv(1 << 20)
        except BlockingIOError:
            return []
        except OSError:
            return None
        return self._received.feed(data) if data else None

    def tell(self, text: str) -> None:
        """Sends a line to the process over its link."""
        # One that does not read loses the link, so that it falls silent and the launcher ends it.
        assert self.link is not None
        self.link.settimeout(_TELL_S)
        try:
            self.link.sendall(text.encode())
        except OSError:
            with contextlib.suppress(OSError):  # It has ended.
                self.link.shutdown(socket.SHUT_WR)
        self.link.setblocking(False)

    def ended(self, pid: int, wait_status: int) -> bool:
        """Records what `waitpid` returned; returns whether this process has ended thereby."""
        if pid not in self._awaited:
            return False
        self._awaited.remove(pid)
        code = os.waitstatus_to_exitcode(wait_status)
        if pid == self.pid or code == PREEMPTED_EXIT_CODE:
            self._popen.returncode = code  # Already waited for: Popen must not try again.
        if pid == self.pid and code == -self._asked < 0:
            # A signal ends a shell at once, while the script below it saves its state.
            self._awaited.update(orphans_of_group(pid))
        if not self._awaited:
            code = self._popen.returncode
            self.code = code if code >= 0 else 128 - code
        return not self._awaited

    def tail(self) -> bytes:
        """Returns the end of the error output, or of the output if there is no error output."""
        return self._tails["stderr"] or self._tails["stdout"]

    def signal(self, signum: int) -> None:
        """Sends a signal to the process and to the processes in its process group.

        A process with a handler for a signal that asks it to end, or to note something, gets it
        alone: its workers, which load data for instance, would end before it has saved its state.
        SIGUSR1 and SIGUSR2 are kept while nobody handles them, for instance during imports.
        """
        if signum in _REQUESTS and is_handled(self.pid, signum):
            send_signal([self.pid], signum)
            return
        if signum in NOTICES and not any(is_handled(pid, signum) for pid in descendants(self.pid)):
            self._kept = signum
            return
        self._asked = signum
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signum)

    def signal_again(self) -> None:
        """Sends the signal that was kept, if the process has a handler for it by now."""
        if (signum := self._kept) is not None:
            self._kept = None
            self.signal(signum)


def _open_stream(columns: int | None) -> tuple[int, int]:
    """Returns the reading and the writing end of a pipe, or of a terminal of this width."""
    if columns is None:
        read_fd, write_fd = os.pipe()
    else:
        read_fd, write_fd = os.openpty()
        # Raw: the user's own terminal interprets the output; this one must not do so first.
        tty.setraw(write_fd)
        termios.tcsetwinsize(write_fd, (24, columns))
    os.set_blocking(read_fd, False)
    return read_fd, write_fd


def _start(
    process: Mapping[str, Any], streams: Mapping[str, int], link: socket.socket | None
) -> subprocess.Popen[bytes]:
    environ = {**os.environ, **process["environment"]}
    if link is not None:
        environ[LINK] = str(link.fileno())
    for name, value in process["exports"]:
        environ[name] = expand(value, environ)
    return subprocess.Popen(
        process["command"],
        cwd=process["cwd"],
        env=environ,
        stdin=subprocess.DEVNULL,
        stdout=streams["stdout"],
        stderr=streams["stderr"],
        start_new_session=True,
        pass_fds=() if link is None else (link.fileno(),),
        # Safe here: the supervisor has no other thread yet, or one that only sends heartbeats.
        preexec_fn=partial(_before_exec, process["processors"]),
    )


def _before_exec(processors: Sequence[int]) -> None:
    die_with_parent()
    # One may have been taken away since the host was asked.
    with contextlib.suppress(OSError):
        if processors:
            os.sched_setaffinity(0, processors)
    # The supervisor ignores Ctrl-C, and its children would inherit that.
    signal.signal(signal.SIGINT, signal.SIG_DFL)


_CONNECT_TIMEOUT_S = 2.0
_BACKLOG_BYTES = 1 << 20
_ABANDONED_GRACE_S = 5.0
# How often a process is asked whether it handles a signal that was kept for it.
_AGAIN_S = 1.0
# A pipe holds 64 KiB by default and at most 1 MiB; later data comes from a process that is still
# alive.
_LAST_PIECES = 16
FileLike = int | selectors.EpollSelector
# What `listen` has opened.
_listeners: list[socket.socket] = []


def listen(port: int | None) -> int:
    """Listens on a port, any free one if None, until `stop_listening`, and returns its number."""
    # On IPv4 and IPv6 if both exist, as JAX's coordinator does, and for all hosts of a large job at
    # once.
    both = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both else socket.AF_INET
    listener = socket.create_server(
        ("", port or 0), family=family, dualstack_ipv6=both, backlog=4096
    )
    _listeners.append(listener)
    return listener.getsockname()[1]


def stop_listening() -> None:
    """Frees the ports taken by `listen`."""
    while _listeners:
        _listeners.pop().close()


def find_reachable(hosts: Sequence[str], port: int) -> list[str]:
    """Returns the names and addresses at which the port can be reached from here."""
    found = []
    for host in hosts:
        with contextlib.suppress(OSError):
            socket.create_connection((host, port), timeout=_CONNECT_TIMEOUT_S).close()
            found.append(host)
    return found


# The questions that the launcher asks by name before, or instead of, starting processes; each
# answer is plain data.
_ANSWERS: dict[str, Callable[..., Any]] = {
    "inspect": inspect_host,
    "listen": listen,
    "stop_listening": stop_listening,
    "find_reachable": find_reachable,
    "examine": examine,
    "read_clock": time.time,
    "list_jobs": list_jobs,
    "end_job": end_job,
}


class Supervisor:
    """The event loop of one host."""

    def __init__(self, read_fd: int, write_fd: int) -> None:
        self._read_fd, self._write_fd = read_fd, write_fd
        self._selector = selectors.DefaultSelector()
        self._outputs = selectors.EpollSelector()
        self._incoming = Lines()
        self._outbox = Outbox(write_fd)
        self._outbox.put(GREETING)
        self._children: dict[int, Child] = {}
        self._connected = True
        self._started = self._finished = False
        # Whether further processes may be started when all have ended.
        self._stays = False
        # A signal that came before the processes were started.
        self._early: int | None = None
        self._again_at = 0.0
        self._kill_at = math.inf
        self._silence_s: float | None = None
        self._memory_kills = count_memory_kills()
        self._heard_at = self._turned_at = time.monotonic()

    def run(self) -> None:
        """Serves the launcher until every process has ended or the launcher is gone."""
        adopt_orphans()
        self._watch_signals()
        os.set_blocking(self._read_fd, False)
        os.set_blocking(self._write_fd, False)
        self._selector.register(self._read_fd, selectors.EVENT_READ, self._hear)
        while self._connected or self._running():
            self._write()
            num_bytes = len(self._outbox)
            self._watch(self._write_fd, selectors.EVENT_WRITE, self._write, wanted=num_bytes > 0)
            # If the launcher reads more slowly than the processes write, these wait, as with a
            # terminal.
            is_open = num_bytes < _BACKLOG_BYTES
            self._watch(self._outputs, selectors.EVENT_READ, self._relay_all, wanted=is_open)
            wait_s = BEAT_INTERVAL_S / 2 if self._kill_at == math.inf else 0.05
            for key, _ in self._selector.select(wait_s):
                key.data()
            self._keep_time()
            is_over = self._started and not self._stays and not self._running()
            if is_over and self._say_goodbye():
                return
        kill_descendants(os.getpid())

    def _say_goodbye(self) -> bool:
        """Ends and reports remaining processes; returns whether all messages were sent."""
        if not self._finished:
            self._finished = True
            self._send("done", leftover=kill_descendants(os.getpid()))
        self._write()
        return not self._outbox

    def _running(self) -> list[Child]:
        return [child for child in self._children.values() if child.code is None]

    def _running_as(self, rank: int) -> list[Child]:
        return [child for child in self._running() if child.rank == rank]

    def _watch(
        self, source: FileLike, events: int, action: Callable[[], None], *, wanted: bool
    ) -> None:
        watched = source in self._selector.get_map()
        if wanted and not watched:
            self._selector.register(source, events, action)
        elif watched and not wanted:
            self._selector.unregister(source)

    def _watch_signals(self) -> None:
        # Processes inherit what is ignored. Thus SIGUSR1 and SIGUSR2 that are passed on end only
        # processes that handle them. The launcher passes on Ctrl-C of a terminal.
        read_fd, _ = catch_signals(
            (signal.SIGCHLD, signal.SIGTERM, signal.SIGHUP),
            ignored=(signal.SIGUSR1, signal.SIGUSR2, signal.SIGINT),
        )

        def wake() -> None:
            caught = os.read(read_fd, 4096)
            self._reap()
            if signal.SIGHUP in caught or (signal.SIGTERM in caught and not self._started):
                self._abandon()
            elif signal.SIGTERM in caught:
                # A cluster ends the job on this host: the launcher asks the processes of all hosts.
                self._send("asked_to_end", signum=signal.SIGTERM)

        self._selector.register(read_fd, selectors.EVENT_READ, wake)

    # From the launcher.

    def _hear(self) -> None:
        try:
            data = os.read(self._read_fd, 65536)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._abandon()
            return
        for line in self._incoming.feed(data):
            message = json.loads(line)
            if (kind := message.pop("kind")) != "beat":
                getattr(self, f"_on_{kind}")(**message)
        self._heard_at = time.monotonic()

    def _on_ask(self, question: str, arguments: Mapping[str, Any]) -> None:
        """Answers a question; this may take long and blocks everything else."""
        try:
            self._send("answer", answer=_ANSWERS[question](**arguments))
        except Exception as error:  # The launcher must learn of any error.
            self._send("answer", error=f"{type(error).__name__}: {error}")

    def _on_start(
        self, processes: Sequence[Mapping[str, Any]], silence_s: float | None, stays: bool
    ) -> None:
        is_first, self._started = not self._started, True
        self._silence_s, self._stays = silence_s, stays
        for process in processes:
            try:
                child = Child(process)
            except OSError as error:
                self._send("refused", rank=process["rank"], reason=str(error))
                if self._stays:  # The launcher decides whether the others go on.
                    continue
                self._on_stop(0.0)
                return
            self._children[child.pid] = child
            for name, descriptor in child.streams.items():
                self._outputs.register(descriptor, selectors.EVENT_READ, (child, name))
            if child.link is not None:
                hear = partial(self._hear_member, child)
                self._selector.register(child.link, selectors.EVENT_READ, hear)
            self._send("started", rank=child.rank, pid=child.pid)
        if self._early is not None:
            self._on_signal(self._early)
            self._early = None
        # After the first forks, because it makes a thread.
        if is_first:
            self._outbox.beat_for_ever()

    def _on_member(self, rank: int, message: str) -> None:
        for child in self._running_as(rank):
            if child.link is not None:
                child.tell(message)

    def _on_kill(self, rank: int) -> None:
        for child in self._running_as(rank):
            send_signal([child.pid, *descendants(child.pid)], signal.SIGKILL)

    def _on_show(self, rank: int) -> None:
        for child in self._running_as(rank):
            child.shown = frozenset(("stdout", "stderr"))

    def _on_release(self) -> None:
        self._stays = False

    def _on_signal(self, signum: int) -> None:
        if not self._started and signum in NOTICES:
            self._early = signum
        for child in self._running():
            child.signal(signum)

    def _on_stop(self, grace_s: float) -> None:
        """Asks all processes to end and sets the time at which they are killed."""
        self._stays = False
        if self._kill_at == math.inf:
            for child in self._running():
                child.signal(signal.SIGTERM)
        self._kill_at = min(self._kill_at, time.monotonic() + grace_s)

    def _abandon(self) -> None:
        """Handles the loss of the launcher: it neither reads nor sends any more."""
        if self._connected:
            self._connected = False
            self._selector.unregister(self._read_fd)
            self._outbox.close()
            self._on_stop(_ABANDONED_GRACE_S)

    # From the processes.

    def _hear_member(self, child: Child, *, is_last: bool = False) -> None:
        if child.link is None:
            return
        found = child.hear()
        for line in found or ():
            self._send("member", rank=child.rank, message=line.decode())
        if found is None or is_last:
            self._selector.unregister(child.link)
            child.link.close()
            child.link = None

    def _relay_all(self) -> None:
        for key, _ in self._outputs.select(0):
            self._relay(*key.data)

    def _relay(self, child: Child, name: str) -> bool:
        """Passes on one piece of output; returns whether there may be more."""
        data = child.read(name)
        if data is None:
            descriptor = child.streams.pop(name)
            self._outputs.unregister(descriptor)
            os.close(descriptor)
            self._show(child, name, child.rest(name))
        else:
            self._show(child, name, data)
        return bool(data)

    def _show(self, child: Child, name: str, data: bytes) -> None:
        if data and name in child.shown:
            self._send("output", rank=child.rank, stream=name, data=data.decode("latin-1"))
        if child.lost_log:
            text, child.lost_log = f"[tnt-jax] {child.lost_log}\n", ""
            self._send("output", rank=child.rank, stream="stderr", data=text)

    def _reap(self) -> None:
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                # Others are orphans that a process has left behind.
                for child in self._running():
                    if child.ended(*ended):
                        self._end(child)

    def _end(self, child: Child) -> None:
        self._hear_member(child, is_last=True)
        for name in list(child.streams):
            for _ in range(_LAST_PIECES):
                if not self._relay(child, name):
                    break
            # If another process holds the stream open.
            self._show(child, name, child.rest(name))
        self._send(
            "exit",
            rank=child.rank,
            pid=child.pid,
            code=child.code,
            tail=child.tail().decode("latin-1"),
            memory_kills=count_memory_kills() - self._memory_kills,
        )

    # Time and the way back.

    def _keep_time(self) -> None:
        moment = time.monotonic()
        if moment - self._turned_at > 2 * BEAT_INTERVAL_S:
            # Writing a log file took this long; messages of the launcher are still unread.
            self._heard_at = moment
        self._turned_at = moment
        if moment >= self._again_at:
            self._again_at = moment + _AGAIN_S
            for child in self._running():
                child.signal_again()
        if self._silence_s is not None and moment - self._heard_at > self._silence_s:
            self._abandon()
        if moment >= self._kill_at:
            send_signal(descendants(os.getpid()), signal.SIGKILL)

    def _send(self, kind: str, **fields: Any) -> None:
        self._outbox.put(encode(kind, **fields))

    def _write(self) -> None:
        self._outbox.flush()
        if self._outbox.is_closed:
            self._abandon()


def main() -> None:
    """Communicates with the launcher through standard input and output."""
    # Output of this process or of a library must not mix with the messages.
    write_fd = fcntl.fcntl(1, fcntl.F_DUPFD_CLOEXEC, 10)
    os.dup2(2, 1)
    Supervisor(sys.stdin.fileno(), write_fd).run()


if __name__ == "__main__":
    main()
