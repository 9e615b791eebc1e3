"""The gallery: a page for each program with its picture and output, and a notebook of it.

Pictures and outputs are those that `website/record_gallery.py` has kept in `docs/gallery/`.
"""

import ast
import json
from pathlib import Path

from notebooks import colab
from repository import ROOT

PROGRAMS = ROOT / "examples" / "gallery"
RECORDED = ROOT / "docs" / "gallery"


def names() -> list[str]:
    """Returns the names of the programs."""
    return sorted(path.stem for path in PROGRAMS.glob("*.py") if path.stem != "digits_data")


def pages() -> dict[str, str]:
    """Returns the page of each program, and the one that shows all of them."""
    found = {f"gallery/{name}.md": _page(name) for name in names()}
    entries = [
        f"- [**{title(name)}**]({name}.md)\n\n    [![{title(name)}]({name}.png)]({name}.md)\n"
        for name in names()
    ]
    text = (
        "# Gallery\n\nTen complete programs below 80 lines, with what they print and find. Each "
        "gives on any number of devices the result of one.\n\n"
        '<div class="grid cards" markdown>\n\n' + "\n".join(entries) + "\n</div>\n"
    )
    return {"gallery/index.md": text, **found}


def title(name: str) -> str:
    """Returns the words of a program's name."""
    words = {"clip": "CLIP", "gan": "GAN", "keras_hub_bert": "BERT of Keras Hub"}
    words |= {"segmentation_unet": "U-Net for segmentation", "experts": "Mixture of experts"}
    return words.get(name, name.replace("_", " ").capitalize())


def notebook(name: str) -> str | None:
    """Returns a notebook of a program; None if it reads data that a notebook cannot load."""
    code = _code(name)
    if "TNT_JAX_DATA" in code:
        return None
    cells = [("markdown", f"# {title(name)}\n\n{_words(name)}")]
    cells += [("code", '%pip install --quiet "tnt-jax[examples]"')]
    if "from digits_data" in code:
        cells += [("code", f"%%writefile digits_data.py\n{_code('digits_data')}")]
    cells += [("code", code)]
    written = [
        {"cell_type": kind, "id": f"{name}-{number}", "metadata": {}, "source": text.rstrip()}
        | ({"execution_count": None, "outputs": []} if kind == "code" else {})
        for number, (kind, text) in enumerate(cells)
    ]
    book = {"cells": written, "metadata": {}, "nbformat": 4, "nbformat_minor": 5}
    return json.dumps(book, indent=1) + "\n"


def _page(name: str) -> str:
    download = f'<a class="md-button" href="{name}.ipynb" download>Download as a notebook</a>'
    buttons = f"{download} {colab(f'gallery/{name}.ipynb')}".rstrip() if notebook(name) else ""
    printed = (RECORDED / f"{name}.txt").read_text().rstrip()
    parts = [
        f"# {title(name)}",
        _words(name),
        f"![{title(name)}]({name}.png)",
        buttons,
        f"````python\n{_code(name).rstrip()}\n````",
        f"It prints:\n\n````text\n{printed}\n````",
    ]
    return "\n\n".join(filter(None, parts)) + "\n"


def _code(name: str) -> str:
    return Path(PROGRAMS, f"{name}.py").read_text()


def _words(name: str) -> str:
    return ast.get_docstring(ast.parse(_code(name))) or ""
