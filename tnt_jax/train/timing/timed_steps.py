"""Times the steps of a trainer on its data, and traces some of them."""

import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import numpy as np

from tnt_jax import _jax
from tnt_jax.data.sources import HostBatch
from tnt_jax.distributed.host import collectives
from tnt_jax.distributed.liveness import phases
from tnt_jax.train.contracts import Batch
from tnt_jax.train.execution import DeviceBatches, choose_num_steps
from tnt_jax.train.timing.trace_shares import DATA, STEPS, events_of, shares_of
from tnt_jax.train.trainer import Trainer, device_feed

# Steps that compile and warm up; with "auto", as many are then timed to choose the steps of a
# program.
_WARM_STEPS = 5
_MOST_TRACED = 10
# Batches of a new shape compile a program: then the steps are timed anew.
_MOST_TRIES = 8


class Times(NamedTuple):
    """Steps that were timed, their real rows, and the seconds of the slowest process.

    The shares are those of `shares_of` for further steps, mean over the processes.
    """

    steps: int
    rows: int
    seconds: float
    shares: tuple[float, ...]


class _CountedCompilations:
    def __init__(self) -> None:
        self.number = 0

    def __enter__(self) -> "_CountedCompilations":
        jax.monitoring.register_event_duration_secs_listener(self._note)
        return self

    def __exit__(self, *_: object) -> None:
        jax.monitoring.unregister_event_duration_listener(self._note)

    def _note(self, event: str, duration_secs: float, **_: Any) -> None:
        self.number += event.endswith("backend_compile_duration")


class _Rows:
    def __init__(self) -> None:
        self.number = 0

    def on_batch_begin(self, index: int) -> None:
        """Does nothing."""

    def on_batch_end(self, index: int, sums: Any, num_rows: int) -> bool:
        """Counts rows; the loop goes on."""
        self.number += num_rows
        return False


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
        num_steps = _choose(trainer, batches, unpack, threaded=threaded)
    with device_feed(trainer, batches, unpack, threaded=threaded, num_steps=num_steps) as feed:
        loop = _Loop(trainer, iter(feed))
        loop.run(-(-_WARM_STEPS // num_steps))
        rows, seconds = _time(loop, -(-steps // num_steps))
        shares = _trace(loop, -(-min(steps, _MOST_TRACED) // num_steps))
    return Times(-(-steps // num_steps) * num_steps, rows, seconds, shares)


def _choose(
    trainer: Trainer,
    batches: Iterator[HostBatch],
    unpack: Callable[[HostBatch], Batch],
    *,
    threaded: bool,
) -> int:
    with device_feed(trainer, batches, unpack, threaded=threaded) as feed:
        loop = _Loop(trainer, iter(feed))
        loop.run(_WARM_STEPS)
        _, seconds = loop.run(_WARM_STEPS)
    return int(collectives.broadcast(choose_num_steps(seconds / _WARM_STEPS, available=None)))


class _Loop:
    def __init__(self, trainer: Trainer, groups: Iterator[DeviceBatches]) -> None:
        self._trainer = trainer
        self._groups = groups
        self._index, self._sums = 0, None

    def run(self, num_programs: int) -> tuple[int, float]:
        """Runs some programs to their end; returns their real rows, and seconds."""
        hooks = _Rows()
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


def _time(loop: _Loop, num_programs: int) -> tuple[int, float]:
    """Returns rows and seconds of programs within which none was compiled."""
    for _ in range(_MOST_TRIES):
        with _CountedCompilations() as compiled:
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


def _trace(loop: _Loop, num_programs: int) -> tuple[float, ...]:
    """Returns the shares of programs, mean over the processes."""
    with _jax.profile() as recording, jax.profiler.TraceAnnotation(STEPS):
        loop.run(num_programs)
    own = np.array(shares_of(events_of(recording)))
    return tuple(float(share) for share in collectives.all_gather(own).mean(axis=0))
