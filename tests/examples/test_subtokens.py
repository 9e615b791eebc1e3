"""Subtoken vocabularies and TFRecords of tokens, as TensorFlow's official models write them."""

import gzip
import os
import random
import shlex
import sys
import unicodedata
from pathlib import Path

import numpy as np
import pytest
from token_files import ESCAPES, write_records, write_vocabulary

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "examples")]

import subtokens  # noqa: E402
import transformer  # noqa: E402
import translation_data  # noqa: E402


@pytest.fixture
def small(tmp_path):
    lines = ["<pad>", "<EOS>", "the_", "th", "e_", ", _", *"theand,' <>pEOS", *ESCAPES]
    (tmp_path / "vocab").write_text("".join(f"'{line}'\n" for line in lines))
    return subtokens.SubtokenVocabulary(tmp_path / "vocab")


# The tokens that the rules give, cut by hand; `|` stands between subtokens.
@pytest.mark.parametrize(
    ("text", "cut"),
    [
        ("the", "the_"),
        ("the the", "the_|the_"),  # One space between words is implied.
        ("the  the", "the_| | |_|the_"),
        (" the ", " |_|the_| |_"),
        ("the, the", "the_|, _|the_"),
        ("then", "th|e|n|_"),  # The longest subtoken first: `the_` does not fit.
        ("an'an", "a|n|_|'|_|a|n|_"),
        ("a_a", r"a|_|\|u|_|a|_"),
        ("a\\a", r"a|_|\|\|_|a|_"),
        ("\u00e9", r"\|2|3|3|;|_"),  # No subtoken has this letter.
        ("\n", r"\|1|0|;|_"),
        ("", ""),
    ],
)
def test_a_text_is_cut_as_by_hand(small, text, cut):
    expected = [small.subtokens.index(subtoken) for subtoken in cut.split("|") if subtoken]
    (tokens,) = small.encode([text])
    assert tokens.dtype == np.int32
    assert tokens.tolist() == [*expected, 1]
    assert small.decode([*tokens, 0, 5, 5]) == text


def test_any_text_comes_back(small):
    letters = [chr(code) for code in range(0x3000) if unicodedata.category(chr(code)) != "Cs"]
    choices = [*"the an ,'_\\ \n\r\t;019", "\u2028", "\U0001f600", "\U0010ffff"] * 20 + letters
    rng = random.Random(0)
    texts = ["".join(rng.choices(choices, k=rng.randrange(30))) for _ in range(500)]
    assert [small.decode(tokens) for tokens in small.encode(texts)] == texts


@pytest.mark.parametrize(
    ("escaped", "text"),
    # The codes of a surrogate, beyond Unicode, and of more digits than int() reads.
    [
        (r"\55296;", "\u3013"),
        (r"\1114112;", "\u3013"),
        ("\\" + "9" * 5000 + ";", "\u3013"),
        (r"\99", r"\99"),
        ("\\", "\\"),
    ],
    ids=["surrogate", "beyond", "long", "no end", "alone"],
)
def test_what_a_model_may_make_up_is_decoded_to_a_text_that_can_be_written(small, escaped, text):
    tokens = [small.subtokens.index(character) for character in escaped]
    assert small.decode(tokens) == text
    text.encode("utf-8")


def test_letters_and_digits_are_those_of_unicode_categories():
    assert subtokens.split("\u00e9\u0661\u4e00x\u00b2 \u0301.a") == [
        "\u00e9\u0661\u4e00x\u00b2",
        " \u0301.",
        "a",
    ]


@pytest.mark.parametrize("reserved", [("<pad>", "<EOS>"), ("<pad>_", "<EOS>_"), ()])
def test_reserved_lines_may_be_spelt_as_in_tensor2tensor_or_missing(tmp_path, reserved):
    file = write_vocabulary(tmp_path / "vocab", ["the"], "", reserved)
    vocabulary = translation_data.read_vocabulary(file)
    assert vocabulary.encode(["the"])[0].tolist() == [2, 1]
    assert vocabulary.size == 3 + len(ESCAPES)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"'a'\nb\n", "line 2 must be a subtoken in quotes, such as 'the_', but is 'b'"),
        (b"'a'\n''\n", "line 2 must be a subtoken in quotes"),
        (b"'a\xff'\n", "cannot be read as UTF-8"),
    ],
)
def test_a_file_that_is_no_list_is_explained(tmp_path, content, message):
    (tmp_path / "vocab").write_bytes(content)
    with pytest.raises(ValueError, match=message):
        translation_data.read_vocabulary(tmp_path / "vocab")


def test_a_vocabulary_without_single_characters_says_which_is_missing(tmp_path):
    (tmp_path / "vocab").write_text("'the_'\n")
    with pytest.raises(ValueError, match=r"no subtoken for 't' in the token 'then'"):
        subtokens.SubtokenVocabulary(tmp_path / "vocab").encode(["then"])


@pytest.mark.skipif("TNT_JAX_DATA" not in os.environ, reason="needs the data sets in TNT_JAX_DATA")
def test_real_sentences_come_back(tmp_path):
    file = Path(os.environ["TNT_JAX_DATA"]) / "tatoeba_ende" / "train.eng-deu.tsv.gz"
    with gzip.open(file, "rt", encoding="utf-8") as opened:
        pairs = opened.read().splitlines()[::10]
    texts = [text for pair in pairs for text in pair.split("\t")]
    words = sorted({word for text in texts[:1000] for word in text.split() if word.isalnum()})
    file = write_vocabulary(tmp_path / "vocab.ende", words, "".join(texts[:2000]))
    vocabulary = subtokens.SubtokenVocabulary(file)
    encoded = vocabulary.encode(texts)
    assert [vocabulary.decode(tokens) for tokens in encoded] == texts
    assert max(map(max, encoded)) < vocabulary.size


