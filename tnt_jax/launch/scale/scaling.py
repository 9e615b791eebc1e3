"""Speed and efficiency on several numbers of ranks, as a table, as a picture, and as text.

A `Run` is what one run of a script has measured, as it travels and is kept.
"""

import json
import statistics
from collections.abc import Sequence
from dataclasses import MISSING, asdict, dataclass, field, fields
from functools import partial
from importlib.util import find_spec
from io import BytesIO
from pathlib import Path
from typing import IO, Any, NamedTuple

from tnt_jax.launch.scale.projection import Measured, Model, Outer, fit, why_not_projected

MARK = "tnt-jax scale: "
"""How the line begins in which the first process reports to its launcher what was measured."""


@dataclass(frozen=True)
class Shares:
    """Where the time of traced steps went, mean over the processes; together they make 1."""

    compute: float  # Devices computed.
    communication: float  # Devices only exchanged values, or waited for each other.
    data: float  # Devices had nothing to do while the host waited for, or prepared, data.
    host: float  # Devices had nothing to do for another reason.


@dataclass(frozen=True)
class Run:
    """What one run of a script has measured."""

    ranks: int
    round: int  # Number of the round, from 0.
    hosts: int
    processes: int
    device: str  # Kind of the devices, as JAX names it.
    global_batch: int  # Rows of a global batch.
    steps: int  # Timed steps.
    rows: int  # Real rows of all timed steps.
    seconds: float  # What the timed steps took, on the slowest process.
    shares: Shares  # Where the time of further steps went, by the profiler.
    compile_s: float  # What tracing, lowering and compiling took, up to the first timed step.
    memory_bytes: int  # Most memory of any process: of its devices if they tell, else its own.
    memory_of: str  # `"device"` or `"process"`.
    gradient_bytes: int  # Gradients that the ranks sum in a step.
    versions: dict[str, str]
    outer: Outer | None = None  # What groups of ranks exchange instead, with `LocalSteps`.

    @property
    def step_s(self) -> float:
        """Seconds of a step."""
        return self.seconds / self.steps

    @property
    def examples_per_s(self) -> float:
        """Real rows a second, of all ranks together."""
        return self.rows / self.seconds


def as_line(measured: dict[str, Any]) -> str:
    """Returns the line in which a process reports the fields of a `Run` but `round` and `hosts`."""
    return MARK + json.dumps(measured)


def read_line(line: str, *, round: int, hosts: int) -> Run:
    """Returns the run that a line of `as_line` reports."""
    return read_run(json.loads(line.removeprefix(MARK)) | {"round": round, "hosts": hosts})


def read_run(kept: dict[str, Any]) -> Run:
    """Returns a run from what `dataclasses.asdict` made of it; a ValueError if that is no run."""
    names = {field.name for field in fields(Run)}
    required = {field.name for field in fields(Run) if field.default is MISSING}
    if not isinstance(kept, dict) or not required <= set(kept) <= names:
        raise ValueError(f"A run must have {', '.join(sorted(required))}, but has {kept!r:.200}.")
    outer = kept.get("outer")
    shares = Shares(**kept["shares"])
    return Run(**{**kept, "shares": shares, "outer": outer and Outer(**outer)})


def read_results(text: str, command: str, format: int, key: str) -> dict[str, Any]:
    """Returns the results that a command of `tnt-jax` has written as JSON in a format.

    No other command writes that `key`. A ValueError says that the text is something else.
    """
    results = json.loads(text)
    if not isinstance(results, dict) or key not in results:
        raise ValueError(f"The text is not that of tnt-jax {command}, format {format}.")
    if (found := results.get("format")) != format:
        raise ValueError(
            f"The text is that of tnt-jax {command}, but of format {found}. This version reads "
            f"format {format}: read it with the version that wrote it."
        )
    return results


RESULTS = "scaling.json"
"""Name of the file with the results."""
_FORMAT = 1
# By how much a global batch may be off. Batches of a number of tokens are rounded to rows.
_ODD_BATCH = 0.1
_HEADS = (
    "ranks,batch,examples per s,ms/step,efficiency,compute,exchange,data,host,compile s,MiB"
).split(",")
# MB of a bucket: 25 MiB, and 2 MiB between CPU processes.
_BUCKET_MB, _CPU_BUCKET_MB = 26.2, 2.1
# What the picture calls the shares of a step.
_SHARES = {
    "compute": "compute",
    "communication": "exchange",
    "data": "waiting for data",
    "host": "host",
}


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
    """One number of ranks; what is not described here is as of `Run` and `Shares`."""

    ranks: int
    global_batch: int
    rounds: int
    examples_per_s: Spread
    step_s: Spread
    # Examples a second and rank, divided by those of the first number of ranks in the same round.
    efficiency: Spread
    # Medians.
    compute: float
    communication: float
    data: float
    host: float
    compile_s: float
    memory_bytes: int  # The highest.
    hosts: int
    device: str
    gradient_bytes: int


