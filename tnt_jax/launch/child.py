"""One running process of the job, as its supervisor sees it."""

import contextlib
import errno
import functools
import os
import re
import signal
import socket
import subprocess
import termios
import tty
from collections.abc import Mapping, Sequence
from typing import IO, Any

from tnt_jax.launch.processtree import descendants, die_with_parent, is_handled, send_signal
from tnt_jax.launch.remote.connection import Lines

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
    """Passes on a stream without Gloo's greetings, which arrive in pieces.

    What may become one is held back until it is clear.
    """

    def __init__(self) -> None:
        self._waiting = b""

    def feed(self, data: bytes) -> bytes:
        """Returns what can be shown once the next piece of the stream has come."""
        data = _GREETING.sub(b"", self._waiting + data)
        begin = data.rfind(_BEGIN)
        is_open = begin >= 0 and b"\n" not in data[begin:] and len(data) - begin < _LONGEST_BYTES
        data, self._waiting = (data[:begin], data[begin:]) if is_open else (data, b"")
        return data

    def flush(self) -> bytes:
        """Returns the data held back at the end of the stream."""
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
        lambda found: environ.get(found[1] or found[2] or "", "") if found[1] or found[2] else "$",
        value,
    )


class Child:
    """A started process with its output pipes.

    Attributes:
        pid: Its process id, which is also its process group's.
        streams: File descriptor of each open output pipe, by name ("stdout", "stderr").
        code: Exit code as a shell states it (128 + signal number), or None while it runs.
        link: The end of a socket over which a process of an elastic job talks to the launcher.
        lost_log: Why its log ends before its output, until that has been shown; else empty.
    """

    def __init__(self, process: Mapping[str, Any]) -> None:
        self.rank: int = process["rank"]
        self.shown: frozenset[str] = frozenset(process["shown"])
        self._tails = {"stdout": b"", "stderr": b""}
        self._filters = {name: _WithoutGreetings() for name in self._tails}
        self._log: IO[bytes] | None = _open_log(
            # Behind what the process wrote in whose place it comes.
            process["log_file"],
            "ab" if "TNT_ELASTIC_JOINS" in process["environment"] else "wb",
        )
        # The ends of its standard output and error that the process writes and that we read.
        pairs = {
            name: _open_stream(process["columns"] if name in process["terminals"] else None)
            for name in ("stdout", "stderr")
        }
        self.link, link_end = socket.socketpair() if process["is_elastic"] else (None, None)
        try:
            self._popen = _start(
                process, {name: write_fd for name, (_, write_fd) in pairs.items()}, link_end
            )
        finally:
            for _, write_fd in pairs.values():
                os.close(write_fd)
            if link_end is not None:
                link_end.close()
        if self.link is not None:
            self.link.setblocking(False)
        self.pid = self._popen.pid
        self.streams = {name: read_fd for name, (read_fd, _) in pairs.items()}
        self.code: int | None = None
        self.lost_log = ""
        self._received = Lines()
        self._kept: int | None = None

    def read(self, name: str) -> bytes | None:
        """Returns the data of a stream without Gloo's greetings.

        Returns b"" if there is none yet, and None if the stream has ended or was closed.
        """
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
        """Sends a line to the process over its link.

        One that does not read loses the link, so that it falls silent and the launcher ends it.
        """
        assert self.link is not None
        self.link.settimeout(_TELL_S)
        try:
            self.link.sendall(text.encode())
        except OSError:
            with contextlib.suppress(OSError):  # It has ended.
                self.link.shutdown(socket.SHUT_WR)
        self.link.setblocking(False)

    def close(self, name: str) -> None:
        """Closes one stream."""
        os.close(self.streams.pop(name))

    def ended(self, wait_status: int) -> None:
        """Records the status that `waitpid` returned for this process."""
        code = os.waitstatus_to_exitcode(wait_status)
        self.code = code if code >= 0 else 128 - code
        self._popen.returncode = code  # Already waited for: Popen must not try again.

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
        try:
            os.killpg(self.pid, signum)
        except ProcessLookupError:
            return

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


def _open_log(path: str | None, mode: str) -> IO[bytes] | None:
    if path is None:
        return None
    os.makedirs(os.path.dirname(path), exist_ok=True)
    return open(path, mode, buffering=0)


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
        preexec_fn=functools.partial(_before_exec, process["processors"]),
    )


def _before_exec(processors: Sequence[int]) -> None:
    die_with_parent()
    # One may have been taken away since the host was asked.
    with contextlib.suppress(OSError):
        if processors:
            os.sched_setaffinity(0, processors)
    # The supervisor ignores Ctrl-C, and its children would inherit that.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
