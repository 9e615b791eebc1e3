"""Texts of the translation tutorial: finding and encoding them, translating test sentences, and
BLEU.
"""

from pathlib import Path

import numpy as np
import subtokens

import tnt_jax as tnt
from tnt_jax.data.recipes.text import ParallelCorpus, TokenPairs
from tnt_jax.data.recipes.token_batches import bucket_lengths


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
        examples = tnt.data.SyntheticTokens(
            args.num_sentences or 10_000, length=args.max_length, vocabulary_size=args.vocab_size
        )
        sides = zip(*(examples[index] for index in range(len(examples))), strict=True)
        return TokenPairs(*map(list, sides)), None
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
        vocabulary = tnt.data.learn_vocabulary(
            [*corpus.sources, *corpus.targets], file, size=args.vocab_size
        )
    return tnt.data.encode_pairs(corpus, vocabulary, max_length=args.max_length), vocabulary


def read_vocabulary(file):
    """Returns the vocabulary of a file: a list of quoted subtokens or a SentencePiece model."""
    if subtokens.is_subtoken_list(file):
        return subtokens.SubtokenVocabulary(file)
    return tnt.data.Vocabulary(file)


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
        return tnt.data.read_tsv(tables[0], on_error="skip")
    files = [
        [f for suffix in suffixes for f in sorted(folder.glob(f"*train*.{side}{suffix}"))]
        for side in (args.source, args.target)
    ]
    if all(files):
        return tnt.data.read_parallel(files[0][0], files[1][0], on_error="skip")
    if (folder / "wmt14_translate").is_dir():
        pairs = tnt.data.load(
            "wmt14_translate/de-en", "train", data_dir=folder, as_supervised=False, download=False
        )
        return tnt.data.read_translations(
            pairs.as_numpy_iterator(), source=args.source, target=args.target, on_error="skip"
        )
    raise FileNotFoundError(
        f"{folder} holds no training texts: looked for *train*.tsv, *train*.{args.source} with "
        f"*train*.{args.target} (each also .gz), wmt14_translate as prepared by TensorFlow "
        f"Datasets, and TFRecords of tokens named *train*-of-* or *train*.tfrecord*."
    )


def test_corpus(args):
    """Returns the test sentences and their translations, or None if there are none."""
    if not args.bleu_source:
        return None
    corpus = tnt.data.read_parallel(args.bleu_source, args.bleu_ref)
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
    buckets = np.array(bucket_lengths(max(map(len, encoded))))
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
