"""Filters the lines that Gloo prints on standard output for each group of processes.

Gloo is the library for CPU collectives.
"""

import re

_BEGIN = b"[Gloo] Rank "
_GREETING = re.compile(
    rb"\[Gloo\] Rank \d+ is connected to \d+ peer ranks\. Expected number of connected peer "
    rb"ranks is : \d+\r?\n"
)
_LONGEST_BYTES = 128


class WithoutGreetings:
    """Passes on a stream without Gloo's greetings.

    Greetings arrive in pieces: what may become one is held back until it is clear.
    """

    def __init__(self) -> None:
        self._waiting = b""

    def feed(self, data: bytes) -> bytes:
        """Returns the data to show so far; `data` is the next piece of the stream."""
        data = _GREETING.sub(b"", self._waiting + data)
        begin = data.rfind(_BEGIN)
        is_open = begin >= 0 and b"\n" not in data[begin:] and len(data) - begin < _LONGEST_BYTES
        data, self._waiting = (data[:begin], data[begin:]) if is_open else (data, b"")
        return data

    def flush(self) -> bytes:
        """Returns the data held back at the end of the stream."""
        rest, self._waiting = self._waiting, b""
        return rest
