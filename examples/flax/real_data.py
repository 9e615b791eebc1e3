"""The data of these examples, read from a folder with Fashion-MNIST (MIT) and English sentences of
Tatoeba (CC BY 2.0 FR).
"""

import gzip
import os
from pathlib import Path

import numpy as np

# Token ids 0 and 1 are padding and the end of a sentence.
VOCAB_SIZE = 258


def add_arguments(parser):
    """Adds the flags that all examples of this folder have."""
    parser.add_argument(
        "--data",
        default=os.environ.get("TNT_JAX_DATA"),
        help="folder with fashion_mnist and tatoeba_ende",
    )
    parser.add_argument("--epochs", type=int, default=3, help="passes over the data (default: 3)")
    parser.add_argument(
        "--examples", type=int, default=None, help="use the first so many examples (default: all)"
    )


def fashion_mnist(folder, part, num_examples=None):
    """Returns images `[n, 28, 28, 1]` in [0, 1] and labels `[n]` of the part `train` or `t10k`."""

    def read(name, offset):
        return np.frombuffer(
            gzip.open(Path(folder) / "fashion_mnist" / name).read(), np.uint8, offset=offset
        )

    images = read(f"{part}-images-idx3-ubyte.gz", 16).reshape(-1, 28, 28, 1)[:num_examples]
    return images.astype(np.float32) / 255, read(f"{part}-labels-idx1-ubyte.gz", 8)[
        :num_examples
    ].astype(np.int32)


def english_sentences(folder, length, num_examples=None):
    """Returns the bytes of English sentences as token ids `[n, length]`, each once, with an end and
    padding behind it.
    """
    with gzip.open(
        Path(folder) / "tatoeba_ende" / "train.eng-deu.tsv.gz", "rt", encoding="utf-8"
    ) as file:
        lines = file.read().splitlines()
    sentences = list(dict.fromkeys(line.split("\t")[0] for line in lines))[:num_examples]
    tokens = np.zeros((len(sentences), length), np.int32)
    for row, sentence in zip(tokens, sentences, strict=True):
        ids = [*(2 + byte for byte in sentence.encode()[: length - 1]), 1]
        row[: len(ids)] = ids
    return tokens
