"""The site's own pages: links between files of the repository, the API reference, notebooks."""

import inspect
import json
from functools import reduce

import check
import draw_rooms
import gallery
import nbformat
import notebooks
import pytest
import reference
import repository
from pages import ROOT

import tnt_jax


@pytest.fixture
def llms():
    return pytest.importorskip("llms", reason="needs the extra docs", exc_type=ImportError)


@pytest.mark.parametrize(
    ("source", "link", "expected"),
    [
        ("README.md", "docs/flax.md#inputs", "flax.md#inputs"),
        ("docs/flax.md", "loops.md", "loops.md"),
        ("docs/flax.md", "../examples/svhn", "source/examples/svhn/index.md"),
        ("docs/flax.md", "../examples/README.md#svhn", "examples.md#svhn"),
        ("examples/README.md", "digits.py", "source/examples/digits.py.md"),
        ("benchmarks/README.md", "results/scaling.png", "pictures/benchmarks/results/scaling.png"),
        ("README.md", "#licence", "#licence"),
        ("README.md", "https://arxiv.org", "https://arxiv.org"),
    ],
)
def test_a_link_of_the_repository_leads_to_its_page(source, link, expected):
    text = f"A [link]({link}).\n\n```python\nf[0](README.md)\n```\n"
    written = repository.rewrite_links(text, source=source, page=repository.page_of(source))
    assert written == text.replace(f"({link})", f"({expected})")


def test_a_page_further_down_leads_up():
    text = repository.rewrite_links(
        "[a](../README.md)", source="examples/svhn/README.md", page="source/examples/svhn.md"
    )
    assert text == "[a](../../examples.md)"


def test_a_link_to_nothing_is_an_error():
    with pytest.raises(FileNotFoundError, match=r"links to docs/none\.md"):
        repository.rewrite_links("[a](none.md)", source="docs/flax.md", page="flax.md")


@pytest.mark.parametrize(
    ("heading", "anchor"),
    [  # As GitHub makes them.
        ("What `fit` accepts", "what-fit-accepts"),
        ("Less communication, less memory", "less-communication-less-memory"),
        ("cifar10/train.py", "cifar10trainpy"),
        ("tf.data & files", "tfdata--files"),
        ("tnt_jax", "tnt_jax"),
    ],
)
def test_anchors_are_those_of_github(heading, anchor):
    assert repository.slug(heading) == anchor


@pytest.mark.parametrize("namespace", reference.NAMESPACES)
def test_the_reference_has_every_public_name(namespace):
    page = reference.pages()[f"api/{namespace.replace('.', '_')}.md"]
    names = set(reduce(getattr, namespace.split(".")[1:], tnt_jax).__all__)
    if namespace == "tnt_jax":
        names -= {known.removeprefix("tnt_jax.") for known in reference.NAMESPACES}
    if namespace == "tnt_jax.models":  # These are on the page of `tnt_jax`.
        names -= {"clone_model", "load_model", "model_from_config", "model_from_json", "save_model"}
    shown = f"{namespace.replace('tnt_jax', 'tnt', 1)}."
    assert {name for name in names if f"heading: {shown}{name}\n" not in page} == set()


def test_the_reference_of_a_model_has_the_methods_of_its_bases():
    (entry,) = [
        part for part in reference.pages()["api/tnt_jax.md"].split("::: ") if ".Model\n" in part
    ]
    assert "heading: tnt.Model\n" in entry
    assert "inherited_members: true" in entry


def write_notebook(path, output):
    cells = [
        {"cell_type": "markdown", "source": ["# A title\n", "Text."]},
        {"cell_type": "code", "source": ["print(1)\n", "2"], "outputs": [output]},
    ]
    path.write_text(json.dumps({"cells": cells}))
    return path


def test_a_notebook_becomes_text_code_and_outputs(tmp_path):
    output = {"output_type": "stream", "name": "stdout", "text": ["1\n"]}
    text = notebooks.markdown(write_notebook(tmp_path / "a.ipynb", output))
    assert text.startswith('# A title\nText.\n\n<a class="md-button" href="a.ipynb" download>')
    assert text.endswith("````python\nprint(1)\n2\n````\n\n````text\n1\n````")
    picture = {"output_type": "display_data", "data": {"image/png": "AAAA", "text/plain": "x"}}
    text = notebooks.markdown(write_notebook(tmp_path / "a.ipynb", picture))
    assert text.endswith("(data:image/png;base64,AAAA)")


def test_a_notebook_with_an_error_is_no_page(tmp_path):
    error = {"output_type": "error", "ename": "ValueError", "evalue": "wrong"}
    with pytest.raises(ValueError, match="holds an error: ValueError: wrong"):
        notebooks.markdown(write_notebook(tmp_path / "a.ipynb", error))


def test_the_check_of_the_site_finds_what_is_wrong(tmp_path):
    (tmp_path / "search").mkdir()
    index = {"docs": [{"location": "a.html"}, {"location": "a.html#top"}]}
    (tmp_path / "search" / "search_index.json").write_text(json.dumps(index))
    (tmp_path / "a.html").write_text(
        '<h1 id="top"></h1><a href="#top"></a><a href="b.html#here"></a><a href="c.html"></a>'
        '<a href="b.html#gone"></a><a href="https://x.org"></a><script src="a.js"></script>'
    )
    (tmp_path / "llms.txt").write_text("- [a](a.html): A.\n- [d](d.md): Not there.\n")
    (tmp_path / "b.html").write_text(
        '<p id="here"></p><script src="https://x.org/a.js"></script><a href="a.html#top"></a>'
    )
    assert sorted(check.problems(tmp_path)) == [
        "a.html links to b.html#gone, but that page has no such anchor",
        "a.html links to c.html, which is not there",
        "b.html is not found by the search",
        "b.html loads https://x.org/a.js from elsewhere",
        "llms.txt links to d.md, which is not there",
    ]


