"""What was measured on each number of ranks: medians and spreads over the rounds."""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from tnt_jax.launch.scale.runs import Run


class Spread(NamedTuple):
    """A number that was measured in several rounds."""

    median: float
    lowest: float
    highest: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread":
        """Returns the spread of at least one value."""
        return cls(statistics.median(values), min(values), max(values))


@dataclass(frozen=True)
class Point:
    """One number of ranks.

    Attributes:
        ranks: Number of ranks.
        global_batch: Rows of a global batch.
        rounds: Number of rounds.
        examples_per_s: Real rows a second.
        step_s: Seconds of a step.
        efficiency: Examples a second and rank, divided by those of the first number of ranks in the
            same round.
        compute, communication, data, host: Medians of the `Shares`.
        compile_s: Median.
        memory_bytes: Highest.
        hosts: Number of hosts.
        device: Kind of the devices.
        gradient_bytes: Gradients that the ranks sum in a step.
    """

    ranks: int
    global_batch: int
    rounds: int
    examples_per_s: Spread
    step_s: Spread
    efficiency: Spread
    compute: float
    communication: float
    data: float
    host: float
    compile_s: float
    memory_bytes: int
    hosts: int
    device: str
    gradient_bytes: int


def points_of(runs: Sequence[Run]) -> list[Point]:
    """Returns what runs measured on each number of ranks, in increasing order."""
    numbers = sorted({run.ranks for run in runs})
    first = {run.round: run for run in runs if run.ranks == numbers[0]}
    return [_point([run for run in runs if run.ranks == number], first) for number in numbers]


def _point(runs: Sequence[Run], first: dict[int, Run]) -> Point:
    def median(value: Callable[[Run], float]) -> float:
        return statistics.median(map(value, runs))

    pairs = [(run, first[run.round]) for run in runs if run.round in first]
    efficiencies = [
        (run.examples_per_s / run.ranks) / (base.examples_per_s / base.ranks) for run, base in pairs
    ]
    return Point(
        ranks=runs[0].ranks,
        global_batch=runs[0].global_batch,
        rounds=len(runs),
        examples_per_s=Spread.of([run.examples_per_s for run in runs]),
        step_s=Spread.of([run.step_s for run in runs]),
        efficiency=Spread.of(efficiencies),
        compute=median(lambda run: run.shares.compute),
        communication=median(lambda run: run.shares.communication),
        data=median(lambda run: run.shares.data),
        host=median(lambda run: run.shares.host),
        compile_s=median(lambda run: run.compile_s),
        memory_bytes=max(run.memory_bytes for run in runs),
        hosts=runs[0].hosts,
        device=runs[0].device,
        gradient_bytes=runs[0].gradient_bytes,
    )


def kept_point(point: Point) -> dict[str, Any]:
    """Returns a point as plain data."""
    return {
        name: value._asdict() if isinstance(value, Spread) else value
        for name, value in vars(point).items()
    }
