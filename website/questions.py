"""Types questions of newcomers into the search of the built site: `python website/questions.py`.

The right page must be among the first three. Sections are ranked as Material for MkDocs 9 does in
the browser: by Lunr, with a thousandfold weight of titles and with words that begin alike, and more
for pages and for sections with more of the words. A page stands where its best section does.
"""

import html
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lunr.builder import Builder
from lunr.index import Index
from lunr.stop_word_filter import stop_word_filter

# What is typed, and the pages that answer.
QUESTIONS = {
    "install gpu": "start index",
    "multi node": "launching",
    "several gpus on one machine": "launching",
    "slurm": "launching",
    "nan loss": "survival",
    "resume after a crash": "survival notebooks/resume_and_devices",
    "save and load a model": "saving",
    "early stopping": "api/tnt_jax_callbacks",
    "learning rate for large batches": "ranks",
    "custom training loop": "loops",
    "out of memory": "larger_models faq",
    "mixed precision": "flax performance",
    "batch normalization": "flax one_device",
    "pytorch dataloader": "data from_pytorch",
    "hugging face dataset": "data",
    "tensorboard": "tracking api/tnt_jax_callbacks",
    "coming from horovod": "from_horovod",
    "hyperparameter search": "tuning",
    "training is slow": "explanation performance",
    "same result on any number of devices": "one_device reproducibility",
}
_NUM_SHOWN = 3
_MOST_FAILURES = 1


def index_of(site: dict[str, Any]) -> Index:
    """Returns the index that a browser builds of `search_index.json`."""
    separator = site["config"]["separator"]
    builder = Builder()
    builder.ref("location")
    builder.field("title", boost=1000)
    builder.field("text")
    builder.b(0)
    builder.pipeline.add(stop_word_filter)
    for section in site["docs"]:
        plain = {name: re.sub("<[^>]*>", " ", section[name]) for name in ("title", "text")}
        words = {name: words_of(text, separator) for name, text in plain.items()}
        builder.add({"location": section["location"], **words}, {"boost": section.get("boost", 1)})
    return builder.build()


def words_of(text: str, separator: str) -> list[str]:
    """Returns the words of a text without marks, in small letters."""
    return [word.lower() for word in re.split(separator, html.unescape(text)) if word]


def pages(index: Index, words: Sequence[str]) -> list[str]:
    """Returns the pages that words find, best first, without `.html`."""
    scores: dict[str, float] = {}
    for found in index.search(" ".join(f"{word}*" for word in words)):
        terms = found["match_data"].metadata
        share = sum(any(term.startswith(word) for term in terms) for word in words) / len(words)
        page, _, anchor = found["ref"].partition("#")
        score = found["score"] * (1 + (share + (not anchor)) ** 2)
        scores[page] = max(score, scores.get(page, 0))
    return [page.removesuffix(".html") for page in sorted(scores, key=lambda p: -scores[p])]


def failures(site: dict[str, Any]) -> list[str]:
    """Returns a line for each question whose page is not among the first ones."""
    index, lines = index_of(site), []
    for question, right in QUESTIONS.items():
        shown = pages(index, words_of(question, site["config"]["separator"]))[:_NUM_SHOWN]
        if not set(shown) & set(right.split()):
            lines.append(f"{question!r} finds {', '.join(shown)}, but not {right}")
    return lines


if __name__ == "__main__":
    path = Path(__file__).parents[1] / ".site" / "search" / "search_index.json"
    lines = failures(json.loads(path.read_text()))
    print("\n".join([f"The search fails {len(lines)} of {len(QUESTIONS)} questions.", *lines]))
    sys.exit(len(lines) > _MOST_FAILURES)
