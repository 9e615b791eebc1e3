"""Time from the start of a process to the end of its first training step, and where it goes.

Each contender trains one step of the same network from a standing start, in one process or in
several, each bound to a core in turn. It starts `--starts` times with one folder for compiled
programs: the first start is cold, the others find what was kept. PyTorch compiles nothing without
`torch.compile`; of the processes of Keras, JAX keeps the programs of the first alone. Contenders
take turns, so that a disturbance of the machine hits all alike. The modules of the checkout are
compiled to bytecode before, as those of packages are at their installation.

    python benchmarks/first_step.py --output benchmarks/results/first_step.json

`python -X importtime` tells more about imports.
"""

import argparse
import compileall
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from first_step_worker import IMPORTS
from machine import add_platform, environment, free_addresses
from scaling import BOUND, SIZES, environment_of, installed

PHASES = ("start", "import", "devices", "data", "model", "first step", "total")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("--models", nargs="+", choices=SIZES, default=["mlp", "resnet20"])
    add("--processes", nargs="+", type=int, default=[1, 8], help="(default: 1 8)")
    add("--contenders", nargs="+", choices=IMPORTS, default=list(IMPORTS), help="(default: all)")
    add("--starts", type=int, default=4, help="starts with one folder (default: 4)")
    add("--timeout", type=int, default=300, help="seconds that a start may take (default: 300)")
    add("--output", help="JSON file for the results")
    add_platform(parser)
    return parser.parse_args()


def start_once(args: argparse.Namespace, task: dict[str, Any], cache: str) -> dict[str, Any]:
    """Returns the seconds of each phase of process 0, or the reason why there are none."""
    addresses = free_addresses("127.0.0.1", task["processes"])
    description = json.dumps({**task, "addresses": addresses})
    worker = str(Path(__file__).with_name("first_step_worker.py"))
    cores = sorted(os.sched_getaffinity(0))
    running = []
    for process in range(task["processes"]):
        more = {
            **environment_of(args.platform, task, process, addresses),
            "TORCHINDUCTOR_CACHE_DIR": cache,
            "JAX_COMPILATION_CACHE_DIR": cache,
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        }
        bound = ["taskset", "-c", str(cores[process % len(cores)])]
        command = [sys.executable, worker, description, str(process), repr(time.time())]
        running.append(
            subprocess.Popen(
                [*(bound if task["processes"] > 1 else []), *command],
                env={**os.environ, **more},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    try:
        outputs = [process.communicate(timeout=args.timeout) for process in running]
    except subprocess.TimeoutExpired:
        return {"reason": f"no result within {args.timeout} s"}
    finally:
        for process in running:
            process.kill()
    for line in outputs[0][0].splitlines():
        if line.startswith("RESULT "):
            return json.loads(line.removeprefix("RESULT "))
    return {"reason": "\n".join(outputs[0][1].splitlines()[-3:])}


def measure(
    args: argparse.Namespace, model: str, processes: int, contenders: list[str]
) -> list[dict[str, Any]]:
    """Returns a row for each contender: its starts, of which the first is cold."""
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        starts: dict[str, list[dict[str, Any]]] = {name: [] for name in contenders}
        for _ in range(args.starts):
            for number, name in enumerate(contenders):
                task = {
                    "model": model, "data": "synthetic", "ranks": processes, "kind": BOUND,
                    "batch": processes * SIZES[model].rows, "contender": name,
                    "processes": processes, "rounds": 1,
                }  # fmt: skip
                found = start_once(args, task, str(Path(folder) / str(number)))
                if "reason" in found:
                    sys.exit(f"{model}, {name}, {processes} process(es): {found['reason']}")
                starts[name].append(found)
        for name, found in starts.items():
            rows.append(
                {"model": model, "processes": processes, "contender": name, "starts": found}
            )
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    """Returns the seconds of each phase as Markdown: cold, and the median of later starts."""
    lines = [
        "| network | processes | contender | programs | " + " | ".join(PHASES) + " |",
        "| --- " * (4 + len(PHASES)) + "|",
    ]
    for row in rows:
        cold, *kept = row["starts"]
        begin = f"| {row['model']} | {row['processes']} | {row['contender']} |"
        lines.append(f"{begin} cold | " + " | ".join(f"{cold[p]:.2f}" for p in PHASES) + " |")
        if kept:
            medians = [statistics.median(start[phase] for start in kept) for phase in PHASES]
            totals = [start["total"] for start in kept]
            values = " | ".join(f"{value:.2f}" for value in medians)
            lines.append(f"{begin} kept | {values} ({min(totals):.2f} to {max(totals):.2f}) |")
    return "\n".join(lines)


def main() -> None:
    args = parse_arguments()
    contenders = installed(args.contenders)
    compileall.compile_dir(Path(__file__).parents[1] / "tnt_jax", quiet=1)
    rows = []
    for model in args.models:
        for processes in args.processes:
            # With one process there is nothing to sum.
            alone = processes == 1
            chosen = [n for n in contenders if not (alone and n.endswith("sockets"))]
            rows += measure(args, model, processes, chosen)
    print(table(rows))
    if args.output:
        found = {"arguments": vars(args), **environment(), "rows": rows}
        Path(args.output).write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
