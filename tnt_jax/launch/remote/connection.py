"""The launcher's connection to the supervisor of a host: started directly, by ssh or by srun.

Both sides send one JSON object per line, whose field `kind` names the message. A first line marks
the beginning. The launcher sends `ask`, `start`, `signal`, `stop` and `beat`; the supervisor sends
`answer`, `started`, `refused`, `output`, `asked_to_end`, `exit`, `beat` and `done`. In an elastic
job the launcher may `start` further processes, `kill` one, and `show` what it prints, until it
sends `release`; `member` goes to or comes from a process.
"""

import json
import os
import re
import shlex
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

GREETING = b"tnt-jax supervisor 1\n"
"""The output before this line comes from the host's login scripts."""
BEAT_INTERVAL_S = 1.0
"""Both sides send something at least this often."""
_STDERR_BYTES = 8192
_END_OF_LINE = re.compile(rb"(?<=\n)")


def program(module: str, *arguments: str) -> list[str]:
    """Returns the command that runs a module of this package, from wherever it is."""
    root = str(Path(__file__).parents[3])
    # -P keeps the working directory, and thus the user's modules, out of its path.
    code = f"import sys; sys.path.insert(0, {root!r}); from {module} import main; main()"
    return [sys.executable, "-P", "-c", code, *arguments]


def supervisor_command() -> list[str]:
    """Returns the command that runs the supervisor, the same on every host."""
    return program("tnt_jax.launch.supervisor")


def ssh_command(host: str, ssh_args: Sequence[str]) -> list[str]:
    """Returns the command that runs the supervisor on another host."""
    # ssh uses the first value of an option, which is the user's.
    settings = "BatchMode=yes ConnectTimeout=10 ServerAliveInterval=5 ServerAliveCountMax=2"
    options = ["-T", *(word for setting in settings.split() for word in ("-o", setting))]
    return ["ssh", *ssh_args, *options, "--", host, "exec " + shlex.join(supervisor_command())]


def srun_command(host: str) -> list[str]:
    """Returns the command that runs the supervisor on a node of the SLURM allocation."""
    options = "--nodes=1 --ntasks=1 --overlap --unbuffered --cpu-bind=none --mpi=none"
    return ["srun", *options.split(), f"--nodelist={host}", *supervisor_command()]


def encode(kind: str, **fields: Any) -> bytes:
    """Returns the line for one message; a process's output is sent as Latin-1, without loss."""
    return json.dumps({"kind": kind, **fields}, separators=(",", ":")).encode() + b"\n"


class Lines:
    """Splits a stream of bytes into lines, in whatever pieces it arrives.

    An incomplete line is cut and ended after `limit` bytes, if that is not None.
    """

    def __init__(self, limit: int | None = None) -> None:
        self._limit = limit
        self._pieces: list[bytes] = []
        self._num_bytes = 0

    def feed(self, data: bytes) -> list[bytes]:
        """Returns the lines, with their ends, that `data` completes."""
        lines = []
        for piece in _END_OF_LINE.split(data):
            self._pieces.append(piece)
            self._num_bytes += len(piece)
            if piece.endswith(b"\n"):
                lines += self.flush()
            elif self._limit is not None and self._num_bytes >= self._limit:
                lines += [rest + b"\n" for rest in self.flush()]
        return lines

    def flush(self) -> list[bytes]:
        """Returns and clears the last line if it has no end."""
        rest = b"".join(self._pieces)
        self._pieces, self._num_bytes = [], 0
        return [rest] if rest else []


