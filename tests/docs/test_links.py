"""Every link of the documentation leads to a file and a heading that are there."""

import re

import pytest
from pages import PAGES, ROOT, anchors, links, prose

FILES = [
    *PAGES,
    *ROOT.glob("*.md"),
    *(ROOT / "examples").rglob("*.md"),
    ROOT / "benchmarks/README.md",
]
PATH = re.compile(r"`((?:docs|examples|tests|benchmarks|tnt_jax)/[\w./*-]*)`")


def relative(page):
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize("page", FILES, ids=relative)
def test_links_lead_to_files_and_headings(page):
    for link in links(page):
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), f"{link}: {sorted(anchors(target))}"


@pytest.mark.parametrize("page", FILES, ids=relative)
def test_files_that_are_named_are_there(page):
    for name in PATH.findall(prose(page)):
        assert list(ROOT.glob(name)), name


def test_a_page_is_reached_from_the_readme():
    reached, new = set(), {ROOT / "README.md"}
    while new:
        reached |= new
        new = {
            (page.parent / link.partition("#")[0]).resolve()
            for page in new
            for link in links(page)
            if link.partition("#")[0].endswith(".md")
        } - reached
    assert set(PAGES) <= reached
