"""The language between launcher and supervisor: one JSON object a line, after a line that says that the talk begins.

The launcher sends `ask`, `start`, `signal`, `stop` and `beat`; the supervisor sends `answer`, `started`, `refused`, `output`,
`exit`, `beat` and `done`. The field `kind` names the message.
"""

import json
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


def decode(line: bytes) -> dict[str, Any]:
    """Returns the message that a line carries."""
    return json.loads(line)
