"""Reports on the end of a process, from its exit code and its last words."""

import re
import signal
from collections.abc import Mapping, Sequence
from typing import Any

from tnt_jax.settings import EXPLAIN_MARK, RECORD_MARK

_END_OF_OUTPUT = " End of its output:"
_LAST_LINES = 30
_TRACEBACK = re.compile(r"\s*Traceback \(most recent call last\):")
# What a process says of the one without which it cannot go on: the first sentence of the messages
# of distributed/leaving/exits.py and distributed/liveness/.
_CULPRIT = re.compile(
    r"\[tnt_jax\] ERROR: ((?:The clock of \S+ was changed|Process \d+(?: has left the job"
    r"| has ended without leaving the job| has not posted| has made no progress"
    r"|, which coordinates the job, has not answered)).*?)\.(?=\s)"
)


def failure_report(host: str, message: Mapping[str, Any], *, shown: bool) -> str:
    """Returns the report on a failed process, from what its supervisor says of its end.

    It has the end of the process's output unless the user has seen that. If the process said that
    another one was the cause, the report begins with that.
    """
    rank, code, pid = message["rank"], message["code"], message["pid"]
    text = f"Rank {rank} on {host} {how_it_ended(code)}. It was process {pid}."
    if code == 128 + signal.SIGKILL and message["memory_kills"]:
        text += (
            f" The kernel of {host} has killed {message['memory_kills']} process(es) for lack of "
            "memory since the start."
        )
    tail = message["tail"].encode("latin-1").decode(errors="replace")
    if culprits := _CULPRIT.findall(tail + "\n"):
        text = f"{culprits[-1]}. {text}"
    lines = tail.rstrip().splitlines()
    last = excerpt([line for line in lines if not line.startswith((RECORD_MARK, EXPLAIN_MARK))])
    if shown or not last:
        return text
    return "\n".join([text + _END_OF_OUTPUT, *(f"  {line}" for line in last)])


def gist(report: str) -> str:
    """Returns a report in one line, without the output of the failed process."""
    return report.splitlines()[0].removesuffix(_END_OF_OUTPUT)


def how_it_ended(code: int) -> str:
    """Returns how a process ended, after its name, by its exit code."""
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


def preemption_cause(tail: bytes) -> str:
    """Returns what preempted a process, from the end of its output; "" if it does not say."""
    found = re.search(rb"(SIG[A-Z0-9]+ came(?: to process \d+)?): the state ", tail)
    return f"it was preempted: {found[1].decode()}, and the state is saved" if found else ""


def loss_report(rank: int, host: str, ended: Sequence[int]) -> str:
    """Returns the report on a process that could not continue without others, which had ended."""
    names = (
        f"Rank {ended[0]}" if len(ended) == 1 else f"One of the ranks {', '.join(map(str, ended))}"
    )
    return (
        f"{names} ended with exit code 0, but without leaving the job; rank {rank} on {host} "
        "needed it and could not go on."
    )
