"""Continues the curve of a scaling to more ranks, with the error that the same model has made."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from tnt_jax.launch.scale.points import Point
from tnt_jax.launch.scale.projection import Measured, fit, why_not_projected

# MB of a bucket: 25 MiB, and 2 MiB between CPU processes.
_BUCKET_MB, _CPU_BUCKET_MB = 26.2, 2.1


class Measurements(Protocol):
    """What a projection needs of a scaling; see `scaling.Scaling`."""

    @property
    def is_weak(self) -> bool:
        """Whether the global batch grew with the ranks."""
        ...

    @property
    def points(self) -> list[Point]:
        """What was measured on each number of ranks."""
        ...


@dataclass(frozen=True)
class ProjectedPoint:
    """A number of ranks that was not measured.

    Attributes:
        ranks: Number of ranks.
        step_s: Seconds of a step.
        examples_per_s: Rows a second.
        efficiency: As of `points.Point`.
    """

    ranks: int
    step_s: float
    examples_per_s: float
    efficiency: float


@dataclass(frozen=True)
class Projection:
    """A curve beyond what was measured.

    Attributes:
        points: Numbers of ranks, increasing.
        checked_ranks: The largest number of ranks that was measured.
        error: Projected step there, from the smaller numbers, divided by the measured step, less 1.
        host_gbit: Rate of a host's link in the model, Gbit/s.
        overlaps: Whether gradients travel during backpropagation in the model.
    """

    points: tuple[ProjectedPoint, ...]
    checked_ranks: int
    error: float
    host_gbit: float
    overlaps: bool

    def lines(self) -> list[str]:
        """Returns what is projected, as text."""
        how = "while gradients are computed" if self.overlaps else "after all are computed"
        return [
            *(
                f"{point.ranks} ranks, projected: {point.examples_per_s:.4g} examples/s, "
                f"{point.step_s * 1000:.2f} ms/step, efficiency {point.efficiency:.2f}"
                for point in self.points
            ),
            f"The model sends gradients {how}, at {self.host_gbit:.3g} Gbit/s a host. From the "
            f"smaller numbers of ranks it projects a step on {self.checked_ranks} that is "
            f"{100 * abs(self.error):.0f} % too {'long' if self.error > 0 else 'short'}. "
            "Stragglers, input and shared switches are not in it.",
        ]

    @classmethod
    def from_dict(cls, kept: dict[str, Any]) -> "Projection":
        """Returns the projection that `dataclasses.asdict` made a dict of."""
        return cls(**{**kept, "points": tuple(ProjectedPoint(**point) for point in kept["points"])})


def as_dict(projection: Projection | None) -> dict[str, Any] | None:
    """Returns a projection as plain data."""
    return None if projection is None else asdict(projection)


def continue_curve(
    scaling: Measurements, to_ranks: int, *, link_gbit: float | None = None
) -> Projection:
    """Returns the projection to doubled numbers of ranks, up to a given one.

    Args:
        scaling: What was measured.
        to_ranks: The largest number of ranks.
        link_gbit: Rate of a host's link in Gbit/s; None to find it.

    Raises:
        ValueError: If what was measured does not suffice, or goes as far.
    """
    points = scaling.points
    largest = points[-1]
    if to_ranks <= largest.ranks:
        raise ValueError(
            f"--project ({to_ranks}) must be above the numbers of ranks that are measured."
        )
    hosts = {point.ranks: point.hosts for point in points}
    if reason := why_not_projected(hosts, link_gbit=link_gbit):
        raise ValueError(f"There is no projection: {reason}.")
    measured = [
        Measured(p.ranks, p.hosts, p.step_s.median * 1000, _local_ms(scaling, p.ranks))
        for p in points
    ]
    per_host = max(-(-point.ranks // point.hosts) for point in points)
    buckets = _buckets(largest)

    def model_of(those: Sequence[Measured]) -> Any:
        return fit(those, buckets, gpus_per_host=per_host, link_gbit=link_gbit)

    last = measured[-1]
    error = model_of(measured[:-1]).step_ms(last.ranks, last.local_ms) / last.step_ms - 1
    model = model_of(measured)
    numbers = _doubled(largest.ranks, to_ranks)
    return Projection(
        tuple(_projected(scaling, n, model.step_ms(n, _local_ms(scaling, n))) for n in numbers),
        largest.ranks,
        error,
        model.links.host_gbytes * 8,
        model.overlap,
    )


def _local_ms(scaling: Measurements, ranks: int) -> float:
    """Returns what a step takes without communication: with strong scaling it is shared out."""
    first = scaling.points[0]
    local_ms = first.step_s.median * 1000 * (1 - first.communication)
    return local_ms if scaling.is_weak else local_ms * first.ranks / ranks


def _projected(scaling: Measurements, ranks: int, step_ms: float) -> ProjectedPoint:
    first = scaling.points[0]
    rows = first.examples_per_s.median * first.step_s.median
    rows *= ranks / first.ranks if scaling.is_weak else 1
    speed = rows / step_ms * 1000
    each = first.examples_per_s.median / first.ranks
    return ProjectedPoint(ranks, step_ms / 1000, speed, speed / ranks / each)


def _buckets(point: Point) -> list[float]:
    mb = point.gradient_bytes / 1e6
    number = max(1, round(mb / (_CPU_BUCKET_MB if point.device == "cpu" else _BUCKET_MB)))
    return [mb / number] * number


def _doubled(first: int, last: int) -> list[int]:
    numbers = [first * 2]
    while numbers[-1] * 2 < last:
        numbers.append(numbers[-1] * 2)
    return [number for number in numbers if number < last] + [last]
