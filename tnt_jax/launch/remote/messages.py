"""The protocol between launcher and supervisor: one JSON object per line.

A first line marks the beginning. The launcher sends `ask`, `start`, `signal`, `stop` and `beat`;
the supervisor sends `answer`, `started`, `refused`, `output`, `asked_to_end`, `exit`, `beat` and
`done`. The field `kind` names the message.
"""

import json
import os
import re
import threading
import time
from typing import Any

_END_OF_LINE = re.compile(rb"(?<=\n)")

GREETING = b"tnt-jax supervisor 1\n"
"""The output before this line comes from the host's login scripts.
"""

BEAT_INTERVAL_S = 1.0
"""Both sides send something at least this often."""


def encode(kind: str, **fields: Any) -> bytes:
    """Returns the line for one message.

    The bytes of a process's output are sent as Latin-1 text, which is lossless.
    """
    return json.dumps({"kind": kind, **fields}, separators=(",", ":")).encode() + b"\n"


class Lines:
    """Splits a stream of bytes into lines, in whatever pieces it arrives.

    Args:
        limit: Bytes after which an incomplete line is cut and ended; None for lines of any length.
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
        self._pieces = []
        self._num_bytes = 0
        return [rest] if rest else []


class Outbox:
    """Data still to be sent through a pipe that may be full.

    Several threads may use it.

    Attributes:
        is_closed: Whether nothing can be sent any longer.
    """

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
        """Sends regular heartbeats from a thread of its own, whatever the other threads wait for.

        The other side must not take this one for dead while it waits for a full terminal, a pager
        or a slow file system.
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
