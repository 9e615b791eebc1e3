"""Texts of the translation tutorial: reading and encoding them, translating test sentences, and
BLEU.
"""

import gzip
import io
from itertools import takewhile
from pathlib import Path
from typing import NamedTuple

import numpy as np
import sentencepiece
import subtokens
from subtokens import END_ID, PAD_ID

import tnt_jax as tnt


def problem_of(args):
    """Returns what is wrong with the flags, or None."""
    if bool(args.bleu_source) != bool(args.bleu_ref):
        return "--bleu_source and --bleu_ref must be given together."
    if args.synthetic_data and args.bleu_source:
        return (
            "--synthetic_data has no vocabulary to translate with: leave out --bleu_source and "
            "--bleu_ref."
        )
    if not args.synthetic_data and not (args.data_dir and Path(args.data_dir).is_dir()):
        return (
            f"--data_dir must be a folder of texts, but is {args.data_dir}. --synthetic_data "
            f"needs none."
        )
    if args.vocab_file and not Path(args.vocab_file).is_file():
        return (
            f"There is no vocabulary {args.vocab_file}. Leave out --vocab_file to learn one, "
            f"kept in --model_dir."
        )
    needs_folder = args.enable_tensorboard or not (args.vocab_file or args.synthetic_data)
    if needs_folder and not args.model_dir:
        return "--model_dir is needed to keep the learnt vocabulary and TensorBoard's files."
    if args.batch_size < args.max_length:
        return (
            f"--batch_size ({args.batch_size} tokens) must hold one sentence of --max_length "
            f"({args.max_length}) tokens."
        )
    return None


def training_pairs(args):
    """Returns the encoded training pairs and the vocabulary, which is None for synthetic data."""
    if args.synthetic_data:
        shape = (2, args.num_sentences or 10_000, args.max_length)
        tokens = np.random.default_rng(42).integers(2, args.vocab_size, shape, dtype=np.int32)
        tokens[..., -1] = END_ID
        return tnt.data.TokenPairs(*map(list, tokens)), None
    files = token_files(Path(args.data_dir))
    if files:
        return training_tokens(args, files)
    corpus = training_corpus(args)
    if args.num_sentences:
        corpus = ParallelCorpus(
            corpus.sources[: args.num_sentences], corpus.targets[: args.num_sentences]
        )
    if args.vocab_file:
        vocabulary = read_vocabulary(args.vocab_file)
    else:
        file = Path(args.model_dir) / "subwords.model"
        texts = [*corpus.sources, *corpus.targets]
        vocabulary = learn_vocabulary(texts, file, size=args.vocab_size)
    pairs = zip(*map(vocabulary.encode, corpus), strict=True)
    return subtokens.short_pairs(list(pairs), args.max_length), vocabulary


class ParallelCorpus(NamedTuple):
    """Sentences and as many translations."""

    sources: list
    targets: list


def read_parallel(source_file, target_file, *, skip=False):
    """Returns the corpus of two UTF-8 files, each may be `.gz`, whose lines translate each other.

    Raises:
        ValueError: If the files differ in length, or at an empty line unless it is to be skipped;
            the text names the file and the line.
    """
    sources, targets = read_lines(source_file), read_lines(target_file)
    if len(sources) != len(targets):
        raise ValueError(
            f"The lines of two parallel files must translate one another, but {source_file} has "
            f"{len(sources)} lines and {target_file} has {len(targets)}. Check that both are "
            "complete."
        )
    pairs = zip(sources, targets, strict=True)
    return make_corpus(pairs, f"{source_file} or {target_file}", skip=skip)


def read_tsv(file, *, skip=False):
    """Returns the corpus of a UTF-8 file, which may be `.gz`: the first two columns of each line.

    Raises:
        ValueError: As `read_parallel` does.
    """
    return make_corpus((line.split("\t")[:2] for line in read_lines(file)), file, skip=skip)


def make_corpus(pairs, name, *, skip):
    """Returns the corpus of pairs of texts, without those that are incomplete, which are counted;
    or raises an error at the first of them, unless told to skip it.
    """
    kept, num_skipped = [], 0
    for number, pair in enumerate(pairs, 1):
        if len(pair) == 2 and all(text.strip() for text in pair):
            kept.append([text.strip() for text in pair])
        elif skip:
            num_skipped += 1
        else:
            raise ValueError(f"{name}, line {number}: a sentence or its translation is missing.")
    if num_skipped and tnt.is_master_rank():
        print(f"Skipped {num_skipped} pairs that are incomplete; {len(kept)} are left.")
    return ParallelCorpus(*(map(list, zip(*kept, strict=True)) if kept else ([], [])))


