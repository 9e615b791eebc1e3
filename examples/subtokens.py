r"""Vocabularies and token files of the Transformer tutorial, as TensorFlow's official models write
them.

A vocabulary is a text file with one quoted subtoken a line, such as `'the_'`; `vocab.ende.32768` is
one. A text is cut where letters and digits meet other characters; a single space between two such
tokens is implied. Each token is escaped, gets a `_` as its end, and is cut into the longest
subtokens that fit, from the left. In a token `\u` stands for `_`, two backslashes for one, and
`\N;` for the character with the code N, where no subtoken has that character. The format and its
rules are those of `official/legacy/transformer/utils/tokenizer.py` in github.com/tensorflow/models.
"""

import re
import unicodedata
from functools import cache
from itertools import groupby
from pathlib import Path

import numpy as np

import tnt_jax as tnt

PAD_ID, END_ID = 0, 1
RESERVED = ("<pad>", "<EOS>")  # Tokens PAD_ID and END_ID.
ESCAPES = {"\\": "\\\\", "_": "\\u"}
ESCAPE_CHARACTERS = set("\\_u;0123456789")
SIDES = ("inputs", "targets")  # Lists of an example in a token file.
UNDEFINED = "\u3013"  # Decoded from a code that no character has.


class SubtokenVocabulary:
    """A list of subtokens that turns text into token ids and back.

    Args:
        file: One subtoken a line, in quotes. The lines of `<pad>` and `<EOS>` (`<pad>_` and
            `<EOS>_` in the files of tensor2tensor) may be left out; these are tokens 0 and 1.

    Raises:
        ValueError: If a line is not quoted, or the file is not UTF-8; the text names the line.
    """

    def __init__(self, file):
        self.file = Path(file)
        self.subtokens = [*RESERVED, *_read_subtokens(self.file)]
        self._ids = {subtoken: number for number, subtoken in enumerate(self.subtokens)}
        self._longest = max(map(len, self.subtokens))
        self._alphabet = ESCAPE_CHARACTERS.union(*self.subtokens)
        self._token_ids = cache(self._ids_of_token)

    @property
    def size(self):
        """Number of tokens."""
        return len(self.subtokens)

    def encode(self, texts):
        """Returns the tokens of each text, int32 `[tokens]`, with `END_ID` last.

        Raises:
            ValueError: If a character has neither a subtoken nor those of its escaped form.
        """
        return [
            np.array([*(i for t in split(text) for i in self._token_ids(t)), END_ID], np.int32)
            for text in texts
        ]

    def decode(self, tokens):
        """Returns the text of tokens up to the first `END_ID`, without padding."""
        kept = []
        for token in map(int, tokens):
            if token == END_ID:
                break
            if token != PAD_ID:
                kept.append(self.subtokens[token])
        return join([unescape(token) for token in "".join(kept).split("_") if token])

    def _ids_of_token(self, token):
        escaped, start, ids = escape(token, self._alphabet), 0, []
        while start < len(escaped):
            longest = min(len(escaped), start + self._longest)
            for end in range(longest, start, -1):
                if escaped[start:end] in self._ids:
                    break
            else:
                raise ValueError(
                    f"{self.file} has no subtoken for {escaped[start]!r} in the token "
                    f"{token!r}. Every character of a subtoken, the digits, the letter u and "
                    f"\\ _ ; must also stand on lines of their own."
                )
            ids.append(self._ids[escaped[start:end]])
            start = end
        return ids


def is_subtoken_list(file):
    """Returns whether a vocabulary is a list of quoted subtokens, not a SentencePiece model."""
    with Path(file).open("rb") as opened:
        return opened.read(1) in (b"'", b'"')


def split(text):
    """Returns the runs of letters and digits, and those of other characters; a single space between
    two runs is left out.
    """
    runs = ["".join(run) for _, run in groupby(text, key=_is_letter_or_digit)]
    return [run for place, run in enumerate(runs) if run != " " or place in (0, len(runs) - 1)]


def join(tokens):
    """Returns the text of tokens: `split` undone."""
    pieces = []
    for before, token in zip(["", *tokens], tokens, strict=False):
        if before and _is_letter_or_digit(before[0]) and _is_letter_or_digit(token[0]):
            pieces.append(" ")
        pieces.append(token)
    return "".join(pieces)


def escape(token, alphabet):
    """Returns a token of characters in `alphabet` alone, with its end."""
    return "".join(ESCAPES.get(c) or (c if c in alphabet else f"\\{ord(c)};") for c in token) + "_"


