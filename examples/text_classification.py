"""Classifies texts: spam or not, sincere or not, one of many intents.

The model is the averaged word vectors and three dense layers.

    python examples/text_classification.py --data sms_spam/SMSSpamCollection tnt-jax -n 4 --
    examples/text_classification.py --data train.csv --text_column question_text --label_column
    target

Reads a CSV with a header, a TSV of label and text, or a JSON object of splits with pairs of text
and label. Without splits of its own, a tenth of the distinct texts is for validation and a tenth
for testing. The vocabulary is learnt from the training texts.
"""

import argparse
import csv
import json
import re
import time
from collections import Counter
from pathlib import Path

import numpy as np

import tnt_jax as tnt

PAD, UNKNOWN = 0, 1


def read_rows(args):
    """Returns `{split: [(text, label)]}`; one split named "all" if the file has none."""
    path = Path(args.data)
    if not path.is_file():
        raise SystemExit(
            f"There is no file {path}. Pass a CSV with a header, a TSV of label and text, or a "
            f"JSON object of splits."
        )
    if path.suffix == ".json":
        splits = json.loads(path.read_text(encoding="utf-8"))
        missing = [name for name in ("train", "val", "test") if name not in splits]
        if missing:
            raise SystemExit(
                f"{path} must hold the splits train, val and test, but {', '.join(missing)} is "
                f"missing."
            )
        return {
            name: [(text, label) for text, label in splits[name]]
            for name in ("train", "val", "test")
        }
    with path.open(encoding="utf-8", newline="") as file:
        if path.suffix != ".csv":
            rows = [line.rstrip("\r\n").split("\t", 1) for line in file if line.strip()]
            return {"all": [(text, label) for label, text in rows]}
        reader = csv.DictReader(file)
        missing = {args.text_column, args.label_column} - set(reader.fieldnames or ())
        if missing:
            raise SystemExit(
                f"{path} has the columns {reader.fieldnames}, but not {sorted(missing)}: see "
                f"--text_column, --label_column."
            )
        return {"all": [(row[args.text_column], row[args.label_column]) for row in reader]}


def split_rows(splits, seed):
    """Returns train, val and test rows; equal texts never stand on two sides."""
    if "train" in splits:
        return splits
    texts = sorted({text for text, _ in splits["all"]})
    share = dict(zip(texts, np.random.default_rng(seed).random(len(texts)), strict=True))
    parts = {"train": [], "val": [], "test": []}
    for text, label in splits["all"]:
        if share[text] < 0.1:
            part = "test"
        else:
            part = "val" if share[text] < 0.2 else "train"
        parts[part].append((text, label))
    return parts


def words(text):
    """Returns lower-case words, and punctuation marks one by one."""
    return re.findall(r"\w+|[^\w\s]", text.lower())


def learn_vocabulary(texts, size):
    """Returns the ids of the most frequent words; 0 is padding and 1 an unknown word."""
    counts = Counter(word for text in texts for word in words(text))
    return {word: number for number, (word, _) in enumerate(counts.most_common(size - 2), start=2)}


def encode(rows, vocabulary, labels, max_length):
    """Returns token ids `[texts, max_length]` and labels `[texts]`."""
    tokens = np.zeros((len(rows), max_length), np.int32)
    for row, (text, _) in zip(tokens, rows, strict=True):
        ids = [vocabulary.get(word, UNKNOWN) for word in words(text)][:max_length]
        row[: len(ids)] = ids
    return tokens, np.array([labels.index(label) for _, label in rows], np.int32)


class EpochDots(tnt.callbacks.Callback):
    """Prints a dot an epoch, and the logs of every `report_every`th."""

    def __init__(self, report_every=100):
        super().__init__()
        self.report_every = report_every

    def on_epoch_end(self, epoch, logs=None):
        if epoch % self.report_every == 0:
            print(
                f"\nEpoch: {epoch}, "
                + "".join(f"{name}:{value:.4f},  " for name, value in sorted((logs or {}).items()))
            )
        print(".", end="", flush=True)


def compile_model(args, num_classes, vocab_size):
    """Returns the compiled model: one output for two classes, as many as classes for more."""
    binary = num_classes == 2
    module = tnt.models.TextClassifier(
        vocab_size=vocab_size, num_outputs=1 if binary else num_classes, dropout=args.dropout
    )
    model = tnt.Model(module, seed=args.seed)
    # The model returns logits; a logit of 0 is a probability of 1/2.
    binary_accuracy = tnt.metrics.BinaryAccuracy(name="accuracy", threshold=0.0)
    model.compile(
        optimizer=tnt.optimizers.Adam(learning_rate=args.learning_rate),
        loss=(
            tnt.losses.BinaryCrossentropy if binary else tnt.losses.SparseCategoricalCrossentropy
        )(from_logits=True),
        metrics=[
            binary_accuracy if binary else tnt.metrics.SparseCategoricalAccuracy(name="accuracy")
        ],
    )
    return model


