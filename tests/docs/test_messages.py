"""Each message of the package belongs to a heading of the page of questions, and headings that
messages name are there.
"""

import re

import messages
from pages import ROOT, anchors

NAMED = re.compile(r"docs/[\w/]+\.md(?:#[\w-]+)?")
SOURCES = [path for path in (ROOT / "tnt_jax").rglob("*.py") if "docs/" in path.read_text()]


def is_there(name):
    page, _, anchor = name.partition("#")
    return (ROOT / page).exists() and (not anchor or anchor in anchors(ROOT / page))


def test_pages_that_the_code_names_are_there():
    # A string may be continued on the next line.
    texts = {path: re.sub(r'"\s*\n\s*f?"', "", path.read_text()) for path in SOURCES}
    named = {(path, name) for path, text in texts.items() for name in NAMED.findall(text)}
    assert len(named) > 15
    assert [(str(path), name) for path, name in named if not is_there(name)] == []


def test_every_message_has_a_heading():
    found = messages.by_heading()
    texts = [text for answered in found.values() for text in answered]
    assert "The dataset is empty: at least one example is needed." in texts
    assert set(found) <= anchors(messages.PAGE)
    assert len(texts) == sum(
        len(messages.messages(file)) for file in (ROOT / "tnt_jax").rglob("*.py")
    )


def test_paths_that_the_page_names_are_there():
    paths = [path for named in messages._marks().values() for path in named]
    assert [path for path in paths if not (ROOT / path).exists()] == []
    assert len(paths) == len(set(paths))


def test_messages_are_read_as_they_are_written(tmp_path):
    file = tmp_path / "a.py"
    file.write_text(
        'raise ValueError(f"The size ({size}) must be at least " f"{least}.")\n'
        'logger.warning("%s has waited %.1f s for data", name, seconds)\n'
        'warnings.warn("It is " + "slow now", stacklevel=2)\n'
        'print("not a message of ours")\n'
        "raise error\n"
    )
    assert messages.messages(file) == [
        "The size (...) must be at least ....",
        "... has waited ... s for data",
        "It is slow now",
    ]


def test_the_page_of_the_site_lists_messages_below_their_heading():
    page = messages.with_messages(messages.PAGE.read_text())
    assert "<!-- messages" not in page
    section = page.partition("## The global batch size is unknown")[2].partition("\n## ")[0]
    assert "`The dataset is empty: at least one example is needed.`" in section
