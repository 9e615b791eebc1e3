"""The messages of the package, read from its source, for the page of questions and answers.

A heading of `docs/faq.md` that answers messages names the files that hold them, in a comment:

    <!-- messages: tnt_jax/data tnt_jax/keras_compat/state/model_state.py -->

The longest path that fits a file counts, so a folder stands for all files that no other heading
names. The site shows the messages below the heading, where its search finds them.
"""

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from repository import ROOT, slug

PAGE = ROOT / "docs/faq.md"
_MARK = re.compile(r"^<!-- messages: (.*?) -->$", re.MULTILINE | re.DOTALL)
_WARNS = {"warn", "warn_once", "warning", "error", "critical"}


def messages(file: Path) -> list[str]:
    """Returns the texts that a file raises, warns of or logs, with `...` for what they fill in."""
    tree = ast.parse(file.read_text())
    found = [_text(call) for call in _calls(tree)]
    return list(dict.fromkeys(text for text in found if len(text.split()) > 2))


def by_heading() -> dict[str, list[str]]:
    """Returns the messages that each heading of the page answers, by its anchor.

    Raises:
        ValueError: If no heading names a file that has messages.
    """
    owners = {path: anchor for anchor, paths in _marks().items() for path in paths}
    found: dict[str, list[str]] = defaultdict(list)
    for file in sorted((ROOT / "tnt_jax").rglob("*.py")):
        texts = messages(file)
        path = file.relative_to(ROOT)
        fitting = [str(p) for p in (path, *path.parents) if str(p) in owners]
        if texts and not fitting:
            raise ValueError(
                f"{path} has messages, but no heading of docs/faq.md names its folder."
            )
        if texts:
            found[owners[fitting[0]]] += texts
    return dict(found)


def with_messages(page: str) -> str:
    """Returns the page with the messages of each heading in place of its comment."""
    answered, anchors = by_heading(), iter(_marks())
    return _MARK.sub(lambda _: _folded(answered.get(next(anchors), [])), page)


def _folded(texts: list[str]) -> str:
    lines = "\n".join(f"    - `{text.replace('`', '')}`" for text in sorted(texts))
    return f'??? note "Messages ({len(texts)})"\n\n{lines}\n' if texts else ""


def _marks() -> dict[str, list[str]]:
    """Returns the paths that each heading with a comment names, by the heading's anchor."""
    marks = {}
    for section in re.split(r"^#+ ", PAGE.read_text(), flags=re.MULTILINE)[1:]:
        heading, _, text = section.partition("\n")
        for paths in _MARK.findall(text):
            marks[slug(heading)] = paths.split()
    return marks


def _calls(tree: ast.AST) -> Iterator[ast.expr]:
    """Yields the first arguments of exceptions that are raised, warnings and log records."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and node.exc.args:
            yield node.exc.args[0]
        elif isinstance(node, ast.Call) and node.args and _name(node.func) in _WARNS:
            yield node.args[0]


def _name(function: ast.expr) -> str:
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def _text(value: ast.expr) -> str:
    """Returns a string as it is written in the source, with `...` for each field."""
    match value:
        case ast.Constant(str(text)):
            return re.sub(r"%(\.\d+)?[sdrfg]", "...", " ".join(text.split()))
        case ast.JoinedStr(parts):
            return " ".join("".join(map(_text_of_part, parts)).split())
        case ast.BinOp(left, ast.Add(), right):
            return " ".join(f"{_text(left)} {_text(right)}".split())
    return ""


def _text_of_part(part: ast.expr) -> str:
    return part.value if isinstance(part, ast.Constant) else "..."
