"""Parallel corpora and subword vocabularies for translation.

    corpus = read_tsv("train.tsv.gz")
    vocabulary = learn_vocabulary([*corpus.sources, *corpus.targets], "subwords.model", size=8000)
    pairs = encode_pairs(corpus, vocabulary, max_length=64)
    model.fit(TokenBatches(pairs, tokens_per_batch=4096), epochs=10)

The vocabulary is a SentencePiece model; token 0 is padding and token 1 ends a sentence.
"""

import gzip
import io
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

import numpy as np

from tnt_jax.data.arguments import check_choice
from tnt_jax.data.elements import OnError
from tnt_jax.files import replacing
from tnt_jax.log import logger

PAD_ID, END_ID, UNKNOWN_ID = 0, 1, 2


@dataclass(frozen=True)
class ParallelCorpus:
    """Sentences and as many translations; `num_skipped` pairs were empty or malformed."""

    sources: list[str]
    targets: list[str]
    num_skipped: int = 0

    def __len__(self) -> int:
        return len(self.sources)


@dataclass(frozen=True)
class TokenPairs:
    """Encoded pairs, int32 `[tokens]` each, which end with `END_ID`.

    Of `num_too_long` pairs, which are left out, a side was longer than allowed.
    """

    sources: list[np.ndarray]
    targets: list[np.ndarray]
    num_too_long: int = 0

    def __len__(self) -> int:
        return len(self.sources)

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        return self.sources[index], self.targets[index]


def read_parallel(
    source_file: str | Path, target_file: str | Path, *, on_error: OnError = "raise"
) -> ParallelCorpus:
    """Reads two UTF-8 files whose lines are translations of each other.

    A file whose name ends in `.gz` is decompressed.

    Args:
        source_file: One sentence per line.
        target_file: As many lines.
        on_error: What to do with a pair of which one line is empty: `"raise"`, or `"skip"` and
            count.

    Raises:
        ValueError: If the files differ in length, or at an empty line; the text names the file and
            the line.
    """
    sources, targets = _lines(source_file), _lines(target_file)
    if len(sources) != len(targets):
        raise ValueError(
            f"The lines of two parallel files must translate one another, but {source_file} has "
            f"{len(sources)} lines and {target_file} has {len(targets)}. Check that both are "
            "complete."
        )
    rows = (
        (number, (source, target), str(source_file if not source.strip() else target_file))
        for number, (source, target) in enumerate(zip(sources, targets, strict=True), 1)
    )
    return _corpus(rows, on_error)


def read_tsv(
    file: str | Path, *, columns: tuple[int, int] = (0, 1), on_error: OnError = "raise"
) -> ParallelCorpus:
    """Reads a UTF-8 file with one tab-separated pair per line.

    A file whose name ends in `.gz` is decompressed.

    Args:
        file: The file.
        columns: Numbers of the columns with the sentence and its translation.
        on_error: What to do with a line that lacks a column or has an empty one: `"raise"`, or
            `"skip"` and count.

    Raises:
        ValueError: At a line with too few columns or an empty one; the text names the file and the
            line.
    """

    def rows() -> Iterator[tuple[int, tuple[str, str] | None, str]]:
        for number, line in enumerate(_lines(file), 1):
            cells = line.split("\t")
            pair = (cells[columns[0]], cells[columns[1]]) if len(cells) > max(columns) else None
            yield number, pair, str(file)

    return _corpus(rows(), on_error)


def read_translations(
    dataset: Iterable[Any], *, source: str, target: str, on_error: OnError = "raise"
) -> ParallelCorpus:
    """Reads a TFDS translation set, whose examples hold one text for each language.

    Args:
        dataset: Examples such as `{"en": b"...", "de": b"..."}`: a TFDS `data_source` or
            `tfds.as_numpy(...)`.
        source: Language of the sentences.
        target: Language of the translations.
        on_error: What to do with an empty text: `"raise"`, or `"skip"` and count.

    Raises:
        ValueError: If a language is missing; the text lists those that are there.
    """

    def rows() -> Iterator[tuple[int, tuple[str, str], str]]:
        for number, example in enumerate(dataset):
            for language in (source, target):
                if language not in example:
                    raise ValueError(
                        f"The examples have no language {language!r}, but "
                        f"{', '.join(map(repr, example))}."
                    )
            yield number, (_text(example[source]), _text(example[target])), "the dataset"

    return _corpus(rows(), on_error)


