"""A BERT of Keras Hub learns words from messages without labels, then which of them are spam.

    TNT_JAX_DATA=DATA tnt-jax -n 2 -- examples/gallery/keras_hub_bert.py

Devlin et al. 2018, arXiv:1810.04805, section 3; `DATA/sms_spam/SMSSpamCollection` is UCI's data set
228. `BertTextClassifier.from_preset("bert_tiny_en_uncased", num_classes=2)` knows words already.
"""

import collections
import os
import re
from pathlib import Path

os.environ["KERAS_BACKEND"] = "jax"
import keras
import numpy as np
from keras_hub.models import BertBackbone, BertMaskedLM, BertTextClassifier

import tnt_jax as tnt

LENGTH, NUM_WORDS, NUM_HIDDEN = 32, 2000, 5
PAD, UNKNOWN, START, MASK = range(4)


def load(folder):
    """Returns messages as numbers of words `[n, LENGTH]`, with labels: 1 is spam."""
    lines = set(Path(folder, "sms_spam", "SMSSpamCollection").read_text().splitlines())
    labels, texts = zip(*(line.split("\t", 1) for line in sorted(lines)), strict=True)
    words = [re.findall(r"[a-z]+|\d|[^\w\s]", text.lower())[: LENGTH - 1] for text in texts]
    counts = collections.Counter(word for text in words for word in text)
    numbers = {word: n for n, (word, _) in enumerate(counts.most_common(NUM_WORDS - 4), start=4)}
    tokens = np.full((len(words), LENGTH), PAD, np.int32)
    for row, text in zip(tokens, words, strict=True):
        row[: len(text) + 1] = [START, *(numbers.get(word, UNKNOWN) for word in text)]
    order = np.random.default_rng(0).permutation(len(tokens))
    return tokens[order], (np.array(labels) == "spam").astype(np.int32)[order]


def inputs(tokens):
    """Returns what a BERT of Keras Hub reads."""
    mask = (tokens != PAD).astype(np.int32)
    return {"token_ids": tokens, "segment_ids": np.zeros_like(tokens), "padding_mask": mask}


def with_hidden_words(tokens):
    """Returns inputs with words to guess, these words, and 1 where there is one."""
    chances = np.random.default_rng(1).random(tokens.shape) * (tokens > START)
    places = np.argsort(-chances, axis=1)[:, :NUM_HIDDEN].astype(np.int32)
    words, shown = np.take_along_axis(tokens, places, axis=1), tokens.copy()
    np.put_along_axis(shown, places, np.where(words > START, MASK, words), axis=1)
    return {**inputs(shown), "mask_positions": places}, words, (words > START).astype(np.float32)


def main(epochs=5, num_labels=1000):
    """Trains twice, and returns the accuracy for messages whose labels were not learnt."""
    tnt.init()
    keras.utils.set_random_seed(0)
    tokens, is_spam = load(os.environ["TNT_JAX_DATA"])
    bert = BertBackbone(NUM_WORDS, 2, 2, 64, 128, max_sequence_length=LENGTH)

    guesser = tnt.Model(BertMaskedLM(bert))
    loss = tnt.losses.SparseCategoricalCrossentropy
    guesser.compile("adam", loss(from_logits=True, reduction="mean_with_sample_weight"))
    x, words, weight = with_hidden_words(tokens)
    guesser.fit(x, words, sample_weight=weight, batch_size=64, epochs=epochs, verbose=2)

    model = tnt.Model(BertTextClassifier(bert, num_classes=2))
    model.compile("adam", loss(from_logits=True), metrics=["accuracy"])
    some = inputs(tokens[:num_labels])
    model.fit(some, is_spam[:num_labels], batch_size=64, epochs=epochs, verbose=2)
    rest = inputs(tokens[num_labels:])
    accuracy = model.evaluate(rest, is_spam[num_labels:], batch_size=256, verbose=0)[1]
    if tnt.is_master_rank():
        print(f"accuracy {accuracy:.3f}; {1 - is_spam.mean():.3f} are no spam")
    return accuracy


if __name__ == "__main__":
    main()