def read_lines(file):
    """Returns the lines of a UTF-8 file, which may be `.gz`."""
    content = Path(file).read_bytes()
    try:
        text = (gzip.decompress(content) if str(file).endswith(".gz") else content).decode()
    except (UnicodeDecodeError, EOFError, gzip.BadGzipFile) as error:
        raise ValueError(f"{file} cannot be read as UTF-8 text: {error}.") from error
    # Not splitlines(), which also ends lines at characters such as U+2028 within sentences.
    return [line.removesuffix("\r") for line in text.removesuffix("\n").split("\n")]


class Vocabulary:
    """A SentencePiece model that turns text into token ids and back.

    Args:
        file: The model, as `learn_vocabulary` writes it.

    Raises:
        ValueError: If the file is no such model, or padding or end have other ids.
    """

    def __init__(self, file):
        try:
            self._processor = sentencepiece.SentencePieceProcessor(model_file=str(file))
        except RuntimeError as error:
            raise ValueError(f"{file} is not a SentencePiece model ({error}).") from error
        ids = (self._processor.pad_id(), self._processor.eos_id())
        if ids != (PAD_ID, END_ID):
            raise ValueError(
                f"{file} must have padding as token {PAD_ID} and the end of a sentence as token "
                f"{END_ID}, but has {ids}."
            )

    @property
    def size(self):
        """Number of tokens."""
        return self._processor.vocab_size()

    def encode(self, texts):
        """Returns the tokens of each text, int32 `[tokens]`, with `END_ID` last."""
        return [
            np.array([*tokens, END_ID], np.int32) for tokens in self._processor.encode(list(texts))
        ]

    def decode(self, tokens):
        """Returns the text of tokens up to the first `END_ID`, without padding."""
        text = takewhile(lambda token: token != END_ID, tokens)
        return self._processor.decode([int(token) for token in text if token != PAD_ID])


def learn_vocabulary(texts, file, *, size):
    """Learns a byte-pair vocabulary (Sennrich et al. 2016, arXiv:1508.07909) of `size` tokens and
    writes it to a file, unless that exists; the first process does, and the others wait.

    Raises:
        ValueError: If the texts have too few or too many different characters for `size`.
    """
    if tnt.is_master_rank() and not file.exists():
        model = io.BytesIO()
        try:
            sentencepiece.SentencePieceTrainer.train(
                sentence_iterator=iter(texts),
                model_writer=model,
                model_type="bpe",
                vocab_size=size,
                character_coverage=1.0,
                pad_id=PAD_ID,
                eos_id=END_ID,
                unk_id=2,
                bos_id=-1,
                minloglevel=2,
            )
        except RuntimeError as error:
            raise ValueError(
                f"No vocabulary of {size} tokens can be learnt from these texts: {error}"
            ) from error
        file.parent.mkdir(parents=True, exist_ok=True)
        # Written whole, or not at all.
        unfinished = file.with_suffix(".unfinished")
        unfinished.write_bytes(model.getvalue())
        unfinished.replace(file)
    tnt.barrier(timeout_s=3600)
    return Vocabulary(file)


def read_vocabulary(file):
    """Returns the vocabulary of a file: a list of quoted subtokens or a SentencePiece model."""
    if subtokens.is_subtoken_list(file):
        return subtokens.SubtokenVocabulary(file)
    return Vocabulary(file)


def token_files(folder):
    """Returns the TFRecord files of encoded training pairs, sorted: `*train*-of-*`, as in
    `wmt32k-train-00001-of-00100`, or `*train*.tfrecord*`.
    """
    found = {f for pattern in ("*train*-of-*", "*train*.tfrecord*") for f in folder.glob(pattern)}
    return sorted(found)


def training_tokens(args, files):
    """Returns the pairs of token files, which are encoded already, and their vocabulary."""
    if not args.vocab_file:
        raise ValueError(
            f"{files[0]} holds tokens, not texts. Pass the vocabulary that they were made with as "
            f"--vocab_file."
        )
    vocabulary = read_vocabulary(args.vocab_file)
    pairs = subtokens.read_token_pairs(
        files, vocabulary, max_length=args.max_length, num_pairs=args.num_sentences
    )
    return pairs, vocabulary


def training_corpus(args):
    """Returns the training texts in `--data_dir`.

    Raises:
        FileNotFoundError: If there are none; the text says what was looked for.
    """
    folder, suffixes = Path(args.data_dir), ("", ".gz")
    tables = [file for suffix in suffixes for file in sorted(folder.glob(f"*train*.tsv{suffix}"))]
    if tables:
        return read_tsv(tables[0], skip=True)
    files = [
        [f for suffix in suffixes for f in sorted(folder.glob(f"*train*.{side}{suffix}"))]
        for side in (args.source, args.target)
    ]
    if all(files):
        return read_parallel(files[0][0], files[1][0], skip=True)
    if (folder / "wmt14_translate").is_dir():
        pairs = tnt.data.load(
            "wmt14_translate/de-en", "train", data_dir=folder, as_supervised=False, download=False
        ).as_numpy_iterator()
        sides = ((pair[args.source].decode(), pair[args.target].decode()) for pair in pairs)
        return make_corpus(sides, "wmt14_translate", skip=True)
    raise FileNotFoundError(
        f"{folder} holds no training texts: looked for *train*.tsv, *train*.{args.source} with "
        f"*train*.{args.target} (each also .gz), wmt14_translate as prepared by TensorFlow "
        f"Datasets, and TFRecords of tokens named *train*-of-* or *train*.tfrecord*."
    )


