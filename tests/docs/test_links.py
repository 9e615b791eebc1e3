"""Every link of the documentation leads to a file and a heading that are there."""

import re

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


def leads_somewhere(page, link):
    path, _, anchor = link.partition("#")
    target = (page.parent / path).resolve() if path else page
    return target.exists() and (not anchor or anchor in anchors(target))


def test_links_lead_to_files_and_headings():
    all_links = [(page, link) for page in FILES for link in links(page)]
    assert len(all_links) > 100
    dead = [(relative(page), link) for page, link in all_links if not leads_somewhere(page, link)]
    assert dead == []


def test_files_that_are_named_are_there():
    named = [(relative(page), name) for page in FILES for name in PATH.findall(prose(page))]
    assert len(named) > 50
    assert [(page, name) for page, name in named if not [*ROOT.glob(name)]] == []


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