def unescape(token):
    """Returns a token without its end as it stands in the text: `escape` undone."""

    def character(found):
        if found[1] in ("u", "\\"):
            return "_" if found[1] == "u" else "\\"
        return _character(found[2])

    return re.sub(r"\\(u|\\|([0-9]+);)", character, token)


def read_token_pairs(files, vocabulary, *, max_length, num_pairs=None):
    """Returns the pairs of TFRecord files whose examples have the int64 lists `inputs` and
    `targets`, each with `END_ID` last; pairs with more than `max_length` tokens on a side are left
    out.

    Args:
        files: Files, read in this order.
        vocabulary: The vocabulary by which the tokens were made.
        max_length: Most tokens of a side.
        num_pairs: Most pairs that are read; None for all.

    Raises:
        ValueError: If an example lacks a list or an end, has a token that the vocabulary has not,
            or a file is damaged; the text names file and example. Also if no pair is left.
    """
    pairs = []
    for file in files:
        read = _read_pairs(file, -1 if num_pairs is None else num_pairs - len(pairs))
        for number, pair in enumerate(read):
            _check_pair(pair, vocabulary, f"{file}, example {number}")
            pairs.append([tokens.astype(np.int32) for tokens in pair])
    return short_pairs(pairs, max_length)


def short_pairs(pairs, max_length):
    """Returns, of encoded pairs, those that have at most `max_length` tokens on both sides.

    Raises:
        ValueError: If no pair is left.
    """
    short = [pair for pair in pairs if max(map(len, pair)) <= max_length]
    if not short:
        raise ValueError(
            f"None of {len(pairs)} pairs has at most {max_length} tokens on both sides. Raise "
            f"--max_length."
        )
    if len(short) < len(pairs) and tnt.is_master_rank():
        print(f"Left out {len(pairs) - len(short)} of {len(pairs)} pairs, which are too long.")
    return tnt.data.TokenPairs(*map(list, zip(*short, strict=True)))


def _read_pairs(file, num_examples):
    """Returns the two lists of each of the first examples of a file, int64; -1 for all."""
    import tensorflow as tf

    features = dict.fromkeys(SIDES, tf.io.RaggedFeature(tf.int64))
    pairs = []
    try:
        for batch in tf.data.TFRecordDataset(str(file)).take(num_examples).batch(1024):
            parsed = tf.io.parse_example(batch, features)
            sides = [parsed[name].numpy() for name in SIDES]
            pairs += zip(*sides, strict=True)
    except (tf.errors.DataLossError, tf.errors.InvalidArgumentError) as error:
        raise ValueError(
            f"{file} is damaged after {len(pairs)} examples, or is no TFRecord file of examples "
            f"with the int64 lists {' and '.join(SIDES)}: {error.message}"
        ) from error
    return pairs


def _check_pair(pair, vocabulary, where):
    for name, tokens in zip(SIDES, pair, strict=True):
        if not len(tokens) or tokens[-1] != END_ID:
            raise ValueError(
                f"{where}: the list {name!r} must end with {END_ID}, the end of a sentence, but is "
                f"{tokens.tolist()}."
            )
        if tokens.min() < 0 or tokens.max() >= vocabulary.size:
            raise ValueError(
                f"{where}: the list {name!r} has tokens from {tokens.min()} to {tokens.max()}, but "
                f"the vocabulary has {vocabulary.size}. Pass the one that the files were made with."
            )


def _read_subtokens(file):
    try:
        # Not splitlines(), which also ends lines at characters that occur inside subtokens.
        lines = [line.strip() for line in file.read_bytes().decode("utf-8").split("\n")]
    except UnicodeDecodeError as error:
        raise ValueError(f"{file} cannot be read as UTF-8 text: {error}.") from error
    lines = lines[:-1] if lines[-1] == "" else lines
    for number, line in enumerate(lines, 1):
        if len(line) < 3 or line[0] not in "'\"" or line[-1] != line[0]:
            raise ValueError(
                f"{file}, line {number} must be a subtoken in quotes, such as 'the_', but is "
                f"{line!r}."
            )
    subtokens = [line[1:-1] for line in lines]
    return [text for text in subtokens if text.removesuffix("_") not in RESERVED]


@cache
def _is_letter_or_digit(character):
    return unicodedata.category(character)[0] in "LN"


def _character(code):
    """Returns the character of a decimal code; one that no text can hold is `UNDEFINED`."""
    # int() of thousands of digits is an error, and a surrogate cannot be written as UTF-8.
    number = int(code) if len(code) < 8 else 0x110000
    return UNDEFINED if number > 0x10FFFF or 0xD800 <= number < 0xE000 else chr(number)
