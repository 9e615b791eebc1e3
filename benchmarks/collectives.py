"""Collectives of host values beside `jax.experimental.multihost_utils.process_allgather`.

All are timed in one run, in turns, on the same float32 arrays, with the median and the quartiles of
the repeats. A repeat begins when all processes have met.

    python benchmarks/collectives.py --processes 2 --output benchmarks/results/collectives.json

`process_allgather` narrows 64-bit values, and hangs or ends the process where shapes differ; the
collectives of tnt_jax compare before they exchange, which the smallest sizes show.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

SIZES_KIB = [1, 16, 256, 4096, 32768, 102400]
CALLS = ("process_allgather", "all_gather", "all_reduce", "broadcast", "all_gather_rows")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--processes", type=int, default=2, help="processes (default: 2)")
    parser.add_argument(
        "--sizes-kib", nargs="*", type=int, default=SIZES_KIB, help="sizes of arrays"
    )
    parser.add_argument("--calls", nargs="*", choices=CALLS, default=CALLS, help="what to time")
    parser.add_argument("--repeats", type=int, default=20, help="of each call (default: 20)")
    parser.add_argument(
        "--seconds", type=float, default=10, help="after which a size is repeated no more"
    )
    parser.add_argument("--output", type=Path, help="JSON file for the results")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


def launch(arguments: argparse.Namespace) -> None:
    """Runs this file in several processes through the launcher."""
    launcher = ["-m", "tnt_jax.launch", "-n", str(arguments.processes), "--no-gpu", "--"]
    subprocess.run([sys.executable, *launcher, *sys.argv, "--worker"], check=True)


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Returns seconds of each call by size, on process 0."""
    import jax
    import numpy as np
    from jax.experimental import multihost_utils

    import tnt_jax as tnt

    calls = {
        "process_allgather": multihost_utils.process_allgather,
        "all_gather": tnt.all_gather,
        "all_reduce": tnt.all_reduce,
        "broadcast": tnt.broadcast,
        "all_gather_rows": tnt.all_gather_rows,
    }
    tnt.init()
    results: dict[str, Any] = {}
    for size_kib in arguments.sizes_kib:
        value = np.ones(size_kib * 256, np.float32)
        times: dict[str, list[float]] = {name: [] for name in arguments.calls}
        began = time.perf_counter()
        # The first call of each size compiles its program.
        for repeat in range(-1, arguments.repeats):
            for name in arguments.calls:
                tnt.barrier()
                start = time.perf_counter()
                calls[name](value)
                if repeat >= 0:
                    times[name].append(time.perf_counter() - start)
            is_over = repeat >= 2 and time.perf_counter() - began > arguments.seconds
            if tnt.broadcast(is_over):
                break
        results[str(size_kib)] = {name: summary(values) for name, values in times.items()}
        if tnt.is_master_rank():
            print(f"{size_kib:>8} KiB  " + "  ".join(in_words(results[str(size_kib)])), flush=True)
    return {
        "processes": jax.process_count(),
        "cpus": os.cpu_count(),
        "machine": platform.machine(),
        "jax": jax.__version__,
        "seconds_by_kib": results,
    }


def summary(seconds: list[float]) -> dict[str, float]:
    """Returns median and quartiles."""
    first, median, third = statistics.quantiles(seconds, n=4)
    return {"first": first, "median": median, "third": third, "repeats": len(seconds)}


def in_words(times: dict[str, dict[str, float]]) -> list[str]:
    """Returns milliseconds: the median, and the quartiles in brackets."""
    return [
        f"{name} {1000 * t['median']:.2f} [{1000 * t['first']:.2f}, {1000 * t['third']:.2f}] ms"
        for name, t in times.items()
    ]


def main() -> None:
    arguments = parse_arguments()
    if not arguments.worker:
        launch(arguments)
        return
    import tnt_jax as tnt

    results = measure(arguments)
    if arguments.output is not None and tnt.is_master_rank():
        arguments.output.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
