"""Where the time of traced steps went: computing, exchanging, waiting for data, or the host."""

import re
from collections.abc import Iterable
from itertools import pairwise
from typing import NamedTuple

from tnt_jax import _jax

STEPS = "tnt_jax steps"
"""The annotation of the traced steps, in the thread that trains."""
DATA = "tnt_jax data"
"""The annotation of a wait for the next batch, in that thread."""

# Operations between ranks, by their names in XLA's programs: those of the compiler, kernels of
# NCCL, and sums of CPU processes in shared memory, named by what made them.
_EXCHANGES = re.compile(
    r"all-reduce|all-gather|reduce-scatter|all-to-all|collective|^(send|recv)\b|nccl"
    r"|^psum",
    re.IGNORECASE,
)
# Operations that contain others, which are listed, too.
_CONTAINERS = re.compile(r"(while|call|conditional)(\.\d+)?$")


class Event(NamedTuple):
    """What a device (an operation) or the thread that trains (an annotation) did, in ns."""

    name: str
    start: float
    end: float
    is_operation: bool


def events_of(recording: _jax.Recording) -> list[Event]:
    """Returns operations of devices and our own annotations."""
    assert recording.data is not None
    found = []
    for plane in recording.data.planes:
        is_device = plane.name.startswith("/device:")
        for line in plane.lines:
            of_stream = is_device and line.name.startswith("Stream")
            for event in line.events:
                is_operation = of_stream or any(name == "hlo_op" for name, _ in event.stats)
                if is_operation or event.name in (STEPS, DATA):
                    end = event.start_ns + event.duration_ns
                    found.append(Event(event.name, event.start_ns, end, is_operation))
    return found


def shares_of(events: Iterable[Event]) -> tuple[float, float, float, float]:
    """Returns the shares of computing, exchanging, waiting for data, and of the host.

    They make 1 together. A moment counts as computing if any device of the process computes;
    otherwise as exchanging if one exchanges; otherwise as data if the thread that trains waits for
    a batch; otherwise as the host's.

    Raises:
        ValueError: If there is not one annotation of the steps, or no operation of a device within
            it.
    """
    events = list(events)
    steps = [event for event in events if event.name == STEPS and not event.is_operation]
    if len(steps) != 1:
        raise ValueError(f"The trace must have one {STEPS!r}, but has {len(steps)}.")
    start, end = steps[0].start, steps[0].end
    inside = [
        event._replace(start=max(event.start, start), end=min(event.end, end))
        for event in events
        if event.end > start and event.start < end
    ]
    operations = [e for e in inside if e.is_operation and not _CONTAINERS.match(e.name)]
    if not operations:
        raise ValueError("The profiler has recorded no operation of a device.")
    computing = [e for e in operations if not _EXCHANGES.search(e.name)]
    waiting = [e for e in inside if e.name == DATA and not e.is_operation]
    covered = [_covered(events) for events in (computing, operations, operations + waiting)]
    total = end - start
    ends = [0.0, *covered, total]
    compute, exchange, data, host = ((b - a) / total for a, b in pairwise(ends))
    return compute, exchange, data, host


def _covered(events: Iterable[Event]) -> float:
    """Returns the nanoseconds in which any of the events goes on."""
    joined: list[tuple[float, float]] = []
    for start, end in sorted((event.start, event.end) for event in events):
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(joined[-1][1], end))
        else:
            joined.append((start, end))
    return sum(end - start for start, end in joined)
