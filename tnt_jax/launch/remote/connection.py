"""The launcher's connection to the supervisor of a host: started directly, by ssh or by srun."""

import os
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tnt_jax.launch.remote import messages

_STDERR_BYTES = 8192


def supervisor_command() -> list[str]:
    """Returns the command that runs the supervisor, the same on every host."""
    root = str(Path(__file__).parents[3])
    # -P keeps the working directory, and thus the user's modules, out of the supervisor's path.
    program = (
        f"import sys; sys.path.insert(0, {root!r}); from tnt_jax.launch.supervisor import main; "
        "main()"
    )
    return [sys.executable, "-P", "-c", program]


def ssh_command(host: str, ssh_args: Sequence[str]) -> list[str]:
    """Returns the command that runs the supervisor on another host.

    ssh uses the first value of an option, which is the user's.
    """
    options = [
        "-T",
        "-o",
        "BatchMode=yes",
        "-o",
        "ConnectTimeout=10",
        "-o",
        "ServerAliveInterval=5",
        "-o",
        "ServerAliveCountMax=2",
    ]
    return ["ssh", *ssh_args, *options, "--", host, "exec " + shlex.join(supervisor_command())]


def srun_command(host: str) -> list[str]:
    """Returns the command that runs the supervisor on a node of the SLURM allocation.

    It gets all resources allocated on the node.
    """
    options = [
        "--nodes=1",
        "--ntasks=1",
        f"--nodelist={host}",
        "--overlap",
        "--unbuffered",
        "--cpu-bind=none",
        "--mpi=none",
    ]
    return ["srun", *options, *supervisor_command()]


class Connection:
    """A running supervisor.

    Attributes:
        host: Name of the host.
        is_remote: Whether there is a network in between, so that silence may mean that the host is
            lost.
        finished: Whether the supervisor has reported that all processes have ended.
        closed: Whether the connection has ended.
    """

    def __init__(self, host: str, command: Sequence[str], *, is_remote: bool) -> None:
        self.host = host
        self.is_remote = is_remote
        self.finished = False
        self.closed = False
        self._greeted = False
        self._lines = messages.Lines()
        self._complaints = b""
        self._heard_at = time.monotonic()
        # A session of its own: Ctrl-C in the terminal reaches only the launcher, which passes it
        # on.
        self._popen = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        for descriptor in (self.stdin, self.stdout, self.stderr):
            os.set_blocking(descriptor, False)
        self._outbox = messages.Outbox(self.stdin)

    @property
    def stdin(self) -> int:
        """File descriptor for writing to the supervisor."""
        assert self._popen.stdin is not None
        return self._popen.stdin.fileno()

    @property
    def stdout(self) -> int:
        """File descriptor of the supervisor's messages."""
        assert self._popen.stdout is not None
        return self._popen.stdout.fileno()

    @property
    def stderr(self) -> int:
        """File descriptor of the error output of ssh, the login scripts and the supervisor."""
        assert self._popen.stderr is not None
        return self._popen.stderr.fileno()

    @property
    def silent_s(self) -> float:
        """Seconds since the last message of the supervisor."""
        return time.monotonic() - self._heard_at

    def send(self, kind: str, **fields: Any) -> None:
        """Sends a message as far as the connection accepts it; `flush` sends the rest."""
        self._outbox.put(messages.encode(kind, **fields))
        self._outbox.flush()

    def flush(self) -> None:
        """Sends the pending data."""
        self._outbox.flush()

    def show_life(self) -> None:
        """Sends regular heartbeats to the supervisor."""
        if self.is_remote:
            self._outbox.beat_for_ever()

    def forgive_silence(self) -> None:
        """Restarts the measurement of silence, because this side has not listened for a while."""
        self._heard_at = time.monotonic()

    def receive(self) -> list[dict[str, Any]]:
        """Returns the messages that have arrived; sets `closed` at the end of the connection."""
        try:
            data = os.read(self.stdout, 1 << 16)
        except BlockingIOError:
            return []
        if not data:
            self.closed = True
            return []
        self._heard_at = time.monotonic()
        found = []
        for line in self._lines.feed(data):
            if self._greeted:
                found.append(messages.decode(line))
            elif line == messages.GREETING:
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
        self._outbox.close()
        if self._popen.stdin is not None and not self._popen.stdin.closed:
            self._popen.stdin.close()

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
        for stream in (self._popen.stdout, self._popen.stderr):
            if stream is not None:
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
