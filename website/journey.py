"""Draws a batch's journey, `docs/assets/journey.svg`: `python website/journey.py`.

The numbers are those of a batch of 10 rows on 4 ranks; `tests/docs/test_journey.py` compares the
rows of each rank with those that `tnt_jax.data` gives it.
"""

from pathlib import Path

from repository import ROOT

FILE = ROOT / "docs/assets/journey.svg"
ROWS, RANKS = 10, 4
_WIDTH, _HEIGHT = 1000, 560
_INK, _LINE, _ROW, _PADDING, _BOX = "#1f2937", "#6b7280", "#4f6bed", "#e5e7eb", "#eef2ff"

_SUMMED = "gradients in buckets, last layers first; loss and metrics as sums and counts"
_CONCLUSION = "The sum is that of the 10 real rows, on any number of ranks; padding counts nowhere."


def rows_of(rank: int) -> list[int | None]:
    """Returns the rows of the global batch that a rank has; None is padding."""
    size = -(-ROWS // RANKS)
    rows = range(rank * size, (rank + 1) * size)
    return [row if row < ROWS else None for row in rows]


def picture() -> str:
    """Returns the drawing as SVG."""
    centres = [170 + 220 * rank for rank in range(RANKS)]
    parts = [_text(500, 28, "One step on a global batch of 10 rows, 4 ranks", size=20, bold=True)]
    parts += _batch(500, 62)
    for rank, x in enumerate(centres):
        parts += [_arrow(500 + (x - 500) * 0.35, 104, x, 148), *_rank(rank, x)]
        parts.append(_arrow(x, 380, x, 412))
    parts += [
        _box(60, 412, 880, 44, "#dbeafe"),
        _text(500, 440, f"one sum over the ranks: {_SUMMED}"),
    ]
    for x in centres:
        parts += [
            _arrow(x, 456, x, 484),
            _box(x - 95, 484, 190, 40, _BOX),
            _text(x, 509, "same update, same weights", size=12.5),
        ]
    parts.append(_text(500, 550, _CONCLUSION))
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" '
            'font-family="system-ui, sans-serif" role="img">',
            "<title>A global batch is split over ranks, each computes its part of the gradient, "
            "one sum follows, and all ranks apply the same update.</title>",
            f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="white"/>',
            '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" '
            'markerHeight="7" orient="auto">'
            f'<path d="M0 0L8 4L0 8z" fill="{_LINE}"/></marker></defs>',
            *parts,
            "</svg>\n",
        ]
    )


def _batch(x: float, y: float) -> list[str]:
    return [_cell(x - 170 + 34 * row, y, row) for row in range(ROWS)]


def _rank(rank: int, x: float) -> list[str]:
    rows = rows_of(rank)
    left = x - 17 * len(rows)
    cells = [_cell(left + 34 * place, 182, row) for place, row in enumerate(rows)]
    lines = [
        "forward, per row:",
        "mask x weight x loss(row)",
        "backward:",
        "gradient of this rank's rows",
    ]
    return [
        _box(x - 100, 148, 200, 232, _BOX),
        _text(x, 171, f"rank {rank}", bold=True),
        *cells,
        _text(x, 240, "read ahead; padding is masked", size=11.5),
        *[_text(x, 274 + 26 * number, line, size=11.5) for number, line in enumerate(lines)],
    ]


def _cell(x: float, y: float, row: int | None) -> str:
    fill, colour = (_ROW, "white") if row is not None else (_PADDING, _LINE)
    label = str(row) if row is not None else "pad"
    box = f'<rect x="{x:g}" y="{y:g}" width="32" height="32" rx="4" fill="{fill}"/>'
    return box + _text(x + 16, y + 21, label, size=13, colour=colour)


def _box(x: float, y: float, width: float, height: float, fill: str) -> str:
    return (
        f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="8" fill="{fill}" '
        f'stroke="{_LINE}" stroke-width="0.8"/>'
    )


def _arrow(x: float, y: float, to_x: float, to_y: float) -> str:
    return (
        f'<line x1="{x:g}" y1="{y:g}" x2="{to_x:g}" y2="{to_y:g}" stroke="{_LINE}" '
        'stroke-width="1.5" marker-end="url(#tip)"/>'
    )


def _text(
    x: float, y: float, text: str, *, size: float = 14, bold: bool = False, colour: str = _INK
) -> str:
    weight = ' font-weight="600"' if bold else ""
    return (
        f'<text x="{x:g}" y="{y:g}" font-size="{size:g}" text-anchor="middle" '
        f'fill="{colour}"{weight}>{text}</text>'
    )


if __name__ == "__main__":
    Path(FILE).write_text(picture())
