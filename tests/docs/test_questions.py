"""The search of the site: how pages are ranked, and the questions that must find theirs."""

import pytest
import reference
import repository
from pages import ROOT

questions = pytest.importorskip("questions", reason="needs the extra docs", exc_type=ImportError)


def section(location, title, text):
    return {"location": location, "title": title, "text": text}


def test_the_search_ranks_titles_and_beginnings_of_words_first():
    docs = [
        section("loops.html", "Loops", "<p>Call <code>model.save</code> after the loop.</p>"),
        section("loops.html#state", "State", "<p>A state is saved.</p>"),
        section("saving.html", "Saves", "<p>Of loops and others.</p>"),
        section("data.html", "Data", "<p>Rows.</p>"),
    ]
    index = questions.index_of({"config": {"separator": r"[\s.]+"}, "docs": docs})
    assert questions.pages(index, ["save"]) == ["saving", "loops"]
    assert questions.pages(index, ["loop"]) == ["loops", "saving"]
    assert questions.pages(index, ["rows", "nothing"]) == ["data"]
    assert questions.words_of("Save &amp; load `model.save`", r"[\s.`]+") == [
        *("save", "&", "load", "model", "save"),
    ]


def test_questions_that_do_not_find_their_page_are_shown(monkeypatch):
    monkeypatch.setattr(questions, "QUESTIONS", {"rows": "data", "loops": "data none"})
    docs = [section("data.html", "Data", "Rows."), section("loops.html", "Loops", "A row.")]
    site = {"config": {"separator": r"\s+"}, "docs": docs}
    assert questions.failures(site) == ["'loops' finds loops, but not data none"]


def test_pages_that_answer_questions_are_there():
    made = {path.removesuffix(".md") for path in [*reference.pages(), *repository.PAGES.values()]}
    pages = {path.relative_to(ROOT / "docs").with_suffix("") for path in (ROOT / "docs").rglob("*")}
    answers = {page for text in questions.QUESTIONS.values() for page in text.split()}
    assert answers - made - set(map(str, pages)) == set()
    assert len(questions.QUESTIONS) == 20
