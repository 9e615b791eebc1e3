"""The terminal output: that of the ranks, and the launcher's own messages."""

import errno
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TextIO

from tnt_jax.launch.planning.plan import Process
from tnt_jax.launch.remote.connection import Lines

_LONGEST_LINE_BYTES = 1 << 16


class Screen:
    """Writes the processes' output to the launcher's own.

    If only one rank writes to a stream, its output is passed on unchanged and at once, so that
    progress bars work. If several write, each line begins with its rank, and is cut after 64 KiB.
    """

    def __init__(self, processes: Sequence[Process]) -> None:
        self._writers = {
            name: [process.rank for process in processes if name in process.shown]
            for name in ("stdout", "stderr")
        }
        self._lines = {
            (name, rank): Lines(_LONGEST_LINE_BYTES)
            for name, ranks in self._writers.items()
            for rank in ranks
            if len(ranks) > 1
        }

    def write(self, rank: int, name: str, data: bytes) -> None:
        """Shows a piece of output of a rank; after a BrokenPipeError later output is discarded."""
        if (name, rank) not in self._lines:
            _put(name, data)
            return
        for line in self._lines[name, rank].feed(data):
            _put(name, _with_rank(rank, line))

    def finish(self, rank: int) -> None:
        """Shows the last lines, which have no end."""
        for name in self._writers:
            if (name, rank) in self._lines:
                for line in self._lines[name, rank].flush():
                    _put(name, _with_rank(rank, line) + b"\n")

    def shows(self, rank: int) -> bool:
        """Returns whether the error output of a rank has been shown."""
        return rank in self._writers["stderr"]


def _with_rank(rank: int, line: bytes) -> bytes:
    prefix = f"[rank {rank}] ".encode()
    return line if line.startswith(prefix) else prefix + line


def _put(name: str, data: bytes) -> None:
    stream = sys.stdout if name == "stdout" else sys.stderr
    with _until_closed(stream):
        stream.buffer.write(data)
        stream.flush()


@contextmanager
def _until_closed(stream: TextIO) -> Iterator[None]:
    """Discards a stream that has no reader any more; a pipe raises BrokenPipeError all the same."""
    try:
        yield
    except BrokenPipeError:
        discard(stream)
        raise
    except OSError as error:
        if error.errno != errno.EIO:
            raise
        discard(stream)  # The SIGHUP of the terminal ends the job, with its grace period.


def discard(stream: TextIO) -> None:
    """Discards a stream that has no reader any more, including its buffer."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)


def say(text: str) -> None:
    """Prints a message of the launcher."""
    lines = "\n".join(f"[tnt-jax] {line}" for line in text.splitlines())
    with suppress(BrokenPipeError), _until_closed(sys.stderr):
        print(lines, file=sys.stderr, flush=True)
