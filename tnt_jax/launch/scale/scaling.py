"""Speed and efficiency on several numbers of ranks, as a table, as a picture, and as text."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from io import BytesIO
from pathlib import Path
from typing import IO, Any

from tnt_jax.launch.scale.curve import Projection, as_dict
from tnt_jax.launch.scale.points import Point, Spread, kept_point, points_of
from tnt_jax.launch.scale.runs import Run, kept, read_run

_FORMAT = 1
# By how much a global batch may be off. Batches of a number of tokens are rounded to rows.
_ODD_BATCH = 0.1


@dataclass(frozen=True)
class Scaling:
    """How the speed of a script depends on the number of ranks.

    Attributes:
        script: The script.
        is_weak: Whether the global batch grew with the ranks; otherwise it stayed the same.
        runs: What was measured.
        failures: Numbers of ranks on which the script did not run, with the reasons.
        remarks: What else a reader must know.
        projection: The curve beyond what was measured, if it was asked for.
    """

    script: str
    is_weak: bool
    runs: Sequence[Run]
    failures: dict[int, str] = field(default_factory=dict)
    remarks: Sequence[str] = ()
    projection: Projection | None = None

    @property
    def points(self) -> list[Point]:
        """What was measured on each number of ranks, in increasing order."""
        return points_of(self.runs)

    @property
    def table(self) -> str:
        """What was measured, as text."""
        return "\n".join([self._title(), *_rows(self.points), *self._notes()])

    def _title(self) -> str:
        some = self.runs[0]
        kind = (
            "weak scaling: the global batch grows with the ranks"
            if self.is_weak
            else "strong scaling: the global batch stays the same"
        )
        return f"{self.script} on {some.device}; {kind}"

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
        """Returns what to say if the global batch is not that of the kind of scaling."""
        first, *others = self.points
        for point in others:
            growth = point.ranks / first.ranks if self.is_weak else 1
            if abs(point.global_batch / first.global_batch / growth - 1) > _ODD_BATCH:
                return [
                    "The script makes its global batch from the number of ranks, so that it is "
                    f"{point.global_batch} on {point.ranks}: "
                    + (
                        "with --strong it is then that of weak scaling."
                        if self.is_weak
                        else "this is no strong scaling."
                    )
                ]
        return []

    def __repr__(self) -> str:
        """Returns the table."""
        return self.table

    def plot(self, path: str | Path | IO[bytes] | None = None) -> Any:
        """Draws examples a second, and where the time goes, over the number of ranks.

        Args:
            path: File to write a PNG to; by default none.

        Returns:
            Matplotlib's figure.

        Raises:
            ModuleNotFoundError: If Matplotlib is not installed.
        """
        from tnt_jax.launch.scale.picture import draw

        kind = "weak" if self.is_weak else "strong"
        title = f"{Path(self.script).name}: {kind} scaling on {self.runs[0].device}"
        return draw(self.points, title=title, projection=self.projection, path=path)

    def _repr_png_(self) -> bytes | None:
        """Returns the picture, which notebooks show; None without Matplotlib."""
        if find_spec("matplotlib") is None:
            return None
        file = BytesIO()
        self.plot(file)
        return file.getvalue()

    def to_json(self) -> str:
        """Returns everything as text that `from_json` reads."""
        return json.dumps(
            {
                "format": _FORMAT,
                "script": self.script,
                "weak": self.is_weak,
                "remarks": list(self.remarks),
                "failures": {str(ranks): why for ranks, why in self.failures.items()},
                "points": [kept_point(point) for point in self.points],
                "projection": as_dict(self.projection),
                "runs": [kept(run) for run in self.runs],
            },
            indent=1,
        )

    @classmethod
    def from_json(cls, text: str) -> "Scaling":
        """Returns what `to_json` made text of.

        Raises:
            ValueError: If the text is something else.
        """
        data = json.loads(text)
        if not isinstance(data, dict) or data.get("format") != _FORMAT:
            raise ValueError(f"The text is not that of tnt-jax scale, format {_FORMAT}.")
        return cls(
            data["script"],
            data["weak"],
            [read_run(run) for run in data["runs"]],
            {int(ranks): why for ranks, why in data["failures"].items()},
            tuple(data["remarks"]),
            None if data["projection"] is None else Projection.from_dict(data["projection"]),
        )


def _rows(points: Sequence[Point]) -> list[str]:
    heads = (
        "ranks",
        "batch",
        "examples per s",
        "ms/step",
        "efficiency",
        "compute",
        "exchange",
        "data",
        "host",
        "compile s",
        "MiB",
    )
    cells = [heads, *(_cells(point) for point in points)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return ["  ".join(map(str.rjust, row, widths)) for row in cells]


def _cells(point: Point) -> tuple[str, ...]:
    shares = (point.compute, point.communication, point.data, point.host)
    return (
        str(point.ranks),
        str(point.global_batch),
        _with_range(
            point.examples_per_s, 1, "{:.0f}" if point.examples_per_s.median > 99 else "{:.3g}"
        ),
        _with_range(point.step_s, 1000, "{:.2f}"),
        _with_range(point.efficiency, 1, "{:.2f}"),
        *(f"{100 * share:.0f} %" for share in shares),
        f"{point.compile_s:.1f}",
        f"{point.memory_bytes / 2**20:.0f}",
    )


def _with_range(value: Spread, factor: float, form: str) -> str:
    median, lowest, highest = (form.format(number * factor) for number in value)
    return f"{median} ({lowest} to {highest})"
