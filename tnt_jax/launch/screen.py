"""What the user sees: the output of the ranks, and the launcher's own words."""

import sys
from collections.abc import Iterable
from typing import Protocol

from tnt_jax.launch.messages import Lines
from tnt_jax.launch.plan import Process

_LAST_LINES = 30


class Output(Protocol):
    """What a session gives the processes' output to."""

    def write(self, rank: int, name: str, data: bytes) -> None:
        """Takes a piece of output of a rank; `name` is "stdout" or "stderr"."""

    def finish(self, rank: int) -> None:
        """Takes note that no more will come from a rank."""

    def shows(self, rank: int) -> bool:
        """Returns whether the user has seen the error output of a rank."""
        ...


class Screen:
    """Writes the processes' output to the launcher's own, each line with its rank where several ranks write.

    A stream that one rank alone writes to passes unchanged and at once, so that progress bars work.
    """

    def __init__(self, processes: Iterable[Process]) -> None:
        self._writers: dict[str, list[int]] = {"stdout": [], "stderr": []}
        for process in processes:
            for name in process.shown:
                self._writers[name].append(process.rank)
        self._lines = {(name, rank): Lines() for name, ranks in self._writers.items() for rank in ranks if len(ranks) > 1}

    def write(self, rank: int, name: str, data: bytes) -> None:
        """Shows a piece of output of a rank."""
        if (name, rank) not in self._lines:
            _put(name, data)
            return
        for line in self._lines[name, rank].feed(data):
            _put(name, _with_rank(rank, line))

    def finish(self, rank: int) -> None:
        """Shows last lines that have no end."""
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
    stream.buffer.write(data)
    stream.flush()


def say(text: str) -> None:
    """Prints the launcher's own words."""
    print("\n".join(f"[tnt-jax] {line}" for line in text.splitlines()), file=sys.stderr, flush=True)


def failure_report(rank: int, host: str, code: int, tail: bytes, *, shown: bool) -> str:
    """Returns what is said about the first process that failed: which, how, and the end of its output unless shown."""
    how = f"was ended by signal {code - 128}" if code > 128 else f"failed with exit code {code}"
    text = f"Rank {rank} on {host} {how}."
    last = tail.decode(errors="replace").rstrip().splitlines()[-_LAST_LINES:]
    if shown or not last:
        return text
    return "\n".join([text + " End of its output:", *(f"  {line}" for line in last)])
