"""Times the steps of a trainer on its data, and traces some of them for what they are made of."""

import re
import time
from collections.abc import Callable, Iterable, Iterator
from itertools import pairwise
from typing import NamedTuple

import jax
import numpy as np

from tnt_jax import _jax
from tnt_jax.data.sources import HostBatch
from tnt_jax.distributed.host import collectives
from tnt_jax.distributed.liveness import phases
from tnt_jax.train.contracts import Batch, CountedRows
from tnt_jax.train.execution import DeviceBatches, choose_num_steps
from tnt_jax.train.explaining import CountedCompilations
from tnt_jax.train.trainer import Trainer, device_feed

# Steps that compile and warm up; with "auto", as many are then timed to choose the steps of a
# program.
_WARM_STEPS = 5
_MOST_TRACED = 10
# Batches of a new shape compile a program: then the steps are timed anew.
_MOST_TRIES = 8

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


class Times(NamedTuple):
    """Steps that were timed, their real rows, and the seconds of the slowest process."""

    steps: int
    rows: int
    seconds: float
    shares: tuple[float, ...]  # Of `shares_of` for further steps, mean over the processes.


def time_steps(
    trainer: Trainer,
    batches: Iterator[HostBatch],
    unpack: Callable[[HostBatch], Batch],
    *,
    threaded: bool,
    num_steps: int | None,
    steps: int,
) -> Times:
    """Returns what steps take, after those that compile and warm up; all processes must call it.

    The batches, which have no end, are prepared ahead by a thread if `threaded`. A program has
    `num_steps`, or as many as `fit` chooses; `steps` is rounded up to whole ones. A RuntimeError
    says that programs were compiled within the timed steps again and again.
    """
    phases.here().epoch = 1
    if num_steps is None:
        with device_feed(trainer, batches, unpack, threaded=threaded) as feed:
            loop = TimedLoop(trainer, iter(feed))
            loop.run(_WARM_STEPS)
            _, seconds = loop.run(_WARM_STEPS)
        chosen = choose_num_steps(seconds / _WARM_STEPS, available=None)
        num_steps = int(collectives.broadcast(chosen))
    with device_feed(trainer, batches, unpack, threaded=threaded, num_steps=num_steps) as feed:
        loop = TimedLoop(trainer, iter(feed))
        loop.run(-(-_WARM_STEPS // num_steps))
        rows, seconds = _time(loop, -(-steps // num_steps))
        with _jax.profile() as recording, jax.profiler.TraceAnnotation(STEPS):
            loop.run(-(-min(steps, _MOST_TRACED) // num_steps))
    shares = collectives.all_gather(np.array(shares_of(events_of(recording)))).mean(axis=0)
    return Times(-(-steps // num_steps) * num_steps, rows, seconds, tuple(shares.tolist()))


class TimedLoop:
    """Trains on batches, as many at a time as it is asked to."""

    def __init__(self, trainer: Trainer, groups: Iterator[DeviceBatches]) -> None:
        self._trainer = trainer
        self._groups = groups
        self._index, self._sums = 0, None

    def run(self, num_programs: int) -> tuple[int, float]:
        """Runs some programs to their end; returns their real rows, and seconds."""
        hooks = CountedRows()
        start = time.perf_counter()
        with phases.in_phase("steps"):
            self._sums = self._trainer.train_epoch(
                self._next(num_programs), hooks, first_index=self._index, sums=self._sums
            )
            jax.block_until_ready((self._trainer.state, self._sums))
        return hooks.number, time.perf_counter() - start

    def _next(self, num_programs: int) -> Iterator[DeviceBatches]:
        for _ in range(num_programs):
            with jax.profiler.TraceAnnotation(DATA):
                group = next(self._groups)
            self._index += group.num_steps
            yield group


def _time(loop: TimedLoop, num_programs: int) -> tuple[int, float]:
    """Returns rows and seconds of programs within which none was compiled."""
    for _ in range(_MOST_TRIES):
        with CountedCompilations() as compiled:
            rows, seconds = loop.run(num_programs)
        slowest, has_compiled = collectives.all_gather(
            np.array([seconds, compiled.number > 0])
        ).max(axis=0)
        if not has_compiled:
            return rows, float(slowest)
    raise RuntimeError(
        f"Programs were compiled in each of {_MOST_TRIES} tries to time {num_programs} of them: "
        "too many batches have shapes of their own. Pad them to a few shapes."
    )


class Event(NamedTuple):
    """Operation of a device, or annotation of the thread that trains, with its times in ns."""

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
    covered, reached = 0.0, float("-inf")
    for start, end in sorted((event.start, event.end) for event in events):
        covered += max(end - max(start, reached), 0)
        reached = max(end, reached)
    return covered