def _point(runs: Sequence[Run], first: dict[int, Run]) -> Point:
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
        **{name: statistics.median(getattr(run.shares, name) for run in runs) for name in _SHARES},
        compile_s=statistics.median(run.compile_s for run in runs),
        memory_bytes=max(run.memory_bytes for run in runs),
        hosts=runs[0].hosts,
        device=runs[0].device,
        gradient_bytes=runs[0].gradient_bytes,
    )


def _kept_point(point: Point) -> dict[str, Any]:
    return {
        name: value._asdict() if isinstance(value, Spread) else value
        for name, value in vars(point).items()
    }


@dataclass(frozen=True)
class ProjectedPoint:
    """What a number of ranks is projected to do, that was not measured; see `Point`."""

    ranks: int
    step_s: float
    examples_per_s: float
    efficiency: float
    # What a host sends to others in a step, MB; None in results of earlier versions.
    host_mb: float | None = None

    @property
    def line(self) -> str:
        """Returns it as text."""
        sent = "" if self.host_mb is None else f"; a host sends {self.host_mb:.3g} MB/step"
        return (
            f"{self.ranks} ranks, projected: {self.examples_per_s:.4g} examples/s, "
            f"{self.step_s * 1000:.2f} ms/step, efficiency {self.efficiency:.2f}{sent}"
        )


@dataclass(frozen=True)
class Projection:
    """A curve beyond what was measured."""

    points: tuple[ProjectedPoint, ...]  # Numbers of ranks, increasing.
    checked_ranks: int  # The largest number of ranks that was measured.
    # Projected step there, from the smaller numbers, divided by the measured step, less 1.
    error: float
    host_gbit: float  # Rate of a host's link in the model, Gbit/s.
    overlaps: bool  # Whether gradients travel during backpropagation in the model.
    outer: Outer | None = None  # What travels between groups instead, with `LocalSteps`.

    def lines(self) -> list[str]:
        """Returns what is projected, as text."""
        what = f"gradients {'while they' if self.overlaps else 'after all'} are computed"
        if (outer := self.outer) is not None:
            what = (
                f"outer updates of {outer.mb:.3g} MB from each group of {outer.ranks} rank(s) to "
                f"each other one in {outer.every} steps, {outer.fragments} fragment(s) during "
                f"{outer.delay} step(s) each"
            )
        return [
            *(point.line for point in self.points),
            f"The model sends {what}, at {self.host_gbit:.3g} Gbit/s a host. From the "
            f"smaller numbers of ranks it projects a step on {self.checked_ranks} that is "
            f"{100 * abs(self.error):.0f} % too {'long' if self.error > 0 else 'short'}. "
            "Stragglers, input and shared switches are not in it.",
        ]

    @classmethod
    def from_dict(cls, kept: dict[str, Any]) -> "Projection":
        """Returns the projection that `dataclasses.asdict` made a dict of."""
        points = tuple(ProjectedPoint(**point) for point in kept["points"])
        outer = kept.get("outer")
        return cls(**{**kept, "points": points, "outer": outer and Outer(**outer)})


