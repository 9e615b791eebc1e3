"""Times several kinds of steps in turns, so that a disturbance of the machine meets all alike."""

import time
from collections.abc import Callable, Collection, Generator, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from tnt_jax.distributed.host import collectives

_WARM_PROGRAMS = 2


class CountedCompilations:
    """Counts the programs that are compiled within a block, and the seconds that it takes."""

    def __init__(self) -> None:
        self.number, self.seconds = 0, 0.0

    def __enter__(self) -> "CountedCompilations":
        """Begins to count."""
        jax.monitoring.register_event_duration_secs_listener(self._note)
        return self

    def __exit__(self, *_: object) -> None:
        """Ends the count."""
        jax.monitoring.unregister_event_duration_listener(self._note)

    def _note(self, event: str, duration_secs: float, **_: Any) -> None:
        self.number += event.endswith("backend_compile_duration")
        if event.startswith("/jax/core/compile/"):
            self.seconds += duration_secs


class Timed(NamedTuple):
    """What a program of each kind takes.

    Attributes:
        seconds: By name, seconds of a program `[rounds, processes]`.
        compiled_s: By name, seconds of it in which this process compiled, `[rounds]`.
    """

    seconds: dict[str, np.ndarray]
    compiled_s: dict[str, np.ndarray]

    def slowest(self, kind: str) -> np.ndarray:
        """Returns the seconds of a program of a kind on the slowest process, `[rounds]`."""
        return np.nanmax(self.seconds[kind], axis=1)

    def share(self, kind: str, without: str, *, of: str) -> float:
        """Returns which share of a program one kind takes longer than another, at the median.

        It is that of process 0, on all of them.
        """
        longer = np.median(self.slowest(kind) - self.slowest(without))
        return float(collectives.broadcast(longer / np.median(self.slowest(of))))


def turns(
    kinds: Mapping[str, Callable[[int], None] | None],
    *,
    rounds: int,
    programs: int,
    alone: Collection[str] = (),
) -> Generator[int, None, Timed]:
    """Returns what a program of each kind takes; yields how many programs others are to run.

    All processes must call it with the same kinds, in the same order.

    Args:
        kinds: By name, what runs a number of programs to their end; None if the caller runs them
            before it goes on, such as a custom training loop.
        rounds: How often each kind is timed; a round before compiles and warms up.
        programs: Programs that are timed in a round, after two that are not.
        alone: Kinds that process 0 runs while the others wait; of the others they have NaN.
    """
    seconds: dict[str, list[float]] = {name: [] for name in kinds}
    compiled_s: dict[str, list[float]] = {name: [] for name in kinds}
    for round in range(rounds + 1):
        for name, run in kinds.items():
            collectives.barrier()
            own = in_compiler = float("nan")
            if name not in alone or jax.process_index() == 0:
                yield from _run(run, _WARM_PROGRAMS)
                with CountedCompilations() as compiled:
                    start = time.perf_counter()
                    yield from _run(run, programs)
                    own = (time.perf_counter() - start) / programs
                in_compiler = compiled.seconds / programs
            if round:
                seconds[name].append(own)
                compiled_s[name].append(in_compiler)
    collectives.barrier()
    return Timed(
        {
            name: collectives.all_gather(np.array(own)).swapaxes(0, 1)
            for name, own in seconds.items()
        },
        {name: np.array(own) for name, own in compiled_s.items()},
    )


def _run(run: Callable[[int], None] | None, programs: int) -> Generator[int, None, None]:
    if run is None:
        yield programs
    else:
        run(programs)


def run_to_end(course: Generator[int, None, Timed]) -> Timed:
    """Returns the result of `turns` in which all kinds run by themselves."""
    try:
        next(course)
    except StopIteration as end:
        return end.value
    raise AssertionError("A kind is left to the caller.")
