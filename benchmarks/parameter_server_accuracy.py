"""Test accuracy of asynchronous training on a parameter server, beside that of `fit`.

Trains the text classifier on SMS messages (spam or not), and ResNet-20 on Fashion-MNIST, with the
same batch size, optimizer and epochs: with `fit` on one device, and asynchronously with four
workers. Each run is repeated with several seeds.

    python benchmarks/parameter_server_accuracy.py --data DATA --output
    benchmarks/results/parameter_server_accuracy.json

DATA holds the folders `sms_spam` (SMSSpamCollection) and `fashion_mnist` (the four IDX files).
`--only text` leaves out the images, which take half an hour a seed on two cores; `--train-images`
takes fewer.
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

    def make(seed):
        model = tnt.Model(tnt.models.TextClassifier(8000, 1, embedding_dim=64), seed=seed)
        loss = tnt.losses.BinaryCrossentropy(from_logits=True)
        accuracy = tnt.metrics.BinaryAccuracy(name="accuracy", threshold=0.0)
        model.compile(tnt.optimizers.Adam(1e-3), loss=loss, metrics=[accuracy])
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

    def make(seed):
        model = tnt.Model(tnt.models.resnet20(num_classes=10), seed=seed)
        loss = tnt.losses.SparseCategoricalCrossentropy(from_logits=True)
        rate = tnt.schedules.CosineDecay(
            0.0,
            decay_steps=steps - steps // 10,
            warmup_target=args.image_rate,
            warmup_steps=steps // 10,
        )
        model.compile(tnt.optimizers.SGD(rate), loss=loss, metrics=["accuracy"])
        return model

    train, test = split("train", args.train_images), split("t10k", args.test_images)
    steps = args.image_epochs * -(-len(train[1]) // 64)
    return train, test, make, {"batch_size": 64, "epochs": args.image_epochs}


def compare(args, name, task):
    import tnt_jax as tnt

    train, test, make, options = task(args)
    rows = []
    for seed in range(args.seeds):
        reference, model = make(seed), make(seed)
        start = time.perf_counter()
        reference.fit(*train, verbose=0, **options)
        fit_s = time.perf_counter() - start
        with tnt.ParameterServer(model, num_servers=2, num_workers=4) as server:
            start = time.perf_counter()
            server.fit(*train, verbose=0, **options)
            server_s = time.perf_counter() - start
            found = server.evaluate(*test, batch_size=256, verbose=0, return_dict=True)
            staleness = server.statistics.mean_staleness
        expected = reference.evaluate(*test, batch_size=256, verbose=0, return_dict=True)
        rows.append(
            {
                "seed": seed, "fit": expected["accuracy"], "asynchronous": found["accuracy"],
                "mean_staleness": staleness, "fit_s": fit_s, "asynchronous_s": server_s,
            }
        )  # fmt: skip
        print(name, rows[-1], flush=True)
    difference = statistics.mean(row["asynchronous"] - row["fit"] for row in rows)
    print(f"{name}: asynchronous minus fit: {100 * difference:+.2f} points", flush=True)
    examples = {"train": len(train[1]), "test": len(test[1])}
    return {"task": name, **examples, **options, "mean_difference": difference, "rows": rows}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", required=True)
    parser.add_argument("--only", choices=["text", "images"])
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--text-epochs", type=int, default=4)
    parser.add_argument("--image-epochs", type=int, default=4)
    parser.add_argument("--image-rate", type=float, default=0.03, help="highest learning rate")
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
