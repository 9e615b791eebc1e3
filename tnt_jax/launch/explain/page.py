"""The page of an explanation: one HTML file with pictures in SVG, which loads nothing."""

from collections.abc import Mapping, Sequence
from html import escape
from typing import NamedTuple

from tnt_jax.launch.scale.scaling import Spread

_COLORS = ("#4269d0", "#efb118", "#ff725c", "#6cc5b0", "#3ca951", "#ff8ab7", "#a463f2", "#97bbf5")
_WIDTH, _BAR, _LINE = 720, 36, 26
_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 760px; margin: 2em auto; padding: 0 1em;
       color: #222; background: #fff; }
h1 { font-size: 1.2em; } h2 { font-size: 1.05em; margin-top: 1.6em; }
svg { max-width: 100%; height: auto; } text { font: 12px system-ui, sans-serif; fill: #222; }
table { border-collapse: collapse; } td, th { padding: 2px 12px 2px 0; text-align: right; }
td:first-child, th:first-child { text-align: left; }
"""


class Bar(NamedTuple):
    """A part of a step: its name, its share of a step, and what it takes, in seconds."""

    name: str
    share: float
    seconds: Spread


def draw_page(
    title: str,
    sentence: str,
    bars: Sequence[Bar],
    kinds: Mapping[str, Sequence[float]],
    findings: Sequence[str],
) -> str:
    """Returns the page; `kinds` are seconds of a step of each kind that was timed, by round."""
    items = "".join(f"<li>{escape(line)}</li>" for line in findings) or "<li>Nothing.</li>"
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(title)}'
        f"</title><style>{_STYLE}</style></head><body><h1>{escape(title)}</h1>"
        f"<p>{escape(sentence)}</p>{_stacked(bars)}<h2>What is worth a change</h2><ul>{items}</ul>"
        f"<h2>Times of a step, round by round</h2>{_dots(kinds)}"
        f"<h2>Parts of a step</h2>{_table(bars)}</body></html>\n"
    )


def _stacked(bars: Sequence[Bar]) -> str:
    shapes, left = [], 0.0
    for number, bar in enumerate(bars):
        width = bar.share * _WIDTH
        color = _COLORS[number % len(_COLORS)]
        tip = f"<title>{escape(bar.name)}: {100 * bar.share:.0f} %</title>"
        shapes.append(
            f'<rect x="{left:.1f}" y="0" width="{width:.1f}" height="{_BAR}" fill="{color}">{tip}'
            "</rect>"
        )
        left += width
        x, y = (number % 3) * _WIDTH / 3, _BAR + 20 + number // 3 * 20
        shapes.append(f'<rect x="{x:.0f}" y="{y - 10}" width="10" height="10" fill="{color}"/>')
        label = f"{escape(bar.name)} {100 * bar.share:.0f} %"
        shapes.append(f'<text x="{x + 15:.0f}" y="{y}">{label}</text>')
    height = _BAR + 30 + -(-len(bars) // 3) * 20
    return _svg(height, "Shares of a step", shapes)


def _dots(kinds: Mapping[str, Sequence[float]]) -> str:
    """Returns a picture with a line for each kind, and a dot for each round."""
    longest = max((max(times) for times in kinds.values() if times), default=1.0) or 1.0
    shapes, start = [], 150
    scale = (_WIDTH - start - 70) / longest
    for number, (name, times) in enumerate(kinds.items()):
        y = number * _LINE + 18
        shapes.append(f'<text x="0" y="{y + 4}">{escape(name)}</text>')
        shapes.append(f'<line x1="{start}" y1="{y}" x2="{_WIDTH - 70}" y2="{y}" stroke="#ddd"/>')
        shapes += [
            f'<circle cx="{start + scale * time:.1f}" cy="{y}" r="4" fill="#4269d0" opacity="0.6"/>'
            for time in times
        ]
        middle = 1000 * Spread.of(times).median
        shapes.append(f'<text x="{_WIDTH - 60}" y="{y + 4}">{middle:.3g} ms</text>')
    return _svg(len(kinds) * _LINE + 10, "Times of a step, by kind and round", shapes)


def _table(bars: Sequence[Bar]) -> str:
    rows = "".join(
        f"<tr><td>{escape(bar.name)}</td><td>{100 * bar.share:.1f} %</td>"
        + "".join(f"<td>{1000 * value:.3g}</td>" for value in bar.seconds)
        + "</tr>"
        for bar in bars
    )
    heads = "".join(f"<th>{head}</th>" for head in ("", "share", "median ms", "lowest", "highest"))
    return f"<table><tr>{heads}</tr>{rows}</table>"


def _svg(height: float, label: str, shapes: Sequence[str]) -> str:
    return (
        f'<svg viewBox="0 0 {_WIDTH} {height}" role="img" aria-label="{label}">'
        f"{''.join(shapes)}</svg>"
    )
