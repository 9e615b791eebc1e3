import gzip
import os
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("sentencepiece", reason="needs sentencepiece")

from tnt_jax.data.dispatch import as_source
from tnt_jax.data.indexed.random_access import RandomAccess, RandomAccessSource
from tnt_jax.data.layout import RankSlice, ReadOptions
from tnt_jax.data.recipes.text import (
    ParallelCorpus,
    TokenPairs,
    Vocabulary,
    encode_pairs,
    learn_vocabulary,
    read_parallel,
    read_translations,
    read_tsv,
)
from tnt_jax.data.recipes.token_batches import (
    PaddedPairs,
    TokenBatches,
    TokenBatchSource,
    bucket_lengths,
)

DATA = os.environ.get("TNT_JAX_DATA")
needs_data = pytest.mark.skipif(
    DATA is None, reason="needs TNT_JAX_DATA, the folder of small real datasets"
)


def random_pairs(count, longest=60, seed=0):
    """Pairs whose source starts with the pair's number, so that rows can be told apart."""
    generator = np.random.default_rng(seed)
    lengths = generator.integers(1, longest + 1, (count, 2))
    sources = [
        np.array([number + 3, *[5] * (size - 1)], np.int32)
        for number, size in enumerate(lengths[:, 0])
    ]
    return TokenPairs(sources, [np.full(size, 7, np.int32) for size in lengths[:, 1]])


# ---- Corpora ----


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


def test_empty_line_is_named_or_skipped(tmp_path, caplog):
    (tmp_path / "a.en").write_text("one\ntwo\n\nfour\n")
    (tmp_path / "a.de").write_text("eins\n \ndrei\nvier\n")
    with pytest.raises(ValueError, match=r"a\.de, line 2 is empty"):
        read_parallel(tmp_path / "a.en", tmp_path / "a.de")
    with caplog.at_level("WARNING", logger="tnt_jax"):
        corpus = read_parallel(tmp_path / "a.en", tmp_path / "a.de", on_error="skip")
    assert (corpus.sources, corpus.num_skipped) == (["one", "four"], 2)
    assert "Skipped 2 pairs" in caplog.text


def test_table(tmp_path):
    (tmp_path / "a.tsv").write_text("1\thello\thallo\tCC\n2\tbye\ttschau\n")
    assert read_tsv(tmp_path / "a.tsv", columns=(2, 1)) == ParallelCorpus(
        ["hallo", "tschau"], ["hello", "bye"]
    )
    with pytest.raises(ValueError, match=r"a\.tsv, line 2 has too few columns"):
        read_tsv(tmp_path / "a.tsv", columns=(1, 3))
    (tmp_path / "b.tsv").write_bytes(b"\xff\xfe\n")
    with pytest.raises(ValueError, match=r"b\.tsv cannot be read as UTF-8 text"):
        read_tsv(tmp_path / "b.tsv")
    with pytest.raises(
        ValueError, match="on_error must be one of 'raise', 'skip', but is 'ignore'"
    ):
        read_tsv(tmp_path / "a.tsv", on_error="ignore")  # pyright: ignore[reportArgumentType]


def test_translation_sets():
    examples = [{"en": b"a", "de": b"\xc3\xa4"}, {"en": "b", "de": "be"}]
    assert read_translations(examples, source="de", target="en").sources == ["\u00e4", "be"]
    with pytest.raises(ValueError, match="no language 'fr', but 'en', 'de'"):
        read_translations(examples, source="en", target="fr")


@needs_data
def test_vocabulary_on_real_sentences(tmp_path):
    corpus = read_tsv(Path(DATA) / "tatoeba_ende" / "train.eng-deu.tsv.gz")
    assert len(corpus) == 46980
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
    pairs = encode_pairs(small, vocabulary, max_length=12)
    assert 0 < pairs.num_too_long < 4000
    assert len(pairs) + pairs.num_too_long == 4000
    assert max(len(tokens) for tokens in (*pairs.sources, *pairs.targets)) <= 12
    with pytest.raises(ValueError, match="None of 4000 pairs has at most 1 tokens"):
        encode_pairs(small, vocabulary, max_length=1)


def test_vocabulary_errors(tmp_path):
    with pytest.raises(FileNotFoundError, match="There is no vocabulary"):
        Vocabulary(tmp_path / "no.model")
    # A subword list as tensor2tensor writes it.
    (tmp_path / "vocab.ende").write_text("'<pad>_'\n'<EOS>_'\n'the_'\n")
    with pytest.raises(ValueError, match=r"vocab\.ende is not a SentencePiece model"):
        Vocabulary(tmp_path / "vocab.ende")
    with pytest.raises(ValueError, match="No vocabulary of 500 tokens can be learnt"):
        learn_vocabulary(["abc"], tmp_path / "x.model", size=500)


# ---- Batches by tokens ----


