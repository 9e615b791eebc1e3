"""What MkDocs calls while it builds the site.

It gets pages from the repository, from docstrings and from notebooks.
"""

from pathlib import Path
from typing import Any

import gallery
import llms
import messages
import notebooks
import reference
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.nav import Navigation
from mkdocs.structure.pages import Page
from repository import PICTURES, ROOT, reachable, rewrite_links, slug, text_of

# The path in the repository of each page that is made of one of its files.
_sources: dict[str, str] = {}
# The Markdown of each page, and the parts of the navigation.
_texts: dict[str, str] = {}
_sections: list[llms.Section] = []
# What the search takes from listings and the reference, so that explanations come first.
_BOOSTS = {"source": 0.1, "api": 0.5}


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Makes anchors as GitHub does."""
    config.mdx_configs["toc"]["slugify"] = slug
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the pages that are not Markdown in `docs/`."""
    for file in files.documentation_pages():
        _sources[file.src_uri] = f"docs/{file.src_uri}"
    for path in (ROOT / "docs").rglob("*.ipynb"):
        source = path.relative_to(ROOT).as_posix()
        page = source.removeprefix("docs/").replace(".ipynb", ".md")
        files.append(File.generated(config, page, content=notebooks.markdown(path)))
        _sources[page] = source
    for page, text in {**reference.pages(), **gallery.pages()}.items():
        files.append(File.generated(config, page, content=text))
    for source, page in reachable(_sources.values()).items():
        if (ROOT / source).suffix in PICTURES:
            files.append(File.generated(config, page, abs_src_path=str(ROOT / source)))
        else:
            files.append(File.generated(config, page, content=text_of(source)))
            _sources[page] = source
    return files


def on_nav(nav: Navigation, **_: Any) -> None:
    """Notes the order of the pages."""
    _sections[:] = llms.sections(nav.items)


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Leads links between files of the repository to their pages."""
    uri = page.file.src_uri
    page.meta["search"] = {"boost": _BOOSTS.get(uri.partition("/")[0], 1)}
    if _sources.get(uri) == "docs/faq.md":
        markdown = messages.with_messages(markdown)
    if uri in _sources:
        markdown = rewrite_links(markdown, source=_sources[uri], page=uri)
    _texts[uri] = markdown
    return markdown


def on_post_build(config: MkDocsConfig) -> None:
    """Writes the pages for programs that read them, and notebooks of the gallery."""
    package, site = llms.load_package(), Path(config.site_dir)
    pages = {uri: llms.plain(text, package) for uri, text in _texts.items()}
    for uri, text in pages.items():
        (site / uri).parent.mkdir(parents=True, exist_ok=True)
        (site / uri).write_text(text)
    for name in gallery.names():
        if book := gallery.notebook(name):
            (site / "gallery" / f"{name}.ipynb").write_text(book)
    summary = config.site_description or config.site_name
    (site / "llms.txt").write_text(llms.index(config.site_name, summary, _sections, pages))
    (site / "llms-full.txt").write_text(llms.full(_sections, pages))
