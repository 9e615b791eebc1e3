"""The site for programs that read it: `llms.txt`, `llms-full.txt`, and each page as Markdown.

The format is that of https://llmstxt.org: a title, a summary, and lists of links to Markdown with a
sentence each. The text is that of the pages; the API reference has signatures and docstrings.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import griffe
from repository import ROOT

_ENTRY = re.compile(
    r"^::: (\S+)\n(?:^    .*\n?)*?^      heading: (\S+)\n(?:^ {4,}.*\n?)*", re.MULTILINE
)
_COMMENT = re.compile(r"<!--.*?-->\n*", re.DOTALL)
_PICTURE = re.compile(r"!\[[^]]*\]\(data:[^)]*\)\n*")
_SENTENCE = re.compile(r"^(?![#|!>\s-])(.+?[.:?])(?=\s|$)", re.DOTALL | re.MULTILINE)


@dataclass(frozen=True)
class Section:
    """A part of the navigation: title and path of each page, in order."""

    title: str
    pages: list[tuple[str, str]]


def sections(nav: Iterable[Any], title: str = "Overview") -> list[Section]:
    """Returns the parts of the navigation of MkDocs, a page by itself in one called `title`."""
    alone = [(item.title, item.file.src_uri) for item in nav if item.is_page]
    found = [Section(title, alone)] if alone else []
    for item in nav:
        if item.is_section:
            found += sections(item.children, item.title)
    return found


def index(name: str, summary: str, parts: Iterable[Section], pages: Mapping[str, str]) -> str:
    """Returns `llms.txt`: a link to each page, with its first sentence."""
    lines = [
        f"# {name}",
        "",
        f"> {summary}",
        "",
        "All pages in one file: [llms-full.txt](llms-full.txt)",
        "",
    ]
    for part in parts:
        lines += [f"## {part.title}", ""]
        lines += [_line(title, path, pages[path]) for title, path in part.pages]
        lines.append("")
    return "\n".join(lines)


def full(parts: Iterable[Section], pages: Mapping[str, str]) -> str:
    """Returns `llms-full.txt`: all pages one after another, each below its path."""
    texts = [(path, pages[path]) for part in parts for _, path in part.pages]
    return "\n".join(f"<!-- {path} -->\n\n{text.strip()}\n" for path, text in texts)


def plain(markdown: str, package: griffe.Module) -> str:
    """Returns a page with signatures and docstrings for its entries.

    Comments, and pictures that are part of the page, are left out.
    """
    described = _ENTRY.sub(lambda entry: _described(package, *entry.groups()), markdown)
    return _PICTURE.sub("", _COMMENT.sub("", described))


def load_package() -> griffe.Module:
    """Returns the package as it is written; nothing is imported."""
    found = griffe.load("tnt_jax", search_paths=[ROOT])
    assert isinstance(found, griffe.Module)
    return found


def _line(title: str, path: str, text: str) -> str:
    body = re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)
    first = _SENTENCE.search(body)
    about = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", " ".join(first[1].split())) if first else title
    return f"- [{title}]({path}): {about}"


def _described(package: griffe.Module, path: str, heading: str) -> str:
    found = package[path.removeprefix("tnt_jax.")]
    text = found.docstring.value if found.docstring else ""
    members = [
        member
        for name, member in found.members.items()
        if found.is_class and member.is_function and not name.startswith("_") and member.docstring
    ]
    methods = [
        f"- `{_signature(each)}`: {each.docstring.value.splitlines()[0]}" for each in members
    ]
    shown = _signature(found).replace(found.name, heading, 1)
    return f"### `{shown}`\n\n{text}\n\n" + "".join(f"{line}\n" for line in methods) + "\n"


def _signature(found: Any) -> str:
    if found.is_attribute:
        return found.name
    shown: list[str] = []
    for parameter in found.parameters:
        is_keyword = parameter.kind is not None and parameter.kind.value == "keyword-only"
        if is_keyword and not any(text.startswith("*") for text in shown):
            shown.append("*")
        if parameter.name not in ("self", "cls"):
            shown.append(_parameter(parameter))
    return f"{found.name}({', '.join(shown)})"


def _parameter(parameter: Any) -> str:
    stars = {"variadic positional": "*", "variadic keyword": "**"}.get(parameter.kind.value, "")
    text = f"{stars}{parameter.name}"
    if parameter.annotation is not None:
        text += f": {parameter.annotation}"
    return text if stars or parameter.default is None else f"{text} = {parameter.default}"