@pytest.mark.parametrize("ranks_per_process", [1, 2])
@pytest.mark.parametrize(("num_processes", "num_groups"), [(1, 1), (2, 1), (4, 1), (2, 2), (4, 2)])
def test_every_pair_is_in_one_batch_of_its_bucket(num_processes, num_groups, ranks_per_process):
    pairs = random_pairs(700)
    spec = TokenBatches(pairs, tokens_per_batch=640)
    num_ranks = num_processes * ranks_per_process
    rank_slices = [
        RankSlice(num_ranks, process * ranks_per_process, ranks_per_process, num_groups=num_groups)
        for process in range(num_processes)
    ]
    sources = [TokenBatchSource(spec, rank_slice) for rank_slice in rank_slices]
    (one,) = [TokenBatchSource(spec, RankSlice(1))]
    shapes, seen, num_batches = set(), [], 0
    for step, whole in zip(
        zip(*(s.batches(3) for s in sources), strict=True), one.batches(3), strict=True
    ):
        assert len({batch.data[1].shape for batch in step}) == 1
        assert {batch.num_rows for batch in step} == {whole.num_rows}
        shapes.add(step[0].data[1].shape)
        of_first_group = sum(batch.mask.sum() for batch in step[: num_processes // num_groups])
        assert of_first_group == -(-whole.num_rows // num_groups)
        rows = [[x[batch.mask > 0] for x in batch.data[0]] for batch in step]
        for side in range(2):
            np.testing.assert_array_equal(
                np.concatenate([row[side] for row in rows]), whole.data[0][side][whole.mask > 0]
            )
        length = whole.data[1].shape[1]
        assert whole.num_rows * length <= 640
        for source, target in zip(*(x[whole.mask > 0] for x in whole.data[0]), strict=True):
            index = source[0] - 3
            np.testing.assert_array_equal(source[source > 0], pairs.sources[index])
            np.testing.assert_array_equal(target[target > 0], pairs.targets[index])
            longest = max(len(pairs.sources[index]), len(pairs.targets[index]))
            assert length == min(bucket for bucket in one.buckets if bucket >= longest)
            seen.append(index)
        num_batches += 1
    assert sorted(seen) == list(range(700))
    assert num_batches == one.num_batches
    assert len(shapes) <= len(one.buckets)


def test_epochs_differ_and_resume_at_a_batch():
    source = TokenBatchSource(TokenBatches(random_pairs(300), tokens_per_batch=512), RankSlice(2))
    first, second = ([batch.data[1] for batch in source.batches(epoch)] for epoch in range(2))
    assert any(
        a.shape != b.shape or not np.array_equal(a, b) for a, b in zip(first, second, strict=True)
    )
    for resumed, expected in zip(source.batches(1, start_batch=4), second[4:], strict=True):
        np.testing.assert_array_equal(resumed.data[1], expected)


def test_unshuffled_batches_keep_the_order_in_a_bucket():
    source = TokenBatchSource(
        TokenBatches(random_pairs(50, longest=8), 80, shuffle=False), RankSlice(1)
    )
    numbers = np.concatenate(
        [batch.data[0][0][batch.mask > 0][:, 0] for batch in source.batches(0)]
    )
    np.testing.assert_array_equal(numbers, np.arange(50) + 3)


@pytest.mark.parametrize(
    ("longest", "expected"),
    [(5, (8,)), (9, (8, 16)), (64, (8, 16, 24, 32, 48, 64)), (70, (8, 16, 24, 32, 48, 64, 88))],
)
def test_bucket_lengths(longest, expected):
    assert bucket_lengths(longest) == expected


def test_wrong_sizes_are_explained():
    pairs = random_pairs(50)
    with pytest.raises(
        ValueError,
        match=r"gives 1 pairs of 64 tokens, fewer than the 4 ranks. Use at least 256 tokens",
    ):
        TokenBatchSource(TokenBatches(pairs, tokens_per_batch=100), RankSlice(4))
    with pytest.raises(
        ValueError, match=r"must rise and hold the longest pair \(60 tokens\), but are \[8, 16\]"
    ):
        TokenBatchSource(TokenBatches(pairs, 640, buckets=(8, 16)), RankSlice(1))
    with pytest.raises(ValueError, match="no pairs"):
        TokenBatchSource(TokenBatches(TokenPairs([], []), 640), RankSlice(1))


def test_fit_takes_token_batches_and_padded_pairs():
    pairs = random_pairs(40, longest=16)
    assert isinstance(
        as_source(TokenBatches(pairs, 320), None, None, ReadOptions(RankSlice(2))), TokenBatchSource
    )
    (batch, *_) = RandomAccessSource(
        RandomAccess(PaddedPairs(pairs, 16), batch_size=8), RankSlice(2)
    ).batches(0)
    assert batch.data[0][0].shape == batch.data[1].shape == (4, 16)
    np.testing.assert_array_equal(batch.data[0][0][:, 0], [3, 4, 5, 6])
    with pytest.raises(ValueError, match="longest sequence has 16 tokens, more than length=12"):
        PaddedPairs(pairs, 12)