class Outbox:
    """Data still to be sent through a pipe that may be full; several threads may use it."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._waiting = bytearray()
        self._lock = threading.Lock()
        self.is_closed = False

    def __len__(self) -> int:
        return len(self._waiting)

    def put(self, data: bytes) -> None:
        """Accepts data to send; `flush` sends it."""
        with self._lock:
            if not self.is_closed:
                self._waiting += data

    def flush(self) -> None:
        """Sends as much as the pipe accepts; closes the box if the pipe has no reader."""
        with self._lock:
            try:
                while self._waiting and not self.is_closed:
                    del self._waiting[: os.write(self._descriptor, self._waiting[:65536])]
            except BlockingIOError:
                return
            except BrokenPipeError:
                self._waiting.clear()
                self.is_closed = True

    def close(self) -> None:
        """Discards the pending data and accepts no more, so that the descriptor can be closed."""
        with self._lock:
            self._waiting.clear()
            self.is_closed = True

    def beat_for_ever(self) -> None:
        """Sends regular heartbeats from a thread of its own, whatever other threads wait for."""

        # The other side must not take this one for dead while it waits for a full terminal, a pager
        # or a slow file system.
        def beat() -> None:
            while not self.is_closed:
                if not self._waiting:
                    self.put(encode("beat"))
                self.flush()
                time.sleep(BEAT_INTERVAL_S)

        threading.Thread(target=beat, daemon=True).start()


class Connection:
    """A running supervisor.

    It `is_remote` if there is a network in between, so that silence may mean that the host is lost;
    `returned` is told of the host when it answers again after that.
    """

    def __init__(
        self,
        host: str,
        command: Sequence[str],
        *,
        is_remote: bool,
        returned: str = "can be reached again",
    ) -> None:
        self.host = host
        self.is_remote, self.returned = is_remote, returned
        self.finished = False  # Whether it has reported that all processes have ended.
        self.closed = False
        self._greeted = False
        self._lines = Lines()
        self._complaints = b""
        self.heard_at = time.monotonic()  # When its last message came.
        # A session of its own: Ctrl-C in the terminal reaches only the launcher, which passes it
        # on.
        self._popen = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        stdin, stdout, stderr = self._popen.stdin, self._popen.stdout, self._popen.stderr
        assert stdin and stdout and stderr
        self._streams = (stdin, stdout, stderr)
        for stream in self._streams:
            os.set_blocking(stream.fileno(), False)
        # File descriptors of its messages, and of what ssh, the login scripts and it complain of.
        self.stdout, self.stderr = stdout.fileno(), stderr.fileno()
        self.outbox = Outbox(stdin.fileno())

    def send(self, kind: str, **fields: Any) -> None:
        """Sends a message as far as the connection accepts it; `outbox.flush` sends the rest."""
        self.outbox.put(encode(kind, **fields))
        self.outbox.flush()

    def receive(self) -> list[dict[str, Any]]:
        """Returns the messages that have arrived; sets `closed` at the end of the connection."""
        try:
            data = os.read(self.stdout, 1 << 16)
        except BlockingIOError:
            return []
        if not data:
            self.closed = True
            return []
        self.heard_at = time.monotonic()
        found = []
        for line in self._lines.feed(data):
            if self._greeted:
                found.append(json.loads(line))
            elif line == GREETING:
                self._greeted = True
            else:
                self._complaints += line
        return found

    def read_complaints(self) -> bytes | None:
        """Returns new error output of the connection, or None at its end."""
        try:
            data = os.read(self.stderr, 1 << 16)
        except BlockingIOError:
            return b""
        self._complaints = (self._complaints + data)[-_STDERR_BYTES:]
        return data or None

    def close(self) -> None:
        """Ends the connection, upon which the supervisor ends its processes."""
        self.outbox.close()
        self._streams[0].close()

    def wait(self, timeout_s: float) -> int | None:
        """Returns the exit code of the supervisor or of ssh, or None if it has not ended."""
        try:
            return self._popen.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return None

    def abort(self) -> None:
        """Closes the connection without waiting; a supervisor that still runs notices it."""
        self.close()
        if self._popen.poll() is None:
            self._popen.kill()
            self._popen.wait()

    def release(self) -> None:
        """Closes what is left of the pipes, once nobody listens to them."""
        self.abort()
        for stream in self._streams:
            stream.close()

    def reason(self) -> str:
        """Returns why the connection ended, as far as this side can tell."""
        while self.read_complaints():
            continue
        code = self.wait(2.0)
        text = self._complaints.decode(errors="replace").strip()
        if text:
            return text
        return "it does not answer" if code is None else f"its supervisor ended with code {code}"