# ---- Files of tokens ----


def test_token_files_give_the_pairs_in_the_order_of_their_names(tmp_path, small, capsys):
    pairs = [{"inputs": [2, n + 3, 1], "targets": [n + 3] * (n % 7) + [1]} for n in range(10)]
    write_records(tmp_path / "wmt32k-train-00002-of-00002", pairs[6:])
    write_records(tmp_path / "wmt32k-train-00001-of-00002", pairs[:6])
    write_records(tmp_path / "wmt32k-dev-00001-of-00001", pairs)
    files = translation_data.token_files(tmp_path)
    read = subtokens.read_token_pairs(files, small, max_length=6)
    kept = [pair for pair in pairs if len(pair["targets"]) <= 6]
    assert [tokens.tolist() for tokens in read.sources] == [pair["inputs"] for pair in kept]
    assert [tokens.tolist() for tokens in read.targets] == [pair["targets"] for pair in kept]
    assert {tokens.dtype for tokens in (*read.sources, *read.targets)} == {np.dtype("int32")}
    assert "Left out 1 of 10 pairs, which are too long." in capsys.readouterr().out
    first = subtokens.read_token_pairs(files, small, max_length=6, num_pairs=7)
    assert len(first) == sum(len(pair["targets"]) <= 6 for pair in pairs[:7])
    assert len(subtokens.read_token_pairs(files, small, max_length=9, num_pairs=4)) == 4
    with pytest.raises(ValueError, match="None of 10 pairs has at most 2 tokens"):
        subtokens.read_token_pairs(files, small, max_length=2)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"inputs": [2, 1]}, r"example 1: the list 'targets' must end with 1, .* but is \[\]"),
        ({"inputs": [2, 3], "targets": [1]}, r"the list 'inputs' must end with 1, .* \[2, 3\]"),
        ({"inputs": [99, 1], "targets": [1]}, "tokens from 1 to 99, but the vocabulary has 35"),
        ({"inputs": [2**32 + 2, 1], "targets": [1]}, "tokens from 1 to 4294967298"),
        ({"inputs": [-1, 1], "targets": [1]}, "tokens from -1 to 1"),
    ],
)
def test_wrong_tokens_are_explained(tmp_path, small, bad, message):
    write_records(tmp_path / "x-train.tfrecord", [{"inputs": [2, 1], "targets": [3, 1]}, bad])
    with pytest.raises(ValueError, match=message):
        subtokens.read_token_pairs([tmp_path / "x-train.tfrecord"], small, max_length=9)


def test_a_damaged_file_is_named(tmp_path, small):
    file = tmp_path / "x-train.tfrecord"
    write_records(file, [{"inputs": [2, 1], "targets": [3, 1]}] * 3)
    file.write_bytes(file.read_bytes()[:-5])
    with pytest.raises(ValueError, match=r"x-train\.tfrecord is damaged after"):
        subtokens.read_token_pairs([file], small, max_length=9)


# ---- The tutorial's command ----

COMMAND = """
    --data_dir=${WMT14_PATH} --vocab_file=${WMT14_PATH}/vocab.ende.32768
    --bleu_ref=${WMT14_PATH}/newstest2014.de --bleu_source=${WMT14_PATH}/newstest2014.en
    --param_set=big --train_epochs=30 --epochs_between_evals=30 --batch_size=32736
"""


@pytest.fixture
def wmt14(tmp_path):
    english, german = ["the dog", "the big dog"] * 20, ["der Hund", "der grosse Hund"] * 20
    file = write_vocabulary(tmp_path / "vocab.ende.32768", ["the", "der", "Hund"], "abdehgorsu ")
    vocabulary = subtokens.SubtokenVocabulary(file)
    pairs = zip(vocabulary.encode(english), vocabulary.encode(german), strict=True)
    write_records(
        tmp_path / "wmt32k-train-00001-of-00001",
        [{"inputs": one.tolist(), "targets": two.tolist()} for one, two in pairs],
    )
    (tmp_path / "newstest2014.en").write_text("".join(f"{line}\n" for line in english[:5]))
    (tmp_path / "newstest2014.de").write_text("".join(f"{line}\n" for line in german[:5]))
    return tmp_path


def test_the_tutorials_command_trains_the_big_transformer_on_its_files(wmt14, monkeypatch):
    words = shlex.split(COMMAND.replace("${WMT14_PATH}", str(wmt14)))
    monkeypatch.setattr(sys, "argv", ["transformer.py", *words])
    args = transformer.parse_args()
    pairs, vocabulary = translation_data.training_pairs(args)
    assert (len(pairs), vocabulary.decode(pairs.targets[1])) == (40, "der grosse Hund")
    settings = transformer.make_settings(args, vocabulary.size)
    sizes = [settings[name] for name in ("width", "num_heads", "filter_dim", "vocab_size")]
    assert sizes == [1024, 16, 4096, vocabulary.size]
    assert transformer.train_data(args, pairs).tokens_per_batch == 32736
    assert list(range(0, args.train_epochs, args.epochs_between_evals)) == [0]
    test = translation_data.test_corpus(args)
    assert (test.sources[1], test.targets[1]) == ("the big dog", "der grosse Hund")
