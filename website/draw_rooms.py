"""Draws which rooms import which: `python website/draw_rooms.py`, which needs Graphviz.

The drawings of the package and of its big rooms are in `docs/assets/rooms/`, for CONTRIBUTING.
"""

import re
import subprocess
import sys
from html import unescape
from pathlib import Path

from repository import ROOT

ROOMS = ("tnt_jax", "tnt_jax.keras_compat", "tnt_jax.train", "tnt_jax.distributed")
FOLDER = ROOT / "docs" / "assets" / "rooms"


def graph(room: str) -> str:
    """Returns the imports within a room, as the DOT of Import Linter."""
    command = str(Path(sys.executable).with_name("import-linter"))
    drawn = subprocess.run(
        [command, "drawgraph", room], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return drawn.stdout


def arrows(graph: str) -> set[str]:
    """Returns the arrows of a graph in DOT, or of a drawing of it, as `".a->.b"`."""
    if graph.lstrip().startswith("digraph"):
        return {f"{a}->{b}" for a, b in re.findall(r'"([^"]+)" *-> *"([^"]+)"', graph)}
    titles = (unescape(title) for title in re.findall("<title>(.*?)</title>", graph))
    return {title for title in titles if "->" in title}


def main() -> None:
    """Draws all of them."""
    FOLDER.mkdir(exist_ok=True)
    for room in ROOMS:
        target = FOLDER / f"{room}.svg"
        command = ["dot", "-Tsvg", "-Gbgcolor=white", "-Grankdir=LR", "-o", str(target)]
        subprocess.run(command, input=graph(room), text=True, check=True)
        print(target.relative_to(ROOT))


if __name__ == "__main__":
    main()
