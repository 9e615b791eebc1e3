"""The pages of the documentation: their blocks of Python, headings and links."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = sorted((ROOT / "docs").glob("*.md"))
_FENCE = re.compile(r"^ *```(\w*)[^\n]*\n(.*?)^ *```$", re.DOTALL | re.MULTILINE)
_NOT_RUN = re.compile(
    r"^ *<!-- not run: (.*?) -->\n+ *```(?:python|diff)\n(.*?)^ *```$", re.DOTALL | re.MULTILINE
)
_LINK = re.compile(r"\]\(([^)\s]+)\)")

# What pages speak of that do not make a model themselves.
GIVEN = """
import flax.linen as nn
import numpy as np
import tensorflow as tf

import tnt_jax as tnt


class Net(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(3)(x)


loss = tnt.losses.SparseCategoricalCrossentropy(from_logits=True)
x = np.random.default_rng(0).normal(size=(256, 4)).astype(np.float32)
y = np.arange(256) % 3
dataset = tf.data.Dataset.from_tensor_slices((x, y))
module = nn.Dense(3)
model = tnt.Model(module)
model.compile("adam", loss)
model.build(x)
"""


def fences(page):
    """Returns kind and text of all code blocks of a page, in order."""
    return _FENCE.findall(page.read_text())


def not_run(page):
    """Returns the blocks of Python that do not run, with the reason that stands above each:
    `<!-- not run: reason -->`.
    """
    return {text: reason for reason, text in _NOT_RUN.findall(page.read_text())}


def blocks(page):
    """Returns the blocks of Python of a page that run, in order."""
    skipped = not_run(page)
    return [text for kind, text in fences(page) if kind == "python" and text not in skipped]


def diffs(page):
    """Returns the diffs of a page that run, in order."""
    skipped = not_run(page)
    return [text for kind, text in fences(page) if kind == "diff" and text not in skipped]


def side(diff, removed):
    """Returns the program before a diff if its lines with "+" are removed, that after it if those
    with "-" are.
    """
    lines = [line for line in diff.splitlines() if not line.startswith(removed)]
    return "".join(f"{line[1:]}\n" for line in lines)


def run(page, namespace):
    """Runs the blocks of Python of a page one after another in one namespace; returns how many."""
    if not re.search("import (flax|jax|keras)", blocks(page)[0]):
        exec(GIVEN, namespace)
    for number, block in enumerate(blocks(page)):
        exec(compile(block, f"{page.name}, block {number}", "exec"), namespace)
    return len(blocks(page))


def prose(page):
    """Returns a page without its blocks."""
    return _FENCE.sub("", page.read_text())


def anchors(page):
    """Returns the anchors that GitHub makes of the headings of a page."""
    headings = re.findall(r"^#+ (.*)$", prose(page), re.MULTILINE)
    plain = [re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading) for heading in headings]
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in plain}


def links(page):
    """Returns the links of a page that lead into the repository."""
    return [link for link in _LINK.findall(prose(page)) if not re.match(r"[a-z]+:", link)]
