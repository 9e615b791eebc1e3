"""Local steps with outer updates beside synchronous training, on hosts with slow links.

Each host has one process, and all train on the same global batches. `apart` is the same number of
processes that train on their shares without exchanging anything: the speed of so many machines.
Efficiency is the time of a step of `apart` over that of the way to train. Bytes are those that
leave the network cards of all hosts in training, by the kernel's counters. Neither has the first
epoch, evaluation, or the last update, with which `fit` ends.

On hosts with rate-limited links, a command prefix places the processes; the labels of the link go
to the table:

    python benchmarks/local_steps.py --hosts 2 --speed --prefix "ip netns exec node{number}"
    --address 10.77.0.{number} --link "1 Gbit/s" --output benchmarks/results/local_steps_1gbit.json

`--speed` takes few rows; the algorithms take turns, once for each seed, as the speed of a machine
changes with time. Results on test data need no links, and no idle machine:

    nice -n 19 python benchmarks/local_steps.py --models mlp --ways synchronous DiLoCo
    "Streaming DiLoCo" --output benchmarks/results/local_steps_accuracy.json

What is in the output file already is not run again. `--sync` changes arguments of local steps:
fragments need more steps to travel over a slower link, `--sync delay=12 compress=float4`, and with
`--sync outer=1` the outer optimizer is SGD of that rate, without momentum or with that of
`momentum=0.5`. With `--decay` the rate falls to zero along a cosine, so that results on test data
vary less from seed to seed. `--ways "torchft DiLoCo"` and others of its name take torchft instead
(local_steps_torchft.py). `--table` prints files of earlier runs.
"""

import argparse
import gzip
import json
import os
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from machine import environment
from scaling_models import make_flax

TEXT_BYTES, TEST_LINES = 64, 2000
WAYS: dict[str, dict[str, Any] | None] = {
    "apart": None,
    "synchronous": None,
    "DiLoCo": {"every": 50},
    "Streaming DiLoCo": {"every": 50, "fragments": 4, "delay": 5, "compress": "int8"},
    # These need PyTorch and torchft, for images alone.
    "torchft apart": None,
    "torchft DiLoCo": {"every": 50},
    "torchft Streaming DiLoCo": {"every": 50, "fragments": 2, "delay": 5},
}


@dataclass(frozen=True)
class Task:
    """What is trained: rows of a global batch, epochs, rate, and rows for `--speed`."""

    batch: int
    epochs: int
    rate: float
    speed_rows: int


# Epochs of `--speed` have whole rounds of 50 steps.
TASKS = {
    "mlp": Task(256, 6, 0.05, 25_600),
    "resnet20": Task(128, 3, 0.05, 6_400),
    "decoder_tiny": Task(128, 3, 0.003, 12_800),
}


def load(model: str) -> tuple[Any, Any, Any, Any]:
    """Returns rows and labels to train and to test on."""
    root = Path(os.environ["TNT_JAX_DATA"])
    if model == "decoder_tiny":
        path = root / "tatoeba_ende" / "train.eng-deu.tsv.gz"
        with gzip.open(path, "rb") as file:
            lines = [line.split(b"\t")[-2] for line in file]
        rows = [line[: TEXT_BYTES + 1].ljust(TEXT_BYTES + 1, b"\0") for line in lines]
        text = np.frombuffer(b"".join(rows), np.uint8).reshape(len(rows), -1).astype(np.int32)
        x, y = text[:, :-1], text[:, 1:]
        return x[:-TEST_LINES], y[:-TEST_LINES], x[-TEST_LINES:], y[-TEST_LINES:]

    def read(part: str) -> tuple[Any, Any]:
        folder = root / "fashion_mnist"
        images = gzip.decompress((folder / f"{part}-images-idx3-ubyte.gz").read_bytes())
        labels = gzip.decompress((folder / f"{part}-labels-idx1-ubyte.gz").read_bytes())
        pixels = np.frombuffer(images, np.uint8, offset=16).reshape(-1, 28, 28, 1)
        return pixels.astype(np.float32) / 255, np.frombuffer(labels, np.uint8, offset=8).astype(
            np.int32
        )

    return *read("train"), *read("t10k")


