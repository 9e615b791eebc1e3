"""The terminal output: that of the ranks, and the launcher's own messages."""

import os
import re
import signal
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol, TextIO

from tnt_jax.launch.messages import Lines
from tnt_jax.launch.plan import Process

_END_OF_OUTPUT = " End of its output:"
_LAST_LINES = 30
_LONGEST_LINE_BYTES = 1 << 16
_TRACEBACK = re.compile(r"\s*Traceback \(most recent call last\):")


class Output(Protocol):
    """The receiver of the processes' output."""

    def write(self, rank: int, name: str, data: bytes) -> None:
        """Receives a piece of output of a rank; `name` is "stdout" or "stderr"."""

    def finish(self, rank: int) -> None:
        """Receives the end of a rank's output."""

    def shows(self, rank: int) -> bool:
        """Returns whether the user has seen the error output of a rank."""
        ...


class Screen:
    """Writes the processes' output to the launcher's own.

    If several ranks write, each line begins with its rank.

    If only one rank writes to a stream, its output is passed on unchanged and at once, so that
    progress bars work. If several write, lines longer than 64 KiB are cut.
    """

    def __init__(self, processes: Iterable[Process]) -> None:
        self._writers: dict[str, list[int]] = {"stdout": [], "stderr": []}
        for process in processes:
            for name in process.shown:
                self._writers[name].append(process.rank)
        self._lines = {
            (name, rank): Lines(_LONGEST_LINE_BYTES)
            for name, ranks in self._writers.items()
            for rank in ranks
            if len(ranks) > 1
        }

    def write(self, rank: int, name: str, data: bytes) -> None:
        """Shows a piece of output of a rank.

        Raises:
            BrokenPipeError: If the output has been closed; later output is discarded.
        """
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
    try:
        stream.buffer.write(data)
        stream.flush()
    except BrokenPipeError:
        discard(stream)
        raise


def discard(stream: TextIO) -> None:
    """Discards a stream that has no reader any more, including its buffer."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)


def say(text: str) -> None:
    """Prints a message of the launcher."""
    try:
        print(
            "\n".join(f"[tnt-jax] {line}" for line in text.splitlines()),
            file=sys.stderr,
            flush=True,
        )
    except BrokenPipeError:
        discard(sys.stderr)


def failure_report(host: str, message: Mapping[str, Any], *, shown: bool) -> str:
    """Returns the report on a failed process.

    It says which process failed and how, and has the end of its output unless that was shown.

    Args:
        host: The host of the process.
        message: What its supervisor says of its end.
        shown: Whether the user has seen its error output.
    """
    rank, code, pid = message["rank"], message["code"], message["pid"]
    text = f"Rank {rank} on {host} {_how(code)}. It was process {pid}."
    if code == 128 + signal.SIGKILL and message["memory_kills"]:
        text += (
            f" The kernel of {host} has killed {message['memory_kills']} process(es) for lack of "
            "memory since the start."
        )
    tail = message["tail"].encode("latin-1").decode(errors="replace")
    last = excerpt(tail.rstrip().splitlines())
    if shown or not last:
        return text
    return "\n".join([text + _END_OF_OUTPUT, *(f"  {line}" for line in last)])


def gist(report: str) -> str:
    """Returns a report in one line, without the output of the failed process."""
    return report.splitlines()[0].removesuffix(_END_OF_OUTPUT)


def _how(code: int) -> str:
    if code <= 128:
        return f"failed with exit code {code}"
    try:
        name = f" ({signal.Signals(code - 128).name})"
    except ValueError:  # A real-time signal, or an exit code of the script's own.
        name = ""
    return f"was ended by signal {code - 128}{name}"


def excerpt(lines: Sequence[str]) -> list[str]:
    """Returns the last lines of an output, preceded by the errors of earlier tracebacks."""
    begin = max(0, len(lines) - _LAST_LINES)
    errors: list[int] = []
    for index, line in enumerate(lines):
        if _TRACEBACK.match(line):
            margin = len(line) - len(line.lstrip())
            ends = (
                i
                for i in range(index + 1, len(lines))
                if lines[i].strip() and lines[i][: margin + 1].strip()
            )
            errors.append(next(ends, len(lines)))
    found = [line for index in errors if index < begin for line in (lines[index], "...")]
    return [*found, *lines[begin:]]


def loss_report(rank: int, host: str, ended: Sequence[int]) -> str:
    """Returns the report on a process that could not continue without others.

    These had ended with exit code 0 without leaving the job.
    """
    names = (
        f"Rank {ended[0]}" if len(ended) == 1 else f"One of the ranks {', '.join(map(str, ended))}"
    )
    return (
        f"{names} ended with exit code 0, but without leaving the job; rank {rank} on {host} "
        "needed it and could not go on."
    )
