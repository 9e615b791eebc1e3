"""Steps of training with and without `on_nan`, in turns in one process, on the networks of
`scaling.py` with made-up data.

    python benchmarks/on_nan.py --output benchmarks/results/on_nan.json
"""

import argparse
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

from machine import add_platform, choose_devices

# Rows of a global batch.
BATCHES = {"mlp": 512, "resnet20": 64, "resnet50": 8}


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("--models", nargs="+", choices=sorted(BATCHES), default=["mlp", "resnet20"])
    add("--ranks", type=int, default=2, help="devices; virtual ones on CPUs (default: %(default)s)")
    add("--rounds", type=int, default=15, help="timed epochs of each way (default: %(default)s)")
    add("--steps", type=int, default=8, help="steps of an epoch (default: %(default)s)")
    add_platform(parser)
    add("--output", type=Path, help="JSON file for the results")
    return parser.parse_args()


def make_run(model: str, on_nan: str | None, steps: int) -> Callable[[], tuple[float, float]]:
    """Returns a function that trains for an epoch.

    It returns the milliseconds of a step, and those that all threads computed in it.
    """
    import optax
    from scaling_models import load, make_flax

    import tnt_jax as tnt

    batch = BATCHES[model]
    (x,), y = load(model, real=False, num_rows=steps * batch)
    net = tnt.Model(make_flax(model), seed=0)
    loss = tnt.losses.SparseCategoricalCrossentropy(from_logits=True)
    net.compile(optax.sgd(0.01, momentum=0.9), loss=loss, on_nan=on_nan)

    def run() -> tuple[float, float]:
        start, start_cpu = time.perf_counter(), time.process_time()
        net.fit(x, y, batch_size=batch, shuffle=False, verbose=0)
        cpu = time.process_time() - start_cpu
        return (time.perf_counter() - start) / steps * 1e3, cpu / steps * 1e3

    run()
    return run


def measure(model: str, rounds: int, steps: int) -> dict:
    ways = {str(way): make_run(model, way, steps) for way in (None, "skip", "raise")}
    times = {way: [] for way in ways}
    for _ in range(rounds):
        for way, run in ways.items():
            times[way].append(run())
    columns = {way: list(zip(*pairs, strict=True)) for way, pairs in times.items()}
    return {"model": model, "batch": BATCHES[model]} | {
        unit: {way: summary(pair[index], columns["None"][index]) for way, pair in columns.items()}
        for index, unit in enumerate(("wall_ms", "cpu_ms"))
    }


def summary(values: tuple[float, ...], plain: tuple[float, ...]) -> dict[str, float]:
    """Compares each round with the round without `on_nan` of the same turn."""
    ratios = [value / other - 1 for value, other in zip(values, plain, strict=True)]
    return {
        "median": round(statistics.median(values), 3), "least": round(min(values), 3),
        "most": round(max(values), 3),
        "extra_percent": round(100 * statistics.median(ratios), 2),
        "extra_of_least_percent": round(100 * (min(values) / min(plain) - 1), 2),
    }  # fmt: skip


def main() -> None:
    args = parse_arguments()
    choose_devices(args.platform, num_cpu_devices=args.ranks)
    import jax

    import tnt_jax as tnt

    tnt.init(devices=range(args.ranks))
    load = os.getloadavg()[0]
    rows = [measure(model, args.rounds, args.steps) for model in args.models]
    print(json.dumps(rows, indent=1))
    if args.output:
        about = {
            "command": " ".join(["python", *sys.argv]), "ranks": args.ranks,
            "processor": platform.machine(), "load_before": round(load, 1),
            "python": platform.python_version(), "jax": jax.__version__,
        }  # fmt: skip
        args.output.write_text(json.dumps({"about": about, "rows": rows}, indent=1) + "\n")


main()