def test_pages_of_the_repository_are_there():
    assert all((ROOT / path).exists() for path in repository.PAGES)


class Item:
    """A page or a section of MkDocs's navigation."""

    def __init__(self, title, *children, uri=""):
        self.title, self.children = title, children
        self.is_section, self.is_page = bool(children), not children
        self.file = type("File", (), {"src_uri": uri})


def test_llms_txt_has_a_link_and_a_sentence_for_each_page(llms):
    nav = [
        Item("Home", uri="index.md"),
        Item("Guides", Item("Data", uri="data.md"), Item("More", Item("Ray", uri="ray.md"))),
    ]
    pages = {
        "index.md": "# x\n\nIt [trains](a.md) models,\nfast. More.\n",
        "data.md": "# Data\n\n```python\nno. sentence\n```\n\n| a. | b |\n\n`fit` reads data.\n",
        "ray.md": "# Ray\n",
    }
    parts = llms.sections(nav)
    text = llms.index("x", "It trains.", parts, pages)
    assert text.splitlines()[:3] == ["# x", "", "> It trains."]
    assert [line for line in text.splitlines() if line.startswith(("## ", "- "))] == [
        "## Overview",
        "- [Home](index.md): It trains models, fast.",
        "## Guides",
        "- [Data](data.md): `fit` reads data.",
        "## More",
        "- [Ray](ray.md): Ray",
    ]
    whole = llms.full(parts, pages)
    assert [line for line in whole.splitlines() if line.startswith("<!--")] == [
        "<!-- index.md -->",
        "<!-- data.md -->",
        "<!-- ray.md -->",
    ]
    assert "no. sentence" in whole


def test_pages_of_the_reference_have_signatures_and_docstrings_for_programs(llms):
    package = llms.load_package()
    for path, page in reference.pages().items():
        text = llms.plain(page, package)
        assert ":::" not in text, path
        assert "toc_label:" not in text, path
        assert text.count("### `tnt.") == page.count("\n::: ") + page.startswith("::: "), path
    text = llms.plain(reference.pages()["api/tnt_jax_callbacks.md"], package)
    assert "delete_checkpoint: bool = True, *, max_to_keep: int = 2" in text
    shown = inspect.signature(tnt_jax.callbacks.CSVLogger)
    (line,) = [line for line in text.splitlines() if "`tnt.callbacks.CSVLogger(" in line]
    assert [name in line for name in shown.parameters] == [True] * 3
    assert inspect.getdoc(tnt_jax.callbacks.CSVLogger).splitlines()[0] in text


def test_every_program_of_the_gallery_has_a_page_with_what_it_printed_and_found():
    pages = gallery.pages()
    for name in gallery.names():
        page = pages[f"gallery/{name}.md"]
        assert f"({name}.md)" in pages["gallery/index.md"]
        assert (gallery.PROGRAMS / f"{name}.py").read_text().rstrip() in page
        assert (gallery.RECORDED / f"{name}.txt").read_text().rstrip() in page
        assert (gallery.RECORDED / f"{name}.png").read_bytes().startswith(b"\x89PNG")


def test_a_notebook_of_the_gallery_runs_what_its_program_runs(tmp_path, monkeypatch):
    book = nbformat.reads(gallery.notebook("distillation"), as_version=4)
    nbformat.validate(book)
    _, install, digits, program = (cell.source for cell in book.cells)
    assert install.startswith("%pip install")
    magic, _, text = digits.partition("\n")
    assert magic == "%%writefile digits_data.py"
    (tmp_path / "digits_data.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    names = {"__name__": "not run yet"}
    exec(program, names)
    assert len(names["load"]()[0][0]) == 1437
    assert gallery.notebook("keras_hub_bert") is None  # Its data cannot be loaded there.


def test_notebooks_lead_to_colab_on_the_site_of_a_release_alone(monkeypatch):
    for name in ("GITHUB_REPOSITORY", "SITE_VERSION"):
        monkeypatch.delenv(name, raising=False)
    assert "colab" not in gallery.pages()["gallery/clip.md"]
    monkeypatch.setenv("GITHUB_REPOSITORY", "someone/something")
    assert "colab" not in gallery.pages()["gallery/clip.md"]  # The site of no release.
    monkeypatch.setenv("SITE_VERSION", "0.1")
    link = "/github/someone/something/blob/gh-pages/0.1/"
    assert f"{link}gallery/clip.ipynb" in gallery.pages()["gallery/clip.md"]
    path = ROOT / "docs/notebooks/first_model.ipynb"
    assert f"{link}notebooks/first_model.ipynb" in notebooks.markdown(path)


@pytest.mark.parametrize("room", draw_rooms.ROOMS)
def test_a_drawing_has_the_imports_of_its_room(room):
    pytest.importorskip("importlinter", reason="needs the extra dev")
    drawing = (draw_rooms.FOLDER / f"{room}.svg").read_text()
    assert draw_rooms.arrows(drawing) == draw_rooms.arrows(draw_rooms.graph(room)), (
        "`python website/draw_rooms.py` draws them anew."
    )