def report_timing(file, seconds, num_epochs, num_examples):
    """Adds this run to the file and prints all runs as a table, with the speed relative to the
    fewest devices.
    """
    runs = json.loads(Path(file).read_text()) if Path(file).is_file() else []
    runs.append(
        {
            "devices": tnt.get_size(),
            "epochs": num_epochs,
            "seconds": seconds,
            "examples": num_epochs * num_examples,
        }
    )
    Path(file).write_text(json.dumps(runs, indent=1))
    slowest = min(runs, key=lambda run: run["devices"])
    base = slowest["examples"] / slowest["seconds"]
    print(f"\n{'devices':>7} {'epochs':>7} {'seconds':>9} {'examples/s':>11} {'speed':>6}")
    for run in sorted(runs, key=lambda run: run["devices"]):
        rate = run["examples"] / run["seconds"]
        print(
            f"{run['devices']:7d} {run['epochs']:7d} {run['seconds']:9.2f} {rate:11.0f} "
            f"{rate / base:5.2f}x"
        )


def parse_args():
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument(
        "--data", required=True, help="CSV with a header, TSV of label and text, or JSON of splits"
    )
    parser.add_argument(
        "--text_column", default="question_text", help="column of the text in a CSV"
    )
    parser.add_argument("--label_column", default="target", help="column of the label in a CSV")
    parser.add_argument("--epochs", type=int, default=100, help="most epochs")
    parser.add_argument(
        "--patience",
        type=int,
        default=2,
        help="epochs without a better validation loss before the end; 0: never end",
    )
    parser.add_argument(
        "--micro_batch_size",
        type=int,
        default=64,
        help="texts of one device; the global batch is this times the devices",
    )
    parser.add_argument(
        "--learning_rate",
        type=float,
        default=1e-3,
        help="Adam's rate (1e-4 in the lesson, with ready-made vectors)",
    )
    parser.add_argument(
        "--dropout",
        type=float,
        default=0.0,
        help="share of the averaged vector dropped in training",
    )
    parser.add_argument(
        "--vocab_size", type=int, default=20_000, help="most words, with padding and unknown"
    )
    parser.add_argument("--max_length", type=int, default=64, help="words of a text that are read")
    parser.add_argument("--tensorboard", help="folder for TensorBoard")
    parser.add_argument(
        "--timings",
        help="JSON file that collects the times of runs on different numbers of devices",
    )
    parser.add_argument(
        "--one_device", action="store_true", help="use the first device only, for comparing times"
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of weights, order and split")
    return parser.parse_args()


def main():
    args = parse_args()
    if args.one_device:
        tnt.init(devices=[0])
    rows = split_rows(read_rows(args), args.seed)
    labels = sorted({label for part in rows.values() for _, label in part})
    vocabulary = learn_vocabulary([text for text, _ in rows["train"]], args.vocab_size)
    train, valid, test = (
        encode(rows[name], vocabulary, labels, args.max_length) for name in ("train", "val", "test")
    )

    model = compile_model(args, len(labels), len(vocabulary) + 2)
    callbacks = [EpochDots()]
    if args.patience:
        callbacks.append(
            tnt.callbacks.EarlyStopping(
                monitor="val_loss", patience=args.patience, restore_best_weights=True
            )
        )
    if args.tensorboard:
        callbacks.append(tnt.callbacks.TensorBoard(args.tensorboard))
    start = time.perf_counter()
    history = model.fit(
        *train,
        epochs=args.epochs,
        verbose=0,
        validation_data=valid,
        callbacks=callbacks,
        tnt_micro_batch_size=args.micro_batch_size,
    )
    seconds = time.perf_counter() - start
    loss, accuracy = model.evaluate(*test, verbose=0, tnt_micro_batch_size=args.micro_batch_size)
    if tnt.is_master_rank():
        print(
            f"\n{len(labels)} classes, {len(train[0])} training texts, {len(vocabulary)} words, "
            f"{len(history.epoch)} epochs"
        )
        print(f"Time for fit: {1000 * seconds:.0f} ms on {tnt.get_size()} device(s)")
        print(f"test loss: {loss:.4f}, test accuracy: {accuracy:.4f}")
        if args.timings:
            report_timing(args.timings, seconds, len(history.epoch), len(train[0]))


if __name__ == "__main__":
    main()
