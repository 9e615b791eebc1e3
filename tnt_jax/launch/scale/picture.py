"""The picture of a scaling: examples a second, and where the time goes."""

from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

from tnt_jax.launch.scale.curve import Projection
from tnt_jax.launch.scale.points import Point

_SHARES = {
    "compute": "compute",
    "communication": "exchange",
    "data": "waiting for data",
    "host": "host",
}


def draw(
    points: Sequence[Point],
    *,
    title: str,
    projection: Projection | None = None,
    path: str | Path | IO[bytes] | None = None,
) -> Any:
    """Returns Matplotlib's figure of a scaling.

    Args:
        points: What was measured on each number of ranks.
        title: The title.
        projection: The curve beyond that, if there is one.
        path: File to write a PNG to; None for none.
    """
    from matplotlib.figure import Figure

    # Without pyplot no window opens, and no figure is kept.
    figure = Figure(figsize=(9, 3.8), layout="constrained")
    speed, time = figure.subplots(1, 2)
    _draw_speed(speed, points)
    if projection is not None:
        _draw_projection(speed, points, projection)
    speed.legend(fontsize=8)
    _draw_shares(time, points)
    figure.suptitle(title, fontsize=10)
    if path is not None:
        figure.savefig(path, dpi=120, format="png")
    return figure


def _draw_speed(axis: Any, points: Sequence[Point]) -> None:
    ranks = [point.ranks for point in points]
    medians = [point.examples_per_s.median for point in points]
    below = [point.examples_per_s.median - point.examples_per_s.lowest for point in points]
    above = [point.examples_per_s.highest - point.examples_per_s.median for point in points]
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
