"""Notebooks as Markdown: cells with the outputs that were stored with them."""

import json
import os
from pathlib import Path
from typing import Any

_COLAB = "https://colab.research.google.com/github"


def colab(path: str) -> str:
    """Returns a link to Colab for a notebook of the published site; nothing elsewhere.

    Args:
        path: Path of the notebook below the site's root. The site of a release lies on the branch
            `gh-pages` of the repository that GitHub's runners name, in the folder of its version.
    """
    repository, version = (os.environ.get(name) for name in ("GITHUB_REPOSITORY", "SITE_VERSION"))
    if not repository or not version:
        return ""
    link = f"{_COLAB}/{repository}/blob/gh-pages/{version}/{path}"
    return f'<a class="md-button" href="{link}">Open in Colab</a>'


def markdown(path: Path) -> str:
    """Returns a notebook as Markdown: its text, its code, and below each cell what it printed.

    Pictures are embedded. Of an output in several forms the picture is shown, otherwise the text.
    """
    book = json.loads(path.read_text())
    # As HTML, so that it leads to the file and not to this page of it.
    download = f'<a class="md-button" href="{path.name}" download>Download this notebook</a>'
    download = f"{download} {colab(f'notebooks/{path.name}')}".rstrip()
    cells = [_cell(cell) for cell in book["cells"]]
    return "\n\n".join([cells[0], download, *cells[1:]])


def _cell(cell: dict[str, Any]) -> str:
    text = "".join(cell["source"])
    if cell["cell_type"] == "markdown":
        return text
    shown = [_output(output) for output in cell["outputs"]]
    return "\n\n".join([f"````python\n{text}\n````", *filter(None, shown)])


def _output(output: dict[str, Any]) -> str:
    if output["output_type"] == "stream":
        return f"````text\n{''.join(output['text']).rstrip()}\n````"
    if output["output_type"] == "error":
        raise ValueError(f"A notebook holds an error: {output['ename']}: {output['evalue']}")
    data = output["data"]
    if "application/vnd.jupyter.widget-view+json" in data:
        return ""  # A bar, which is over.
    if "image/png" in data:
        return f"![Output of the cell](data:image/png;base64,{''.join(data['image/png']).strip()})"
    return f"````text\n{''.join(data['text/plain'])}\n````"
