"""Classifies texts: spam or not, sincere or not, one of many intents.

The model is the averaged word vectors and three dense layers.

    python examples/text_classification.py --data sms_spam/SMSSpamCollection
    tnt-jax -n 4 -- examples/text_classification.py --data train.csv --custom_loop

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

import jax
import numpy as np
import optax
from flax.training.train_state import TrainState

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


def make_module(args, num_classes, vocab_size):
    """Returns the network: one output for two classes, as many as classes for more."""
    return tnt.models.TextClassifier(
        vocab_size=vocab_size,
        num_outputs=1 if num_classes == 2 else num_classes,
        dropout=args.dropout,
    )


def compile_model(args, module):
    """Returns the compiled model."""
    binary = module.num_outputs == 1
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


def make_steps(module):
    """Returns the steps of a custom loop, for training and evaluation, and their metrics."""
    binary = module.num_outputs == 1
    metrics = {}
    for part in ("train", "valid"):
        metrics[f"{part}_loss"] = tnt.metrics.Mean()
        metrics[f"{part}_acc"] = (
            tnt.metrics.BinaryAccuracy(threshold=0.0)
            if binary
            else tnt.metrics.SparseCategoricalAccuracy()
        )

    def losses_of(logits, labels):
        if binary:
            return optax.sigmoid_binary_cross_entropy(logits[:, 0], labels)
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels)

    def count(part, losses, labels, logits):
        metrics[f"{part}_loss"].update_state(losses)
        metrics[f"{part}_acc"].update_state(labels[:, None] if binary else labels, logits)

    @tnt.distributed_step
    def train_step(state, batch, key):
        def loss_fn(params):
            rngs = {"dropout": key}
            logits = module.apply({"params": params}, batch.inputs, train=True, rngs=rngs)
            losses = losses_of(logits, batch.targets)
            # The mean over the global batch, whatever the rows of this device.
            return tnt.compute_average_loss(losses), (losses, logits)

        (loss, (losses, logits)), grads = tnt.value_and_grad(loss_fn, has_aux=True)(state.params)
        count("train", losses, batch.targets, logits)
        return state.apply_gradients(grads=grads), {"loss": loss}

    @tnt.distributed_eval_step
    def valid_step(state, batch):
        logits = module.apply({"params": state.params}, batch.inputs, train=False)
        count("valid", losses_of(logits, batch.targets), batch.targets, logits)
        return {}

    return train_step, valid_step, metrics


def custom_loop(args, module, train, valid, test):
    """Trains by a custom loop, as the lesson does; prints its history and the test results.

    Returns the seconds and the number of epochs.
    """
    train_step, valid_step, metrics = make_steps(module)
    batch_size = args.micro_batch_size * tnt.get_size()
    train_data = tnt.distribute(*train, batch_size=batch_size, seed=args.seed)
    valid_data, test_data = (
        tnt.distribute(*data, batch_size=batch_size, shuffle=False) for data in (valid, test)
    )
    params = module.init(jax.random.key(args.seed), train[0][:1], train=False)["params"]
    optimizer = optax.adam(args.learning_rate)
    state = TrainState.create(apply_fn=module.apply, params=params, tx=optimizer)
    key, rows = jax.random.key(args.seed), []

    def results():
        found = {name: float(metric.result()) for name, metric in metrics.items()}
        for metric in metrics.values():
            metric.reset_state()
        return found

    start = time.perf_counter()
    for epoch in range(args.epochs):
        for batch in train_data:
            state, _ = train_step(state, batch, key)
        for batch in valid_data:
            valid_step(state, batch)
        rows.append({"epochs": epoch + 1, **results()})
        if tnt.is_master_rank():
            print(
                "Epoch {epochs}, Loss: {train_loss:.4f}, Accuracy: {train_acc:.2%}, Valid Loss: "
                "{valid_loss:.4f}, Valid Accuracy: {valid_acc:.2%}".format(**rows[-1]),
                flush=True,
            )
    seconds = time.perf_counter() - start
    for batch in test_data:
        valid_step(state, batch)
    tested = results()
    print_history(rows)
    draw_history(args, rows)
    return seconds, len(rows), tested["valid_loss"], tested["valid_acc"]


def print_history(rows):
    """Prints the results of all epochs as a table, on the master."""
    if tnt.is_master_rank():
        print("\n" + " ".join(f"{name:>10}" for name in rows[0]))
        for row in rows:
            texts = (f"{x:10d}" if isinstance(x, int) else f"{x:10.4f}" for x in row.values())
            print(" ".join(texts))


def draw_history(args, rows):
    """Draws the curves of a custom loop, as the callback of `fit` does."""
    if args.plot:
        picture = tnt.callbacks.PlotHistory(args.plot)
        for row in rows:
            logs = {
                name.replace("train_", "").replace("valid_", "val_"): value
                for name, value in row.items()
                if name != "epochs"
            }
            picture.on_epoch_end(row["epochs"] - 1, logs)


def fit(args, module, train, valid, test):
    """Trains by `fit`; returns seconds, epochs, and loss and accuracy of the test texts."""
    model = compile_model(args, module)
    callbacks = [EpochDots()]
    if args.patience:
        callbacks.append(
            tnt.callbacks.EarlyStopping(
                monitor="val_loss", patience=args.patience, restore_best_weights=True
            )
        )
    if args.tensorboard:
        callbacks.append(tnt.callbacks.TensorBoard(args.tensorboard))
    if args.plot:
        callbacks.append(tnt.callbacks.PlotHistory(args.plot))
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
    return seconds, len(history.epoch), loss, accuracy


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
    parser.add_argument(
        "--custom_loop",
        action="store_true",
        help="train by a custom loop instead of fit, for all epochs",
    )
    parser.add_argument("--plot", help="file for a picture of loss and accuracy, such as a.png")
    parser.add_argument("--tensorboard", help="folder for TensorBoard")
    parser.add_argument(
        "--timings",
        help="JSON file that collects the times of runs on different numbers of devices",
    )
    parser.add_argument(
        "--one_device", action="store_true", help="use the first device only, for comparing times"
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of weights, order and split")
    args = parser.parse_args()
    if args.custom_loop and args.tensorboard:
        parser.error("--tensorboard is a callback of fit: leave it or --custom_loop out.")
    return args


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

    module = make_module(args, len(labels), len(vocabulary) + 2)
    train_by = custom_loop if args.custom_loop else fit
    seconds, num_epochs, loss, accuracy = train_by(args, module, train, valid, test)
    if tnt.is_master_rank():
        print(
            f"\n{len(labels)} classes, {len(train[0])} training texts, {len(vocabulary)} words, "
            f"{num_epochs} epochs"
        )
        print(
            f"Time for {train_by.__name__}: {1000 * seconds:.0f} ms on {tnt.get_size()} device(s)"
        )
        print(f"test loss: {loss:.4f}, test accuracy: {accuracy:.4f}")
        if args.timings:
            report_timing(args.timings, seconds, num_epochs, len(train[0]))


if __name__ == "__main__":
    main()
