"""Checks the site that MkDocs has built: `python website/check.py`.

Every link leads to a page and an anchor that are there, those of llms.txt too, no page loads
anything from elsewhere, and the search knows every page. MkDocs itself checks links in Markdown
only.
"""

import json
import re
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urldefrag, urlsplit

# Elements that a browser loads by itself, and the attribute that says from where.
LOADED = {"script": "src", "img": "src", "link": "href", "iframe": "src", "source": "src"}


class PageParser(HTMLParser):
    """Collects the anchors and links of a page, and what it loads."""

    def __init__(self) -> None:
        super().__init__()
        self.anchors: set[str] = set()
        self.links: list[str] = []
        self.loads: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Reads one element."""
        values = {name: value or "" for name, value in attrs}
        self.anchors |= {values[name] for name in ("id", "name") if values.get(name)}
        if tag == "a" and "href" in values:
            self.links.append(values["href"])
        if tag in LOADED and values.get("rel") not in {"canonical", "next", "prev"}:
            self.loads.append(values.get(LOADED[tag], ""))


def problems(site: Path) -> list[str]:
    """Returns what is wrong with a site, a line each."""
    pages = {path: _parse(path) for path in site.rglob("*.html")}
    found = [
        f"{path.relative_to(site)} {problem}"
        for path, page in pages.items()
        if path.name != "404.html"  # Its links begin at the root of a server.
        for problem in _of_page(path, page, pages)
    ]
    index = json.loads((site / "search/search_index.json").read_text())
    known = {entry["location"].partition("#")[0] for entry in index["docs"]}
    found += [
        f"llms.txt links to {link}, which is not there"
        for link in re.findall(r"\]\(([^)]+)\)", (site / "llms.txt").read_text())
        if not (site / link).exists()
    ]
    return found + [
        f"{path.relative_to(site)} is not found by the search"
        for path in pages
        if str(path.relative_to(site)) not in known and path.name != "404.html"
    ]


def _parse(path: Path) -> PageParser:
    parser = PageParser()
    parser.feed(path.read_text())
    return parser


def _of_page(path: Path, page: PageParser, pages: dict[Path, PageParser]) -> list[str]:
    found = [f"loads {url} from elsewhere" for url in page.loads if _is_elsewhere(url)]
    for link in page.links:
        if _is_elsewhere(link) or link.startswith(("mailto:", "data:")):
            continue
        url, anchor = urldefrag(link)
        target = (path.parent / unquote(url)).resolve() if url else path
        if not target.exists():
            found.append(f"links to {link}, which is not there")
        elif anchor and target in pages and unquote(anchor) not in pages[target].anchors:
            found.append(f"links to {link}, but that page has no such anchor")
    return found


def _is_elsewhere(url: str) -> bool:
    return bool(urlsplit(url).netloc)


if __name__ == "__main__":
    lines = problems(Path(__file__).parents[1] / ".site")
    sys.exit("\n".join(lines) or None)
