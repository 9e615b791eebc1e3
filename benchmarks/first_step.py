"""Time to the first step of two CPU processes, with the ring and with XLA's joined sums, without
and with kept programs.

JAX keeps no program with callbacks in its compilation cache, so a job that sums by the ring
compiles its training step at every start. Each contender starts `--starts` times with one cache:
the first start is cold, the others are warm.

    python benchmarks/first_step.py --output benchmarks/results/first_step.json
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
from pathlib import Path

from scaling import KINDS, SIZES, run_task, versions

CONTENDERS = ("tnt_jax", "tnt_jax, joined XLA sums")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--models", nargs="+", choices=SIZES, default=["mlp", "resnet20", "transformer_tiny"]
    )
    parser.add_argument(
        "--starts",
        type=int,
        default=4,
        help="starts with one cache; the first is cold (default: 4)",
    )
    parser.add_argument("--output", help="JSON file for the results")
    args = parser.parse_args()
    args.prefix, args.address, args.timeout = "", "127.0.0.1", 300
    rows, port = [], 25450
    print("| network | contender | cold, s | warm, s |\n| --- | --- | --- | --- |")
    for model in args.models:
        for contender in CONTENDERS:
            with tempfile.TemporaryDirectory() as cache:
                os.environ |= {
                    "JAX_COMPILATION_CACHE_DIR": cache,
                    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
                    "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
                }
                task = {
                    "model": model, "data": "synthetic", "ranks": 2, "batch": 2 * SIZES[model].rows,
                    "kind": KINDS[0],
                    "contender": contender, "processes": 2, "rounds": 1,
                }  # fmt: skip
                starts = []
                for _ in range(args.starts):
                    result, port = run_task(args, task, port), port + 10
                    if "first_s" not in result:
                        sys.exit(f"{model}, {contender}: {result['reason']}")
                    starts.append(result["first_s"])
            rows.append({"model": model, "contender": contender, "first_s": starts})
            warm = starts[1:]
            print(
                f"| {model} | {contender} | {starts[0]:.2f} | {statistics.median(warm):.2f} "
                f"({min(warm):.2f} to {max(warm):.2f}) |",
                flush=True,
            )
    if args.output:
        Path(args.output).write_text(
            json.dumps({"versions": versions(), "rows": rows}, indent=1) + "\n"
        )


if __name__ == "__main__":
    main()
