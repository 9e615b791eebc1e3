import argparse
import gzip
import os
from pathlib import Path

import example_modules  # noqa: F401
import numpy as np
import pytest

pytest.importorskip("sentencepiece", reason="needs sentencepiece")

from translation_data import (
    ParallelCorpus,
    Vocabulary,
    learn_vocabulary,
    read_parallel,
    read_tsv,
    training_corpus,
)

import tnt_jax as tnt

DATA = os.environ.get("TNT_JAX_DATA")
needs_data = pytest.mark.skipif(
    DATA is None, reason="needs TNT_JAX_DATA, the folder of small real datasets"
)


def test_two_files(tmp_path):
    (tmp_path / "a.en").write_text("one\r\ntwo\u2028half\nthree\n", encoding="utf-8", newline="")
    (tmp_path / "a.de.gz").write_bytes(gzip.compress(b"eins\nzwei\ndrei"))
    corpus = read_parallel(tmp_path / "a.en", tmp_path / "a.de.gz")
    assert corpus.sources == ["one", "two\u2028half", "three"]
    assert corpus.targets == ["eins", "zwei", "drei"]


def test_files_of_different_length_are_named(tmp_path):
    (tmp_path / "a.en").write_text("one\ntwo\n")
    (tmp_path / "a.de").write_text("eins\n")
    with pytest.raises(ValueError, match=r"a\.en has 2 lines and .*a\.de has 1"):
        read_parallel(tmp_path / "a.en", tmp_path / "a.de")


def test_empty_line_is_named_or_skipped(tmp_path, capsys):
    (tmp_path / "a.en").write_text("one\ntwo\n\nfour\n")
    (tmp_path / "a.de").write_text("eins\n \ndrei\nvier\n")
    with pytest.raises(
        ValueError, match=r"a\.de, line 2: a sentence or its translation is missing"
    ):
        read_parallel(tmp_path / "a.en", tmp_path / "a.de")
    corpus = read_parallel(tmp_path / "a.en", tmp_path / "a.de", skip=True)
    assert corpus == (["one", "four"], ["eins", "vier"])
    assert "Skipped 2 pairs" in capsys.readouterr().out


def test_table(tmp_path):
    (tmp_path / "a.tsv").write_text("hello\thallo\tCC\nbye\ttschau\n")
    assert read_tsv(tmp_path / "a.tsv") == (["hello", "bye"], ["hallo", "tschau"])
    (tmp_path / "a.tsv").write_text("hello\thallo\nbye\n")
    with pytest.raises(ValueError, match=r"a\.tsv, line 2: a sentence or its translation"):
        read_tsv(tmp_path / "a.tsv")
    (tmp_path / "b.tsv").write_bytes(b"\xff\xfe\n")
    with pytest.raises(ValueError, match=r"b\.tsv cannot be read as UTF-8 text"):
        read_tsv(tmp_path / "b.tsv")


def test_translation_sets(tmp_path, monkeypatch):
    class Pairs:
        def as_numpy_iterator(self):
            return iter([{"en": b"a", "de": b"\xc3\xa4"}, {"en": b"b", "de": b" "}])

    (tmp_path / "wmt14_translate").mkdir()
    monkeypatch.setattr(tnt.data, "load", lambda *_, **__: Pairs())
    args = argparse.Namespace(data_dir=tmp_path, source="de", target="en")
    assert training_corpus(args) == (["\u00e4"], ["a"])


@needs_data
def test_vocabulary_on_real_sentences(tmp_path):
    corpus = read_tsv(Path(DATA) / "tatoeba_ende" / "train.eng-deu.tsv.gz")
    assert len(corpus.sources) == len(corpus.targets) == 46980
    small = ParallelCorpus(corpus.sources[-4000:], corpus.targets[-4000:])
    vocabulary = learn_vocabulary(
        [*small.sources, *small.targets], tmp_path / "new" / "subwords.model", size=1000
    )
    assert vocabulary.size == 1000
    for text, tokens in zip(
        small.targets[:200], vocabulary.encode(small.targets[:200]), strict=True
    ):
        assert tokens.dtype == np.int32
        assert tokens[-1] == 1
        assert (tokens[:-1] > 1).all()
        assert vocabulary.decode([*tokens, 0, 0, 17]) == " ".join(
            text.replace("\u202f", " ").replace("\xa0", " ").split()
        )
    again = learn_vocabulary([], tmp_path / "new" / "subwords.model", size=5)
    assert (
        again.encode(["Wie geht es?"])[0].tolist()
        == vocabulary.encode(["Wie geht es?"])[0].tolist()
    )


def test_vocabulary_errors(tmp_path):
    # A subword list as tensor2tensor writes it.
    (tmp_path / "vocab.ende").write_text("'<pad>_'\n'<EOS>_'\n'the_'\n")
    with pytest.raises(ValueError, match=r"vocab\.ende is not a SentencePiece model"):
        Vocabulary(tmp_path / "vocab.ende")
    with pytest.raises(ValueError, match="No vocabulary of 500 tokens can be learnt"):
        learn_vocabulary(["abc"], tmp_path / "x.model", size=500)
    assert not (tmp_path / "x.model").exists()
