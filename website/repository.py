"""The repository's Markdown as pages of the site, and links that lead from one to another.

Pages live in `docs/`. Files beside it that pages link to become pages, too: Markdown as it is,
code as a listing, a folder as a list of its files, a picture as a picture. So the site holds
everything that its pages speak of.
"""

import posixpath
import re
from collections.abc import Callable, Iterable
from pathlib import Path

ROOT = Path(__file__).parents[1]

# Markdown outside of `docs/`, and the page that it becomes.
PAGES = {
    "README.md": "index.md",
    "examples/README.md": "examples.md",
    "benchmarks/README.md": "benchmarks.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "SECURITY.md": "security.md",
    "CODE_OF_CONDUCT.md": "code_of_conduct.md",
}
PICTURES = {".png", ".svg"}
LISTINGS = {
    ".py": "python",
    ".sh": "bash",
    ".slurm": "bash",
    ".yaml": "yaml",
    ".json": "json",
    ".toml": "toml",
    ".ipynb": "json",
    ".md": "markdown",
}
_LINK = re.compile(r"(?<=\]\()([^)\s]+)(?=\))")
_FENCE = re.compile(r"^ *(`{3,}).*?^ *\1 *$", re.DOTALL | re.MULTILINE)


def page_of(path: str) -> str:
    """Returns the page, below the site's root, that shows a file or folder of the repository.

    Args:
        path: Path from the root of the repository, such as `examples/svhn/train.py`.

    Raises:
        FileNotFoundError: If the repository has nothing there.
    """
    if not (ROOT / path).exists():
        raise FileNotFoundError(f"A page links to {path}, which is not in the repository.")
    if path in PAGES:
        return PAGES[path]
    if path.startswith("docs/"):
        return path.removeprefix("docs/").replace(".ipynb", ".md")
    if Path(path).suffix in PICTURES:
        return f"pictures/{path}"
    return f"source/{path}/index.md" if (ROOT / path).is_dir() else f"source/{path}.md"


def rewrite_links(text: str, *, source: str, page: str) -> str:
    """Returns Markdown with its links leading to the site's pages.

    Args:
        text: The Markdown; links in code blocks are left alone.
        source: Its path from the root of the repository.
        page: The page that it becomes.

    Raises:
        FileNotFoundError: If a link leads to nothing.
    """

    def rewrite(match: re.Match[str]) -> str:
        if _is_elsewhere(match[1]):
            return match[1]
        path, mark, anchor = match[1].partition("#")
        target = posixpath.normpath(posixpath.join(posixpath.dirname(source), path))
        return posixpath.relpath(page_of(target), posixpath.dirname(page) or ".") + mark + anchor

    return _outside_of_fences(text, lambda prose: _LINK.sub(rewrite, prose))


def reachable(sources: Iterable[str]) -> dict[str, str]:
    """Returns the page of each file outside of `docs/` that pages lead to, by links over links.

    Args:
        sources: Paths of the Markdown to start from.
    """
    found: dict[str, str] = {}
    done: set[str] = set()
    new = set(sources) | set(PAGES)
    while new:
        path = new.pop()
        done.add(path)
        if not path.startswith("docs/"):
            found[path] = page_of(path)
        if path.endswith(".md") or (ROOT / path).is_dir():
            new |= _targets(path) - done
    return found


def text_of(path: str) -> str:
    """Returns the Markdown of a file: its own, a listing, or of a folder the list of its files."""
    target = ROOT / path
    if target.is_dir():
        entries = "\n".join(f"- [{name}]({target.name}/{name})" for name in _shown_files(target))
        return f"# {path}\n\n{entries}\n"
    if target.suffix == ".md":
        return target.read_text()
    kind = LISTINGS.get(target.suffix, "text")
    return f"# {path}\n\n````{kind}\n{target.read_text().rstrip()}\n````\n"


def slug(heading: str, separator: str = "-") -> str:
    """Returns the anchor that GitHub makes of a heading, so that links work there and here."""
    plain = re.sub(r"<[^>]*>", "", heading)
    return re.sub(r"[^\w\- ]", "", plain.lower()).strip().replace(" ", separator)


def _targets(path: str) -> set[str]:
    prose = _FENCE.sub("", text_of(path))
    links = {link.partition("#")[0] for link in _LINK.findall(prose) if not _is_elsewhere(link)}
    return {posixpath.normpath(posixpath.join(posixpath.dirname(path), link)) for link in links}


def _is_elsewhere(link: str) -> bool:
    return re.match(r"[a-z]+:|#", link) is not None


def _shown_files(folder: Path) -> list[str]:
    files = sorted(path for path in folder.iterdir() if path.is_file())
    return [path.name for path in files if path.suffix in LISTINGS or not path.suffix]


def _outside_of_fences(text: str, change: Callable[[str], str]) -> str:
    parts, end = [], 0
    for fence in _FENCE.finditer(text):
        parts += [change(text[end : fence.start()]), fence[0]]
        end = fence.end()
    return "".join([*parts, change(text[end:])])
