"""Summing gradients between processes on CPUs: what a sum takes, and what a training step with it
takes.

Sums: shared memory, XLA's all-reduce through sockets (Gloo), and PyTorch's Gloo, for sizes from
1 KiB on, in GB/s of array per second.
Steps: an MLP with 28 MB of gradients, whose sums go through shared memory, XLA's sockets or
PyTorch's DistributedDataParallel. A step without any exchange tells what sums cost.

    python benchmarks/allreduce.py --processes 2 --output benchmarks/results/allreduce_local.json

On hosts with rate-limited links, a command prefix chooses the host of each process:

    python benchmarks/allreduce.py --prefix "ip netns exec node{number}" --address
    10.77.0.{number} --rate-gbit 1
"""

import argparse
import json
import os
import platform
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from allreduce_contenders import link_bytes, step_jax, step_torch, sum_jax, sum_torch

SUMS = ("shared memory", "xla", "torch")
STEPS = ("alone", "shared memory", "xla", "xla bfloat16", "torch ddp 4 MB", "torch ddp 25 MB")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--processes", type=int, default=2, help="processes (default: 2)")
    parser.add_argument(
        "--prefix",
        default="",
        help="command that starts a process elsewhere; {number} is its number from 1",
    )
    parser.add_argument(
        "--address", default="127.0.0.1", help="address of a process; {number} is its number from 1"
    )
    parser.add_argument(
        "--port", type=int, default=23450, help="first of the ports to use (default: 23450)"
    )
    parser.add_argument(
        "--rate-gbit",
        type=float,
        help="rate of the links, for the least possible time beside the measured one",
    )
    parser.add_argument(
        "--sizes-kb",
        nargs="*",
        type=int,
        default=[1, 16, 256, 4096, 28000, 65536, 262144],
        help="sizes of sums in KiB",
    )
    parser.add_argument(
        "--sums",
        nargs="*",
        choices=SUMS,
        default=SUMS,
        help="contenders of the sums (default: all)",
    )
    parser.add_argument(
        "--steps",
        nargs="*",
        choices=STEPS,
        default=STEPS,
        help="contenders of the steps (default: all)",
    )
    parser.add_argument(
        "--batch-size", type=int, default=256, help="rows of a process in a step (default: 256)"
    )
    parser.add_argument("--rounds", type=int, default=9, help="measured rounds (default: 9)")
    parser.add_argument(
        "--threads", type=int, default=1, help="threads of each process (default: 1)"
    )
    parser.add_argument("--output", help="JSON file for the results")
    parser.add_argument("--worker", nargs=2, metavar=("WHAT", "PROCESS"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.prefix:
        # Several hosts have no memory to share.
        args.sums, args.steps = (
            [name for name in names if name != "shared memory"] for names in (args.sums, args.steps)
        )
    return args


def work(args: argparse.Namespace, what: str, process: int) -> None:
    """Measures one contender on one process; process 0 prints seconds as JSON."""
    kind, _, name = what.partition(":")
    is_torch = name.startswith("torch")
    if kind == "sum":
        prepare = sum_torch(args, process) if is_torch else sum_jax(args, process, name)
        results: Any = {size: measure(prepare(size * 256), args.rounds) for size in args.sizes_kb}
    elif is_torch:
        results = measure(step_torch(args, process, int(name.split()[2])), args.rounds)
    else:
        results = measure(step_jax(args, process, name), args.rounds)
    if process == 0:
        print("RESULT " + json.dumps(results), flush=True)
    # Leaving in order takes seconds and measures nothing.
    sys.stdout.flush()
    time.sleep(1 if process == 0 else 0.5)
    os._exit(0)


def measure(run: Callable[[], Any], rounds: int) -> list[float]:
    times = []
    for round_ in range(rounds + 3):
        start = time.perf_counter()
        run()
        if round_ >= 3:
            times.append(time.perf_counter() - start)
    return times


def start_processes(args: argparse.Namespace, what: str) -> Any:
    """Returns what process 0 measured of a contender."""
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": str(args.threads),
        "PJRT_NPROC": str(args.threads),
        # Huge pages, as the launcher asks for.
        "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
    }
    own = [sys.executable, os.path.abspath(__file__), *sys.argv[1:]]
    commands = [
        [*shlex.split(args.prefix.format(number=process + 1)), *own, "--worker", what, str(process)]
        for process in range(args.processes)
    ]
    running = [
        subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
        for command in commands
    ]
    outputs = [process.communicate(timeout=600)[0] for process in running]
    found = [line for line in outputs[0].splitlines() if line.startswith("RESULT ")]
    if not found:
        raise RuntimeError(f"{what} measured nothing; its messages stand above.")
    return json.loads(found[0].removeprefix("RESULT "))


def report(args: argparse.Namespace, results: dict[str, Any]) -> None:
    print(
        f"{args.processes} processes, load {os.getloadavg()[0]:.1f}, medians of {args.rounds} "
        f"rounds"
    )
    sums = {what: times for what, times in results.items() if what.startswith("sum:")}
    if sums:
        print(f"{'size KiB':>9}" + "".join(f"{what.removeprefix('sum:'):>22}" for what in sums))
        for size in args.sizes_kb:
            medians = [statistics.median(times[str(size)]) for times in sums.values()]
            print(
                f"{size:9}"
                + "".join(f"{t * 1e3:10.2f} ms {size / 1024**2 / t:6.2f}GB/s" for t in medians)
            )
    steps = {what: times for what, times in results.items() if what.startswith("step:")}
    if steps:
        print(f"{'step':22} {'median ms':>10} {'min':>8} {'max':>8}")
    for what, times in steps.items():
        milliseconds = [t * 1e3 for t in times]
        name = what.removeprefix("step:")
        print(
            f"{name:22} {statistics.median(milliseconds):10.1f} {min(milliseconds):8.1f} "
            f"{max(milliseconds):8.1f}"
        )
    if args.rate_gbit:
        print(
            f"link alone, {args.rate_gbit:g} Gbit/s: "
            f"{link_bytes(args.processes) * 8 / args.rate_gbit / 1e6:.1f} ms a step"
        )


def main() -> None:
    args = parse_arguments()
    if args.worker:
        work(args, args.worker[0], int(args.worker[1]))
    results = {}
    for what in [*(f"sum:{name}" for name in args.sums), *(f"step:{name}" for name in args.steps)]:
        results[what] = start_processes(args, what)
    report(args, results)
    if args.output:
        about = {
            "arguments": vars(args),
            "python": platform.python_version(),
            "cpus": os.cpu_count(),
            "load": os.getloadavg(),
        }
        Path(args.output).write_text(json.dumps({**about, "seconds": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
