"""The errors by which a process learns of the end of another, and the last words of this one."""

import contextlib
import sys
from typing import Any

import jax

# What the errors of collectives say whose peer has gone.
_SIGNS_OF_LOSS = (
    "gloo",
    "connection",
    "lost a neighbour",
    "nccl",
    "socket closed",
    "unavailable",
    "disconnected",
    "has ended or left the job",  # As in `shared_sums/sums.c`.
)


class PeerError(RuntimeError):
    """Another process, of that number, has failed, and this one cannot go on without it."""

    def __init__(self, process: int, text: str) -> None:
        super().__init__(text)
        self.process = process

    def __reduce__(self) -> tuple[Any, ...]:
        """Returns what makes the same error: pickle passes on the text alone."""
        return type(self), (self.process, *self.args)


def gist(error: BaseException) -> str:
    """Returns an error in one line; of one that quotes a traceback, that traceback's last."""
    lines = f"{type(error).__name__}: {error}".strip().splitlines()
    line = (
        lines[-1]
        if any(line.startswith("Traceback") for line in lines[1:]) or "Traceback (" in lines[0]
        else lines[0]
    )
    return line if len(line) <= 200 else line[:200] + "..."


def flush() -> None:
    """Writes out what was printed, before the process ends without leaving Python."""
    for stream in (sys.stdout, sys.stderr):
        # Nobody reads it any more, or it was closed.
        with contextlib.suppress(OSError, ValueError):
            stream.flush()


def tells_of_loss(error: BaseException) -> bool:
    """Returns whether an error is that of a collective whose peer has gone."""
    text = str(error).lower()
    # A program that fails while it is started raises a ValueError.
    is_of_collective = isinstance(error, (jax.errors.JaxRuntimeError, ConnectionError)) or (
        isinstance(error, ValueError) and text.startswith(("unknown: gloo", "unavailable: process"))
    )
    return is_of_collective and any(sign in text for sign in _SIGNS_OF_LOSS)


def say(first: str, *others: str) -> None:
    """Prints why this process ends."""
    print("\n".join([f"[tnt_jax] ERROR: {first}", *others]), file=sys.stderr)
    flush()
