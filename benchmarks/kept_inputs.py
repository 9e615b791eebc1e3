"""Steps of training on CPUs with and without kept inputs of convolutions (see
`tnt_jax/train/steps/step.py`).

`Model.fit` trains networks on random images with SGD with momentum on one device, both ways in
turns in one process; each way's peak of resident memory is the median of processes of its own,
which find their programs compiled.

    python benchmarks/kept_inputs.py --output benchmarks/results/kept_inputs.json
"""

import argparse
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

WAYS = {"as it is": False, "kept inputs": True}
# Model, rows of a step, cores.
CASES = [("resnet20", 64, 1), ("resnet20", 64, 2), ("cnn", 64, 1), ("resnet50", 8, 1)]
STEPS = 3


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add(
        "--models",
        nargs="+",
        choices=sorted({case[0] for case in CASES}),
        default=["resnet20", "cnn", "resnet50"],
    )
    add(
        "--rounds",
        type=int,
        default=7,
        help="timed rounds of each way, of three steps each (default: %(default)s)",
    )
    add(
        "--processes",
        type=int,
        default=3,
        help="processes that tell each way's peak of memory (default: %(default)s)",
    )
    add("--output", type=Path, help="JSON file for the results")
    add("--inside", help=argparse.SUPPRESS)
    return parser.parse_args()


def make_run(model: str, batch: int, *, is_kept: bool) -> Callable[[], Any]:
    """Returns a function that trains for an epoch of three steps, and has done so once."""
    import optax
    from scaling_models import load, make_flax

    import tnt_jax as tnt
    from tnt_jax.models.small import CNN
    from tnt_jax.train.steps import step

    # What training calls; it is traced, once, by the first epoch.
    kept = step.keep_inputs
    if not is_kept:
        step.keep_inputs = lambda traced, step: traced
    (x,), y = load("resnet20" if model == "cnn" else model, real=False, num_rows=STEPS * batch)
    net = tnt.Model(CNN() if model == "cnn" else make_flax(model), seed=0)
    net.compile(
        optax.sgd(0.01, momentum=0.9),
        loss=tnt.losses.SparseCategoricalCrossentropy(from_logits=True),
    )

    def run() -> Any:
        return net.fit(x, y, batch_size=batch, shuffle=False, verbose=0).history["loss"]

    run()
    step.keep_inputs = kept
    return run


def measure_inside(model: str, batch: int, rounds: int, ways: list[str]) -> dict[str, Any]:
    """Returns for each way the milliseconds of a step in each round, its losses, and the peak of
    memory so far.
    """
    import tnt_jax as tnt

    tnt.init(devices=range(1))
    runs = {way: make_run(model, batch, is_kept=WAYS[way]) for way in ways}
    times, losses = {way: [] for way in ways}, {way: [] for way in ways}
    for _ in range(rounds):
        for way, run in runs.items():
            start = time.perf_counter()
            losses[way] += run()
            times[way].append((time.perf_counter() - start) / STEPS * 1e3)
    return {
        "ms": times,
        "losses": losses,
        "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3,
    }


def run_inside(
    model: str, batch: int, cores: int, rounds: int, ways: list[str], cache: str
) -> dict[str, Any]:
    """Returns what `measure_inside` returns in a process of its own, on its cores, with a folder
    for compiled programs.
    """
    environment = {
        "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "1", "OMP_NUM_THREADS": str(cores),
        "PJRT_NPROC": str(max(cores, 2)),
        "JAX_COMPILATION_CACHE_DIR": cache, "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }  # fmt: skip
    command = [
        "taskset",
        "-c",
        f"0-{cores - 1}",
        sys.executable,
        __file__,
        "--inside",
        json.dumps([model, batch, rounds, ways]),
    ]
    done = subprocess.run(
        command, env={**os.environ, **environment}, capture_output=True, text=True
    )
    if done.returncode != 0:
        sys.exit(done.stderr)
    return json.loads(done.stdout.splitlines()[-1])


def measure(model: str, batch: int, cores: int, rounds: int, processes: int) -> dict[str, Any]:
    ways = {}
    with tempfile.TemporaryDirectory() as cache:
        timed = run_inside(model, batch, cores, rounds, [*WAYS], cache)
        for way, times in timed["ms"].items():
            peaks = sorted(
                round(run_inside(model, batch, cores, 2, [way], cache)["peak_mb"])
                for _ in range(processes)
            )
            ms = {
                "ms": round(statistics.median(times), 1),
                "range_ms": [round(min(times), 1), round(max(times), 1)],
            }
            ways[way] = {
                **ms,
                "peak_mb": statistics.median(peaks),
                "range_peak_mb": [peaks[0], peaks[-1]],
            }
    same = timed["losses"]["as it is"] == timed["losses"]["kept inputs"]
    return {"model": model, "batch": batch, "cores": cores, "same_losses": same, "ways": ways}


def markdown(rows: list[dict[str, Any]]) -> str:
    titles = [
        "model",
        "batch",
        "cores",
        *(f"{way}, {unit}" for unit in ("ms", "peak MB") for way in WAYS),
        "same losses",
    ]
    lines = [f"| {' | '.join(titles)} |", "|" + " --- |" * len(titles)]
    for row in rows:
        ways = row["ways"].values()
        times = ["{} ({} to {})".format(way["ms"], *way["range_ms"]) for way in ways]
        peaks = " | ".join(
            "{} ({} to {})".format(way["peak_mb"], *way["range_peak_mb"]) for way in ways
        )
        same = "yes" if row["same_losses"] else "no"
        lines.append(
            f"| {row['model']} | {row['batch']} | {row['cores']} | {times[0]} | {times[1]} | "
            f"{peaks} | {same} |"
        )
    return "\n".join(lines)


def about(args: argparse.Namespace, load: float) -> dict[str, Any]:
    commit = subprocess.run(
        ["git", "rev-parse", "HEAD"], capture_output=True, text=True
    ).stdout.strip()
    info = Path("/proc/cpuinfo").read_text().splitlines()
    models = [line.split(":")[1].strip() for line in info if line.startswith("model name")]
    return {
        "command": " ".join(["python", *sys.argv]), "commit": commit,
        "processor": models[0] if models else platform.machine(),
        "rounds": args.rounds, "processes": args.processes, "steps_per_round": STEPS,
        "glibc_tunables": os.environ.get("GLIBC_TUNABLES"),
        "load_before": round(load, 1), "python": platform.python_version(),
        **{name: version(name) for name in ("jax", "jaxlib", "flax")},
    }  # fmt: skip


def main() -> None:
    args = parse_arguments()
    if args.inside:
        print(json.dumps(measure_inside(*json.loads(args.inside))))
        return
    load = os.getloadavg()[0]
    rows = [measure(*case, args.rounds, args.processes) for case in CASES if case[0] in args.models]
    print(markdown(rows))
    if args.output:
        args.output.write_text(
            json.dumps({"about": about(args, load), "rows": rows}, indent=1) + "\n"
        )


if __name__ == "__main__":
    main()