class Vocabulary:
    """A SentencePiece model that turns text into token ids and back.

    Args:
        file: The model, as `learn_vocabulary` writes it. Padding must be token 0 and the end of a
            sentence token 1.

    Raises:
        FileNotFoundError: If the file does not exist.
        ValueError: If it is not a SentencePiece model, or padding or end have other ids.
    """

    def __init__(self, file: str | Path) -> None:
        import sentencepiece

        if not Path(file).is_file():
            raise FileNotFoundError(
                f"There is no vocabulary {file}. Learn one with learn_vocabulary."
            )
        try:
            self._processor = sentencepiece.SentencePieceProcessor(model_file=str(file))
        except RuntimeError as error:
            raise ValueError(
                f"{file} is not a SentencePiece model ({error}). Subword lists of other tools "
                "cannot be read: learn a vocabulary from the training texts with learn_vocabulary."
            ) from error
        ids = (self._processor.pad_id(), self._processor.eos_id())
        if ids != (PAD_ID, END_ID):
            raise ValueError(
                f"{file} must have padding as token {PAD_ID} and the end of a sentence as token "
                f"{END_ID}, but has {ids}."
            )

    @property
    def size(self) -> int:
        """Number of tokens."""
        return self._processor.vocab_size()

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Returns the tokens of each text, int32 `[tokens]`, with `END_ID` last."""
        return [
            np.array([*tokens, END_ID], np.int32) for tokens in self._processor.encode(list(texts))
        ]

    def decode(self, tokens: Iterable[int]) -> str:
        """Returns the text of tokens up to the first `END_ID`, without padding."""
        text = takewhile(lambda token: token != END_ID, tokens)
        return self._processor.decode([int(token) for token in text if token != PAD_ID])


def learn_vocabulary(
    texts: Iterable[str], file: str | Path, *, size: int, coverage: float = 1.0
) -> Vocabulary:
    """Learns a byte-pair vocabulary and writes it to `file`, or loads an existing file.

    The method is that of Sennrich et al. 2016, arXiv:1508.07909. In a job of several processes one
    learns, and the others wait for the file, which all must be able to read.

    Args:
        texts: Sentences of all languages.
        file: Where the model is kept.
        size: Number of tokens, with padding, end and unknown.
        coverage: Share of the characters that get tokens of their own; 0.9995 is usual for Chinese
            and Japanese.

    Raises:
        ValueError: If the texts have too few or too many different characters for `size`.
    """
    from tnt_jax.distributed.host import collectives
    from tnt_jax.distributed.joining import runtime

    if runtime.is_master_rank() and not Path(file).exists():
        _learn(texts, Path(file), size, coverage)
    collectives.barrier(timeout_s=3600)
    return Vocabulary(file)


def encode_pairs(corpus: ParallelCorpus, vocabulary: Vocabulary, *, max_length: int) -> TokenPairs:
    """Encodes a corpus, without pairs that have more than `max_length` tokens on a side.

    The end token counts.

    Raises:
        ValueError: If no pair is left.
    """
    encoded = zip(vocabulary.encode(corpus.sources), vocabulary.encode(corpus.targets), strict=True)
    pairs = [pair for pair in encoded if max(map(len, pair)) <= max_length]
    num_too_long = len(corpus) - len(pairs)
    if not pairs:
        raise ValueError(
            f"None of {len(corpus)} pairs has at most {max_length} tokens on both sides. Raise "
            "max_length."
        )
    if num_too_long:
        logger.info(
            "Left out %d of %d pairs with more than %d tokens on a side.",
            num_too_long,
            len(corpus),
            max_length,
        )
    sources, targets = map(list, zip(*pairs, strict=True))
    return TokenPairs(sources, targets, num_too_long)


def _learn(texts: Iterable[str], file: Path, size: int, coverage: float) -> None:
    import sentencepiece

    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(texts),
            model_writer=model,
            model_type="bpe",
            vocab_size=size,
            character_coverage=coverage,
            pad_id=PAD_ID,
            eos_id=END_ID,
            unk_id=UNKNOWN_ID,
            bos_id=-1,
            minloglevel=2,
        )
    except RuntimeError as error:
        raise ValueError(
            f"No vocabulary of {size} tokens can be learnt from these texts: {error}"
        ) from error
    # A process that finds the file under its final name finds all of it.
    with replacing(file) as temporary:
        temporary.write_bytes(model.getvalue())


def _corpus(
    rows: Iterable[tuple[int, tuple[str, str] | None, str]], on_error: OnError
) -> ParallelCorpus:
    check_choice("on_error", on_error, ("raise", "skip"))
    sources = []
    targets = []
    num_skipped = 0
    for number, pair, file in rows:
        if pair is not None and pair[0].strip() and pair[1].strip():
            sources.append(pair[0].strip())
            targets.append(pair[1].strip())
        elif on_error == "skip":
            num_skipped += 1
        else:
            problem = "has too few columns" if pair is None else "is empty, or one of its sides is"
            raise ValueError(
                f"{file}, line {number} {problem}. Correct it, or pass on_error='skip'."
            )
    if num_skipped:
        logger.warning(
            "Skipped %d pairs that are empty or malformed; %d are left.", num_skipped, len(sources)
        )
    return ParallelCorpus(sources, targets, num_skipped)


def _lines(file: str | Path) -> list[str]:
    content = Path(file).read_bytes()
    try:
        text = (gzip.decompress(content) if str(file).endswith(".gz") else content).decode("utf-8")
    except (UnicodeDecodeError, EOFError, gzip.BadGzipFile) as error:
        raise ValueError(f"{file} cannot be read as UTF-8 text: {error}.") from error
    # Not splitlines(), which also ends lines at characters such as U+2028 that occur inside
    # sentences.
    lines = text.split("\n")
    return [line.removesuffix("\r") for line in (lines[:-1] if lines[-1] == "" else lines)]


def _text(value: Any) -> str:
    return value.decode("utf-8") if isinstance(value, bytes) else str(value)