def test_corpus(args):
    """Returns the test sentences and their translations, or None if there are none."""
    if not args.bleu_source:
        return None
    corpus = read_parallel(args.bleu_source, args.bleu_ref)
    if args.max_words:
        kept = [
            pair
            for pair in zip(corpus.sources, corpus.targets, strict=True)
            if len(pair[0].split()) <= args.max_words
        ]
        corpus = ParallelCorpus([source for source, _ in kept], [target for _, target in kept])
    return corpus


class OwnShard:
    """Every so many-th pair, for a process that distributes the data by hand: batches `((sources,
    targets), targets)`.

    A global batch has `rows_per_batch` pairs; the first processes take one more if the number of
    processes does not divide it.

    Args:
        pairs: All pairs, the same on every process.
        rows_per_batch: Pairs of a global batch.
        length: Tokens to which all sequences are padded.
        process_index: Number of this process.
        process_count: Number of processes.
        seed: Seed of the order, which changes with every pass.

    Raises:
        ValueError: If a global batch has fewer pairs than there are processes.
    """

    def __init__(self, pairs, *, rows_per_batch, length, process_index, process_count, seed):
        if rows_per_batch < process_count:
            raise ValueError(
                f"A batch of {rows_per_batch} pairs cannot be shared by {process_count} "
                f"processes. Raise --batch_size."
            )
        own, rest = divmod(rows_per_batch, process_count)
        self._rows = own + (process_index < rest)
        self._start = own * process_index + min(process_index, rest)
        self._size, self._pairs, self._length, self._seed, self._pass = (
            rows_per_batch,
            pairs,
            length,
            seed,
            0,
        )

    def __len__(self):
        return len(self._pairs) // self._size

    def __iter__(self):
        order = np.random.default_rng((self._seed, self._pass)).permutation(len(self._pairs))
        self._pass += 1
        for first in range(0, len(self) * self._size, self._size):
            chosen = order[first + self._start : first + self._start + self._rows]
            sources, targets = (
                padded([side[index] for index in chosen], self._length)
                for side in (self._pairs.sources, self._pairs.targets)
            )
            yield (sources, targets), targets


def padded(sequences, length):
    """Returns the sequences, cut at `length` tokens, as int32 `[sequences, length]` with 0 behind
    their ends.
    """
    rows = np.zeros((len(sequences), length), np.int32)
    for row, sequence in zip(rows, sequences, strict=True):
        row[: min(len(sequence), length)] = sequence[:length]
    return rows


def translate(translator, vocabulary, sentences, *, batch_size, max_length):
    """Returns the translation of each sentence; sentences of about equal length are translated
    together.

    Args:
        translator: `tnt.Model` of a `Translator`.
        vocabulary: Vocabulary of both languages.
        sentences: Texts.
        batch_size: Sentences translated at a time by all devices together.
        max_length: Tokens of a sentence that are read.
    """
    encoded = [
        tokens if len(tokens) <= max_length else np.append(tokens[: max_length - 1], 1)
        for tokens in vocabulary.encode(sentences)
    ]
    buckets = np.array(tnt.data.bucket_lengths(max(map(len, encoded))))
    bucket_of = np.searchsorted(buckets, [len(tokens) for tokens in encoded])
    size = max(batch_size, tnt.get_size())
    translations = [""] * len(sentences)
    for bucket in np.unique(bucket_of):
        chosen = np.flatnonzero(bucket_of == bucket)
        sources = padded([encoded[index] for index in chosen], int(buckets[bucket]))
        for index, tokens in zip(
            chosen, translator.predict(sources, batch_size=size, verbose=0)["outputs"], strict=True
        ):
            translations[index] = vocabulary.decode(tokens)
    return translations


def bleu_scores(translations, references):
    """Returns `(name, BLEU, signature)`, cased and uncased, by sacreBLEU (Post 2018,
    arXiv:1804.08771).
    """
    from sacrebleu.metrics import BLEU

    scores = []
    for name, lowercase in (("BLEU cased", False), ("BLEU uncased", True)):
        metric = BLEU(lowercase=lowercase)
        score = metric.corpus_score(translations, [references]).score
        scores.append((name, score, str(metric.get_signature())))
    return scores