def make_model(task: dict[str, Any], steps: int) -> Any:
    """Returns a compiled model, of so many steps an epoch."""
    import optax

    import tnt_jax as tnt

    sync = None
    if task["sync"] is not None:
        given = dict(task["sync"])
        if "outer" in given:
            given["outer"] = optax.sgd(given["outer"], momentum=given.pop("momentum", None))
        sync = tnt.LocalSteps(**given, groups="process")
    name = task["model"]
    module = (
        tnt.models.Decoder(**tnt.models.DECODER_SIZES["tiny"])
        if name == "decoder_tiny"
        else make_flax(name)
    )
    model = tnt.Model(module, seed=task["seed"], sync=sync)
    rate: Any = TASKS[name].rate
    if task["decay"]:
        rate = optax.cosine_decay_schedule(rate, task["epochs"] * steps)
    model.compile(
        optax.adam(rate) if name == "decoder_tiny" else optax.sgd(rate, momentum=0.9),
        loss=tnt.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    return model


def sent_bytes() -> int:
    """Returns what has left the network cards of this host."""
    cards = [path for path in Path("/sys/class/net").iterdir() if path.name != "lo"]
    return sum(int((card / "statistics" / "tx_bytes").read_text()) for card in cards)


def fit(
    task: dict[str, Any], process: int, data: Sequence[Any], note: Callable[[], None]
) -> dict[str, float]:
    """Trains in one process, calls `note` around epochs, and returns results on test data."""
    import tnt_jax as tnt

    x, y, x_test, y_test = data
    batch = task["batch"]
    if task["way"] == "apart":
        own = slice(process * len(x) // task["hosts"], (process + 1) * len(x) // task["hosts"])
        x, y, batch = x[own], y[own], batch // task["hosts"]

    class Clock(tnt.callbacks.Callback):
        """Notes the beginning and the end of each epoch."""

        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            note()

        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            note()

    model = make_model(task, -(-len(x) // batch))
    model.fit(x, y, batch_size=batch, epochs=task["epochs"], verbose=0, callbacks=[Clock()])
    return model.evaluate(x_test, y_test, batch_size=1000, verbose=0, return_dict=True)


def work(task: dict[str, Any], process: int) -> None:
    """Trains in one process, and prints what came of it."""
    data = load(task["model"])
    x, y, x_test, y_test = (data[0][: task["rows"]], data[1][: task["rows"]], *data[2:])
    steps = -(-len(x) // task["batch"])
    noted: list[tuple[float, int]] = []

    def note() -> None:
        noted.append((time.perf_counter(), sent_bytes()))

    if task["way"].startswith("torchft"):
        import local_steps_torchft

        rate = TASKS[task["model"]].rate
        logs = local_steps_torchft.train(task, process, (x, y, x_test, y_test), note, rate)
    else:
        logs = fit(task, process, (x, y, x_test, y_test), note)
    begins, ends = noted[2::2], noted[3::2]
    print(
        json.dumps(
            {
                "step_ms": [
                    1000 * (end[0] - begin[0]) / steps
                    for begin, end in zip(begins, ends, strict=True)
                ],
                # What is sent after the last step of an epoch leaves once the next has begun.
                "bytes": [(end[1] - begin[1]) / steps for begin, end in pairwise(begins)],
                "test": logs,
            }
        )
    )


def run(task: dict[str, Any], args: argparse.Namespace) -> dict[str, Any]:
    """Runs the processes of one way to train, and returns what they found together."""
    variables = {**os.environ, "JAX_PLATFORMS": "cpu"}
    cores = sorted(os.sched_getaffinity(0))
    port = 29_000 + int(time.time()) % 1000
    processes = []
    for index in range(task["hosts"]):
        where = {"number": index + 1, "index": index}
        first = args.address.format(number=1, index=0)
        joined = {"MASTER_ADDR": first, "MASTER_PORT": str(port)}
        joined |= {"OWN_ADDR": args.address.format(**where)}
        if task["way"] != "apart":
            joined |= {
                "TNT_COORDINATOR_ADDRESS": f"{first}:{port}",
                "TNT_NUM_PROCESSES": str(task["hosts"]),
                "TNT_PROCESS_ID": str(index),
            }
        command = [
            *shlex.split(args.prefix.format(**where)),
            *("taskset", "-c", str(cores[index % len(cores)])),
            *(sys.executable, __file__, "--worker", json.dumps(task), str(index)),
        ]
        processes.append(
            subprocess.Popen(
                command, env={**variables, **joined}, stdout=subprocess.PIPE, text=True
            )
        )
    outputs = [process.communicate()[0] for process in processes]
    if any(process.returncode for process in processes):
        sys.exit(f"A process of {task} failed.")
    found = [json.loads(output.strip().splitlines()[-1]) for output in outputs]
    return {
        **task,
        "step_ms": [max(times) for times in zip(*(one["step_ms"] for one in found), strict=True)],
        "bytes": [sum(each) for each in zip(*(one["bytes"] for one in found), strict=True)],
        "test": found[0]["test"],
    }


def named(way: str, sync: dict[str, Any] | None) -> str:
    """Returns the name of an algorithm with the arguments of its local steps."""
    return way if not sync else f"{way} ({', '.join(f'{k}={v}' for k, v in sync.items())})"


class Table:
    """The tables of some runs, in Markdown; medians of times and bytes, means of tests."""

    def __init__(self, runs: Sequence[dict[str, Any]]) -> None:
        self._runs: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
        for one in runs:
            # Files of earlier versions lack some of it.
            of_speed = one.get("speed", one["rows"] is not None)
            way = named(one["way"], one.get("sync", WAYS.get(one["way"])))
            model = one["model"] + (", decaying rate" if one.get("decay") else "")
            key = (of_speed, model, one["hosts"], one["link"], way)
            self._runs.setdefault(key, []).append(one)

    def text(self) -> str:
        """Returns a table of speeds, and one of results on test data, where there are such runs."""
        speeds = [self._speed(key) for key in self._runs if key[0]]
        tests = [self._test(key) for key in self._runs if not key[0] and "apart" not in key[-1]]
        heads = (
            "model, hosts, link, algorithm, ms a step, efficiency, KB a step, times fewer bytes",
            "model, hosts, algorithm, test loss, to synchronous, accuracy, to synchronous, seeds",
        )
        return "\n\n".join(
            "\n".join([_row(head.split(", ")), _row(["---"] * (head.count(", ") + 1)), *rows])
            for head, rows in zip(heads, (speeds, tests), strict=True)
            if rows
        )

    def _median(self, key: tuple[Any, ...], name: str) -> float:
        runs = self._runs.get(key, [])
        return statistics.median([x for one in runs for x in one[name]]) if runs else float("nan")

    def _speed(self, key: tuple[Any, ...]) -> str:
        *same, way = key
        step, size = self._median(key, "step_ms"), self._median(key, "bytes")
        apart = self._median((*same, "torchft apart" if "torchft" in way else "apart"), "step_ms")
        numbers = [f"{step:.1f}", f"{apart / step:.3f}", f"{size / 1e3:.1f}", ""]
        if size and "apart" not in way and way != "synchronous":
            numbers[-1] = f"{self._median((*same, 'synchronous'), 'bytes') / size:.0f}"
        return _row([*map(str, same[1:]), way, *numbers])

    def _test(self, key: tuple[Any, ...]) -> str:
        *same, way = key
        found = {name: self._tests(key, name) for name in ("loss", "accuracy")}
        seeds = [one["seed"] for one in self._runs[key]]
        plain = {name: self._tests((*same, "synchronous"), name, seeds) for name in found}
        loss = np.mean(found["loss"]) / np.mean(plain["loss"] or np.nan) - 1
        accuracy = np.mean(found["accuracy"]) - np.mean(plain["accuracy"] or np.nan)
        cells = [str(cell) for cell in (same[1], same[2], way)]
        cells += [_spread(found["loss"]), f"{100 * loss:+.2f} %"]
        cells += [_spread(found["accuracy"]), f"{100 * accuracy:+.2f} points"]
        return _row([*cells, str(len(found["loss"]))])

    def _tests(
        self, key: tuple[Any, ...], name: str, seeds: Sequence[int] | None = None
    ) -> list[float]:
        runs = self._runs.get(key, [])
        return [one["test"][name] for one in runs if seeds is None or one["seed"] in seeds]


def _spread(values: Sequence[float]) -> str:
    return f"{np.mean(values):.4f} ({min(values):.4f} to {max(values):.4f})"


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def argument(text: str) -> tuple[str, Any]:
    """Returns an argument of `LocalSteps` from text such as `delay=12`, or of the outer SGD."""
    name, _, value = text.partition("=")
    if value.isdecimal():
        return name, int(value)
    return name, float(value) if name in ("outer", "momentum") else value


def main() -> None:
    if sys.argv[1:2] == ["--worker"]:
        work(json.loads(sys.argv[2]), int(sys.argv[3]))
        return
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--models", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS)[:4])
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", type=int, help="of each model, 3 or more; see TASKS")
    parser.add_argument("--rows", type=int, help="to train on; by default all")
    parser.add_argument("--speed", action="store_true")
    parser.add_argument("--decay", action="store_true", help="let the rate fall to zero")
    parser.add_argument("--prefix", default="")
    parser.add_argument("--address", default="127.0.0.1")
    parser.add_argument("--link", default="none", help="what the table calls the links")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--sync", nargs="+", type=argument, default=[], metavar="NAME=VALUE")
    parser.add_argument("--table", nargs="+", type=Path, metavar="FILE")
    args = parser.parse_args()
    if args.epochs is not None and args.epochs < 3:
        parser.error("--epochs must be at least 3: times and bytes are those after the first.")
    if args.table:
        runs = [one for file in args.table for one in json.loads(file.read_text())["runs"]]
        print(Table(runs).text())
        return
    has_begun = args.output and args.output.exists()
    runs = json.loads(args.output.read_text())["runs"] if has_begun else []
    for name in args.models:
        task = TASKS[name]
        rows = args.rows or (task.speed_rows if args.speed else None)
        for seed in range(args.seeds):
            for way in args.ways:
                if "apart" in way and seed and not args.speed:
                    continue
                epochs = args.epochs or (3 if args.speed else task.epochs)
                sync = WAYS[way]
                if sync is not None and not way.startswith("torchft"):
                    sync = {**sync, **dict(args.sync)}
                choice = {"model": name, "hosts": args.hosts, "link": args.link, "way": way}
                choice |= {"seed": seed, "rows": rows, "epochs": epochs, "batch": task.batch}
                choice |= {"sync": sync, "speed": args.speed, "decay": args.decay}
                if any(choice.items() <= {"decay": False, **one}.items() for one in runs):
                    continue
                runs.append(run(choice, args))
                print(json.dumps(runs[-1]), flush=True)
                if args.output:
                    content = {**environment(), "runs": runs}
                    args.output.write_text(json.dumps(content, indent=1) + "\n")
    print(Table(runs).text())


if __name__ == "__main__":
    main()