@dataclass(frozen=True)
class Scaling:
    """How the speed of a script depends on the number of ranks."""

    script: str
    is_weak: bool  # Whether the global batch grew with the ranks; otherwise it stayed the same.
    runs: Sequence[Run]  # What was measured.
    # Numbers of ranks on which the script did not run, with the reasons.
    failures: dict[int, str] = field(default_factory=dict)
    remarks: Sequence[str] = ()  # What else a reader must know.
    projection: Projection | None = None  # The curve beyond that, if it was asked for.

    @property
    def points(self) -> list[Point]:
        """What was measured on each number of ranks, in increasing order."""
        runs, numbers = self.runs, sorted({run.ranks for run in self.runs})
        first = {run.round: run for run in runs if run.ranks == numbers[0]}
        return [_point([run for run in runs if run.ranks == number], first) for number in numbers]

    @property
    def table(self) -> str:
        """What was measured, as text."""
        kind = (
            "weak scaling: the global batch grows with the ranks"
            if self.is_weak
            else "strong scaling: the global batch stays the same"
        )
        title = f"{self.script} on {self.runs[0].device}; {kind}"
        return "\n".join([title, *_rows(self.points), *self._notes()])

    def _notes(self) -> list[str]:
        some = self.runs[0]
        of = "a process" if some.memory_of == "process" else "the devices of a process"
        return [
            f"Median (lowest to highest) of rounds of {some.steps} steps; efficiency is that of a "
            "rank, against the first line in the same round.",
            "compute, exchange (without computing), data and host are shares of the time of traced "
            f"steps; memory is the most of {of}.",
            *self._notes_on_batches(),
            *(f"{ranks} rank(s) did not run: {why}" for ranks, why in self.failures.items()),
            *([] if self.projection is None else self.projection.lines()),
            *self.remarks,
        ]

    def _notes_on_batches(self) -> list[str]:
        first, *others = self.points
        for point in others:
            growth = point.ranks / first.ranks if self.is_weak else 1
            if abs(point.global_batch / first.global_batch / growth - 1) > _ODD_BATCH:
                is_that = "with --strong it is then that of weak scaling."
                return [
                    "The script makes its global batch from the number of ranks, so that it is "
                    f"{point.global_batch} on {point.ranks}: "
                    f"{is_that if self.is_weak else 'this is no strong scaling.'}"
                ]
        return []

    def __repr__(self) -> str:
        return self.table

    def plot(self, path: str | Path | IO[bytes] | None = None) -> Any:
        """Draws examples a second, and where the time goes, over the number of ranks.

        Returns Matplotlib's figure, which is also written to `path`, as a PNG, if that is given.
        Raises a ModuleNotFoundError if Matplotlib is not installed.
        """
        from matplotlib.figure import Figure

        # Without pyplot no window opens, and no figure is kept.
        figure = Figure(figsize=(9, 3.8), layout="constrained")
        speed, time = figure.subplots(1, 2)
        points = self.points
        _draw_speed(speed, points)
        if self.projection is not None:
            _draw_projection(speed, points, self.projection)
        speed.legend(fontsize=8)
        _draw_shares(time, points)
        kind = "weak" if self.is_weak else "strong"
        title = f"{Path(self.script).name}: {kind} scaling on {self.runs[0].device}"
        figure.suptitle(title, fontsize=10)
        if path is not None:
            figure.savefig(path, dpi=120, format="png")
        return figure

    def to_png(self) -> bytes:
        """Returns the picture of `plot` as a PNG."""
        file = BytesIO()
        self.plot(file)
        return file.getvalue()

    def _repr_png_(self) -> bytes | None:
        return None if find_spec("matplotlib") is None else self.to_png()

    def to_json(self) -> str:
        """Returns everything as text that `from_json` reads."""
        return json.dumps(
            {
                "format": _FORMAT,
                "script": self.script,
                "weak": self.is_weak,
                "remarks": list(self.remarks),
                "failures": {str(ranks): why for ranks, why in self.failures.items()},
                "points": [_kept_point(point) for point in self.points],
                "projection": self.projection and asdict(self.projection),
                "runs": [asdict(run) for run in self.runs],
            },
            indent=1,
        )

    @classmethod
    def from_json(cls, text: str) -> "Scaling":
        """Returns what `to_json` made text of; a ValueError says that it is something else."""
        data = read_results(text, "scale", _FORMAT, "runs")
        return cls(
            data["script"],
            data["weak"],
            [read_run(run) for run in data["runs"]],
            {int(ranks): why for ranks, why in data["failures"].items()},
            tuple(data["remarks"]),
            data["projection"] and Projection.from_dict(data["projection"]),
        )


