"""The language between launcher and supervisor: one JSON object a line, after a line that says that the talk begins.

The launcher sends `ask`, `start`, `signal`, `stop` and `beat`; the supervisor sends `answer`, `started`, `refused`, `output`,
`exit`, `beat` and `done`. The field `kind` names the message.
"""

import json
import os
import threading
import time
from typing import Any

GREETING = b"tnt-jax supervisor 1\n"
"""Everything a supervisor's output has before this line was printed by the host's own login scripts."""

BEAT_INTERVAL_S = 1.0
"""Both sides say something at least this often."""


def encode(kind: str, **fields: Any) -> bytes:
    """Returns the line for one message. Bytes of a process's output travel as Latin-1 text, which loses nothing."""
    return json.dumps({"kind": kind, **fields}, separators=(",", ":")).encode() + b"\n"


class Lines:
    """Cuts a stream of bytes into lines, whatever pieces it arrives in."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[bytes]:
        """Returns the lines, with their ends, that `data` completes."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        return [line + b"\n" for line in lines]

    def flush(self) -> list[bytes]:
        """Returns the last line if it has no end, and forgets it."""
        rest, self._rest = self._rest, b""
        return [rest] if rest else []


class Outbox:
    """What is still to be sent through a pipe that may be full. Several threads may use it.

    Attributes:
        is_closed: Whether nothing can be sent any more.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._waiting = bytearray()
        self._lock = threading.Lock()
        self.is_closed = False

    def __len__(self) -> int:
        return len(self._waiting)

    def put(self, data: bytes) -> None:
        """Takes data to be sent; `flush` sends it."""
        with self._lock:
            if not self.is_closed:
                self._waiting += data

    def flush(self) -> None:
        """Sends as much as the pipe takes; closes the box if nobody reads from it any more."""
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
        """Forgets what is waiting and takes nothing more, so that the descriptor can be closed."""
        with self._lock:
            self._waiting.clear()
            self.is_closed = True

    def beat_for_ever(self) -> None:
        """Gives a sign of life at regular intervals from a thread of its own, whatever the others wait for.

        The other side must not take us for dead while we wait for a full terminal, a pager or a slow file system.
        """

        def beat() -> None:
            while not self.is_closed:
                if not self._waiting:
                    self.put(encode("beat"))
                self.flush()
                time.sleep(BEAT_INTERVAL_S)

        threading.Thread(target=beat, daemon=True).start()


def decode(line: bytes) -> dict[str, Any]:
    """Returns the message that a line carries."""
    return json.loads(line)
