"""Test accuracy of asynchronous training on a parameter server, beside that of `fit`.

Trains the text classifier on SMS messages (spam or not), and ResNet-20 on Fashion-MNIST, for the
same epochs with the same optimizer:

    fit           `fit` on one device, with the batch of one worker
    synchronous   `fit` with the batches of all four workers together, at four times the learning
                  rate (Goyal et al. 2017, arXiv:1706.02677): what the workers compute if each
                  takes such a batch and all wait for each other
    asynchronous  a parameter server with two and with four workers, each with its own batches

Each run is repeated with several seeds.

    python benchmarks/parameter_server_accuracy.py --data DATA --output
    benchmarks/results/parameter_server_accuracy.json

DATA holds the folders `sms_spam` (SMSSpamCollection) and `fashion_mnist` (the four IDX files).
`--only text` leaves out the images, which take half an hour a seed on two cores;
`--train-images` takes fewer.
"""

import argparse
import gzip
import json
import os
import statistics
import sys
import time
from importlib.metadata import version
from pathlib import Path

import numpy as np
from machine import commit

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))

WORKERS = (2, 4)


def text(args):
    import text_classification as example

    import tnt_jax as tnt

    class Arguments:
        data = str(Path(args.data) / "sms_spam" / "SMSSpamCollection")

    parts = example.split_rows(example.read_rows(Arguments), seed=0)
    vocabulary = example.learn_vocabulary([row for row, _ in parts["train"]], 8000)
    train, test = (
        example.encode(parts[part], vocabulary, ["ham", "spam"], 40) for part in ("train", "test")
    )

    def make(seed, scale=1):
        model = tnt.Model(tnt.models.TextClassifier(8000, 1, embedding_dim=64), seed=seed)
        loss = tnt.losses.BinaryCrossentropy(from_logits=True)
        accuracy = tnt.metrics.BinaryAccuracy(name="accuracy", threshold=0.0)
        model.compile(tnt.optimizers.Adam(scale * 1e-3), loss=loss, metrics=[accuracy])
        return model

    return train, test, make, {"batch_size": 32, "epochs": args.text_epochs}


def images(args):
    import tnt_jax as tnt

    folder = Path(args.data) / "fashion_mnist"

    def read(name, dims):
        raw = gzip.decompress((folder / name).read_bytes())
        return np.frombuffer(raw, np.uint8, offset=4 + 4 * dims)

    def split(name, most):
        pixels = read(f"{name}-images-idx3-ubyte.gz", 3).reshape(-1, 28, 28, 1)[:most]
        return pixels.astype(np.float32) / 255 - 0.3, read(f"{name}-labels-idx1-ubyte.gz", 1)[:most]

    def make(seed, scale=1):
        model = tnt.Model(tnt.models.resnet20(num_classes=10), seed=seed)
        loss = tnt.losses.SparseCategoricalCrossentropy(from_logits=True)
        steps = args.image_epochs * -(-len(train[1]) // (64 * scale))
        rate = tnt.schedules.CosineDecay(
            0.0,
            decay_steps=steps - steps // 10,
            warmup_target=scale * args.image_rate,
            warmup_steps=steps // 10,
        )
        model.compile(tnt.optimizers.SGD(rate), loss=loss, metrics=["accuracy"])
        return model

    train, test = split("train", args.train_images), split("t10k", args.test_images)
    return train, test, make, {"batch_size": 64, "epochs": args.image_epochs}


def compare(args, name, task):
    train, test, make, options = task(args)
    rows = []
    for seed in range(args.seeds):
        for way, found in runs(train, test, make, options, seed):
            rows.append({"seed": seed, "way": way, **found})
            print(name, rows[-1], flush=True)
    means = {
        way: statistics.mean(row["accuracy"] for row in rows if row["way"] == way)
        for way in dict.fromkeys(row["way"] for row in rows)
    }
    for way, mean in means.items():
        print(f"{name}, {way}: {100 * mean:.2f} ({100 * (mean - means['fit']):+.2f})", flush=True)
    examples = {"train": len(train[1]), "test": len(test[1])}
    return {"task": name, **examples, **options, "means": means, "rows": rows}


def runs(train, test, make, options, seed):
    """Yields the name of each way to train, and what came of it."""
    most = max(WORKERS)
    larger = {**options, "batch_size": most * options["batch_size"]}
    yield "fit", fit(make(seed), train, test, options)
    yield f"synchronous, {most} workers", fit(make(seed, scale=most), train, test, larger)
    for workers in WORKERS:
        found = asynchronous(make(seed), train, test, options, workers)
        yield f"asynchronous, {workers} workers", found


def fit(model, train, test, options):
    start = time.perf_counter()
    model.fit(*train, verbose=0, **options)
    return {"accuracy": accuracy(model, test), "seconds": time.perf_counter() - start}


def asynchronous(model, train, test, options, workers):
    import tnt_jax as tnt

    with tnt.ParameterServer(model, num_servers=2, num_workers=workers) as server:
        start = time.perf_counter()
        server.fit(*train, verbose=0, **options)
        return {
            "accuracy": accuracy(server, test), "seconds": time.perf_counter() - start,
            "mean_staleness": server.statistics.mean_staleness,
        }  # fmt: skip


def accuracy(trained, test):
    return trained.evaluate(*test, batch_size=256, verbose=0, return_dict=True)["accuracy"]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", required=True)
    parser.add_argument("--only", choices=["text", "images"])
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--text-epochs", type=int, default=4)
    parser.add_argument("--image-epochs", type=int, default=3)
    parser.add_argument("--image-rate", type=float, default=0.1, help="highest learning rate")
    parser.add_argument("--train-images", type=int, default=60_000)
    parser.add_argument("--test-images", type=int, default=10_000)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    import ray

    # Logical places: the processes share the cores of the machine.
    ray.init(num_cpus=6, include_dashboard=False, log_to_driver=False)
    tasks = {"text": text, "images": images}
    results = [
        compare(args, name, task) for name, task in tasks.items() if args.only in (None, name)
    ]
    found = {
        "command": " ".join(["python", *sys.argv]),
        "commit": commit(),
        "cores": len(os.sched_getaffinity(0)),
        "versions": {name: version(name) for name in ("jax", "ray", "flax", "optax")},
        "results": results,
    }
    if args.output:
        args.output.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