def _rows(points: Sequence[Point]) -> list[str]:
    cells = [_HEADS, *(_cells(point) for point in points)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return ["  ".join(map(str.rjust, row, widths)) for row in cells]


def _cells(point: Point) -> tuple[str, ...]:
    return (
        str(point.ranks),
        str(point.global_batch),
        _with_range(
            point.examples_per_s, 1, "{:.0f}" if point.examples_per_s.median > 99 else "{:.3g}"
        ),
        _with_range(point.step_s, 1000, "{:.2f}"),
        _with_range(point.efficiency, 1, "{:.2f}"),
        *(f"{100 * getattr(point, name):.0f} %" for name in _SHARES),
        f"{point.compile_s:.1f}",
        f"{point.memory_bytes / 2**20:.0f}",
    )


def _with_range(value: Spread, factor: float, form: str) -> str:
    median, lowest, highest = (form.format(number * factor) for number in value)
    return f"{median} ({lowest} to {highest})"


def continue_curve(
    scaling: Scaling, to_ranks: int, *, link_gbit: float | None = None
) -> Projection:
    """Returns the projection to doubled numbers of ranks, up to `to_ranks`.

    Its error is the one that the same model makes for the largest number of ranks measured. Raises
    a ValueError if what was measured does not suffice, or goes as far.
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
    outer = next(run.outer for run in scaling.runs if run.ranks == largest.ranks)
    if outer is not None and link_gbit is None:
        raise ValueError(
            "There is no projection: outer updates travel while steps run, whose time does not "
            "tell the rate of the links. Give it with --link-gbit."
        )
    measured = [
        Measured(p.ranks, p.hosts, p.step_s.median * 1000, _local_ms(scaling, p.ranks))
        for p in points
    ]
    per_host = max(-(-point.ranks // point.hosts) for point in points)
    mb = largest.gradient_bytes / 1e6
    num_buckets = max(1, round(mb / (_CPU_BUCKET_MB if largest.device == "cpu" else _BUCKET_MB)))
    buckets_mb = [mb / num_buckets] * num_buckets
    model_of = partial(
        fit, buckets_mb=buckets_mb, gpus_per_host=per_host, link_gbit=link_gbit, outer=outer
    )
    last = measured[-1]
    error = model_of(measured[:-1]).step_ms(last.ranks, last.local_ms) / last.step_ms - 1
    model = model_of(measured)
    numbers = [largest.ranks * 2]
    while numbers[-1] < to_ranks:
        numbers.append(numbers[-1] * 2)
    numbers[-1] = to_ranks
    return Projection(
        tuple(_projected(scaling, n, model) for n in numbers),
        largest.ranks,
        error,
        model.links.host_gbytes * 8,
        model.overlap,
        outer,
    )


def _local_ms(scaling: Scaling, ranks: int) -> float:
    """Returns what a step takes without communication: with strong scaling it is shared out."""
    first = scaling.points[0]
    local_ms = first.step_s.median * 1000 * (1 - first.communication)
    return local_ms if scaling.is_weak else local_ms * first.ranks / ranks


def _projected(scaling: Scaling, ranks: int, model: Model) -> ProjectedPoint:
    first, step_ms = scaling.points[0], model.step_ms(ranks, _local_ms(scaling, ranks))
    rows = first.examples_per_s.median * first.step_s.median
    rows *= ranks / first.ranks if scaling.is_weak else 1
    speed = rows / step_ms * 1000
    efficiency = speed / ranks / (first.examples_per_s.median / first.ranks)
    return ProjectedPoint(ranks, step_ms / 1000, speed, efficiency, model.host_mb(ranks))


def _draw_speed(axis: Any, points: Sequence[Point]) -> None:
    ranks = [point.ranks for point in points]
    speeds = [point.examples_per_s for point in points]
    medians = [speed.median for speed in speeds]
    below = [speed.median - speed.lowest for speed in speeds]
    above = [speed.highest - speed.median for speed in speeds]
    axis.errorbar(ranks, medians, [below, above], marker="o", capsize=3, label="measured")
    ideal = [medians[0] / ranks[0] * number for number in ranks]
    axis.plot(ranks, ideal, "--", color="gray", label="efficiency 1")
    for point in points[1:]:
        axis.annotate(
            f"{point.efficiency.median:.2f}",
            (point.ranks, point.examples_per_s.median),
            textcoords="offset points",
            xytext=(0, -14),
            ha="center",
            fontsize=8,
        )
    axis.set_xscale("log", base=2)
    axis.set_yscale("log", base=2)
    axis.set_xticks(ranks, [str(number) for number in ranks])
    axis.yaxis.set_major_formatter(
        lambda value, _: f"{value:,.4g}" if value < 1000 else f"{value:,.0f}"
    )
    axis.set_xlabel("ranks")
    axis.set_ylabel("examples/s")
    axis.margins(x=0.1, y=0.15)


def _draw_projection(axis: Any, points: Sequence[Point], projection: Projection) -> None:
    ranks = [points[-1].ranks, *(point.ranks for point in projection.points)]
    speeds = [points[-1].examples_per_s.median, *(p.examples_per_s for p in projection.points)]
    error = f"{100 * abs(projection.error):.0f} %"
    axis.plot(ranks, speeds, ":", marker="x", label=f"projected (error {error})")
    axis.set_xticks(ranks, [str(number) for number in ranks])


def _draw_shares(axis: Any, points: Sequence[Point]) -> None:
    labels = [str(point.ranks) for point in points]
    floor = [0.0] * len(points)
    for name, label in _SHARES.items():
        shares = [getattr(point, name) for point in points]
        axis.bar(labels, shares, bottom=floor, label=label)
        floor = [low + share for low, share in zip(floor, shares, strict=True)]
    axis.set_xlabel("ranks")
    axis.set_ylabel("share of a step")
    axis.set_ylim(0, 1)
    axis.legend(fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=4, frameon=False)
