"""Weak and strong scaling of training: tnt_jax, PyTorch, TensorFlow and Keras 3 in one run.

It runs on the GPUs of the machine, or on CPUs where there are none or `--platform cpu` says so. On
CPUs, ranks are processes as users start them, processes that are each bound to a core of its own,
or the virtual devices of one process; the time with one rank is the time on one core, so that one
against two ranks is a real measurement on two cores. On GPUs they are processes with a GPU each, or
the GPUs of one process. Who is not installed is left out, with a line.

"As users start them" is: nothing is bound, and the threads of a process are those that the
launcher sets for tnt_jax, the one that `torchrun` sets for PyTorch, and the defaults of TensorFlow
and Keras. All get huge pages, as the launcher asks for them. "Sockets" is tnt_jax with
`TNT_SHARED_MEMORY=0`.

The network `digits` is that of `examples/digits.py`, whose BatchNorm uses the statistics of the
global batch; real data are then the same images of scikit-learn. PyTorch has no synchronised
BatchNorm on CPUs, and uses the statistics of each rank.

Weak scaling keeps the rows of a rank, strong scaling those of the whole batch. Efficiency is
t(1) / t(n) when weak, t(1) / (n t(n)) when strong, of the fastest rounds, which other work on the
machine disturbs least. Everybody trains with SGD with momentum on arrays in memory, in the loop
that the library's users write.

    TNT_JAX_DATA=data python benchmarks/scaling.py --output benchmarks/results/scaling.json
    --picture benchmarks/results/scaling.png

On hosts with rate-limited links, a command prefix places the processes (and one-rank runs on the
first host):

    python benchmarks/scaling.py --kinds "processes, a core each"
    --prefix "ip netns exec node{number}" --address 10.77.0.{number}

In an allocation of SLURM the prefix is "srun --overlap --ntasks 1 --relative {index}", where
{index} counts from 0. The GPU runs have not been made; see docs/performance.md.
"""

import argparse
import importlib.util
import itertools
import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from machine import add_platform, environment, on_cpus
from scaling_models import SIZES

from tnt_jax.cluster.devices import count_cores

CONTENDERS = (
    "tnt_jax", "tnt_jax, sockets", "PyTorch DDP", "PyTorch DDP, torch.compile",
    "TensorFlow MultiWorkerMirrored", "Keras 3 DataParallel",
)  # fmt: skip
# Who can drive several virtual devices in one process.
ON_VIRTUAL_DEVICES = ("tnt_jax", "Keras 3 DataParallel")
KINDS = FREE, BOUND, VIRTUAL = ("processes", "processes, a core each", "virtual devices")
# What a contender needs beside tnt_jax.
NEEDS = {
    "PyTorch DDP": ("torch",),
    "PyTorch DDP, torch.compile": ("torch",),
    "TensorFlow MultiWorkerMirrored": ("tensorflow", "keras"),
    "Keras 3 DataParallel": ("keras",),
}


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add(
        "--models",
        nargs="+",
        choices=SIZES,
        default=["mlp", "resnet20", "transformer_tiny", "digits"],
        help="(default: all but resnet50)",
    )
    add(
        "--data",
        nargs="+",
        choices=("synthetic", "real"),
        default=["synthetic", "real"] if "TNT_JAX_DATA" in os.environ else ["synthetic"],
        help="real data needs TNT_JAX_DATA (default: both, if it is set)",
    )
    add(
        "--ranks",
        nargs="+",
        type=int,
        default=[1, 2],
        help="numbers of ranks; the first is compared with (default: 1 2)",
    )
    add("--kinds", nargs="+", choices=KINDS, default=KINDS, help="what a rank is (default: all)")
    add("--contenders", nargs="+", choices=CONTENDERS, default=CONTENDERS, help="(default: all)")
    add("--rounds", type=int, default=7, help="measured rounds (default: 7)")
    add(
        "--prefix",
        default="",
        help="command that starts a process elsewhere; {number} is its number from 1, {index} from "
        "0",
    )
    add(
        "--address", default="127.0.0.1", help="address of a process; {number} is its number from 1"
    )
    add("--port", type=int, default=24450, help="first of the ports to use (default: 24450)")
    add("--timeout", type=int, default=300, help="seconds that a contender may take (default: 300)")
    add("--output", help="JSON file for the results")
    add("--picture", help="PNG file for the efficiencies")
    add_platform(parser)
    args = parser.parse_args()
    if "real" in args.data and "TNT_JAX_DATA" not in os.environ:
        parser.error(
            "real data needs TNT_JAX_DATA, the folder of fashion_mnist and tatoeba_ende; or "
            "choose --data synthetic"
        )
    return args


def installed(contenders: Sequence[str]) -> list[str]:
    """Returns the contenders whose libraries are here, and prints a line for each other."""
    here = []
    for name in contenders:
        lacking = [x for x in NEEDS.get(name, ()) if importlib.util.find_spec(x) is None]
        if lacking:
            print(f"{name} is left out: {' and '.join(lacking)} must be installed.")
        else:
            here.append(name)
    return here


def plan(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Returns what to run: each global batch that weak or strong scaling needs, once."""
    tasks = []
    # The runs that are compared with each other follow each other.
    for model, data, name in itertools.product(args.models, args.data, args.contenders):
        rows = SIZES[model].rows
        for num in args.ranks:
            batches = sorted({num * rows, max(args.ranks) * rows})
            for kind, batch in itertools.product(kinds_of(args, name, num), batches):
                processes = num if kind != VIRTUAL else 1
                tasks.append(
                    {
                        "model": model,
                        "data": data,
                        "ranks": num,
                        "batch": batch,
                        "kind": kind,
                        "contender": name,
                        "processes": processes,
                        "rounds": args.rounds,
                    }
                )
    return tasks


def kinds_of(args: argparse.Namespace, contender: str, num_ranks: int) -> list[str]:
    """Returns what ranks a contender runs on."""
    if num_ranks == 1:
        return [FREE]  # One rank is the same in all kinds.
    return [
        kind
        for kind in args.kinds
        if (kind != VIRTUAL or contender in ON_VIRTUAL_DEVICES)
        and (kind != BOUND or on_cpus(args.platform))
    ]


def run_task(args: argparse.Namespace, task: dict[str, Any], port: int) -> dict[str, Any]:
    """Returns the seconds of a step in each round and of the first steps, or the reason why there
    are none.
    """
    addresses = [
        f"{args.address.format(number=n + 1)}:{port + n}" for n in range(task["processes"])
    ]
    description = json.dumps({**task, "addresses": addresses})
    worker = [sys.executable, str(Path(__file__).with_name("scaling_worker.py")), description]
    running = []
    for process in range(task["processes"]):
        prefix = shlex.split(args.prefix.format(number=process + 1, index=process))
        cores = cores_of(task, process, is_local=not prefix) if on_cpus(args.platform) else ""
        bound = ["taskset", "-c", cores] if cores else []
        command = [*prefix, *bound, *worker, str(process)]
        chosen = environment_of(args.platform, task, process, addresses, is_local=not prefix)
        running.append(
            subprocess.Popen(
                command,
                env={**os.environ, **chosen},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    deadline, outputs = time.monotonic() + args.timeout, []
    try:
        outputs = [
            process.communicate(timeout=max(1, deadline - time.monotonic())) for process in running
        ]
    except subprocess.TimeoutExpired:
        return {"reason": f"no result within {args.timeout} s"}
    finally:
        for process in running:
            process.kill()
    found = [line for line in outputs[0][0].splitlines() if line.startswith("RESULT ")]
    if found:
        return json.loads(found[0].removeprefix("RESULT "))
    messages = [line for _, errors in outputs for line in errors.splitlines() if "Error" in line]
    return {"reason": messages[-1][:300] if messages else f"exit code {running[0].returncode}"}


def cores_of(task: dict[str, Any], process: int, *, is_local: bool) -> str:
    """Returns the cores to which a process is bound; "" for all."""
    if not is_free(task):
        is_virtual = task["kind"] == VIRTUAL
        return f"0-{task['ranks'] - 1}" if is_virtual else str(process % (os.cpu_count() or 1))
    # The launcher of tnt_jax divides the cores of a host if they can be shared evenly.
    share, rest = divmod(count_cores(), task["processes"])
    if not task["contender"].startswith("tnt_jax") or rest or not is_local:
        return ""
    return f"{process * share}-{(process + 1) * share - 1}"


def is_free(task: dict[str, Any]) -> bool:
    """Returns whether processes on CPUs are as users start them; one rank gets one core."""
    return task["kind"] == FREE and task["ranks"] > 1


def environment_of(
    platform: str | None,
    task: dict[str, Any],
    process: int,
    addresses: list[str],
    *,
    is_local: bool = True,
) -> dict[str, str]:
    """Returns the variables of a process.

    Args:
        platform: Value of `--platform`.
        task: What it runs.
        process: Its number.
        addresses: Addresses of all processes.
        is_local: Whether all processes run on this host, and share its GPUs.
    """
    num_devices = task["ranks"] // task["processes"]
    chosen = {
        "TF_CPP_MIN_LOG_LEVEL": "2",
        "KERAS_BACKEND": "tensorflow" if task["contender"].startswith("TensorFlow") else "jax",
    }
    if on_cpus(platform):
        chosen |= {
            "JAX_PLATFORMS": "cpu",
            "JAX_NUM_CPU_DEVICES": str(num_devices),
            # Huge pages, as the launcher asks for.
            "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
            "CUDA_VISIBLE_DEVICES": "-1",
            **threads_of(task, num_devices, task["processes"] if is_local else 1),
        }
    else:
        first = process * num_devices if is_local else 0
        own = ",".join(str(first + n) for n in range(num_devices))
        chosen |= {"CUDA_VISIBLE_DEVICES": own} | ({"JAX_PLATFORMS": platform} if platform else {})
    if task["contender"] == "tnt_jax, sockets":
        chosen["TNT_SHARED_MEMORY"] = "0"
    if task["contender"].startswith("tnt_jax") and task["processes"] > 1:
        chosen |= {
            "TNT_COORDINATOR_ADDRESS": addresses[0],
            "TNT_NUM_PROCESSES": str(task["processes"]),
            "TNT_PROCESS_ID": str(process),
        }
    if task["contender"].startswith("TensorFlow"):
        cluster = {"cluster": {"worker": addresses}, "task": {"type": "worker", "index": process}}
        chosen["TF_CONFIG"] = json.dumps(cluster)
    return chosen


def threads_of(task: dict[str, Any], num_devices: int, num_here: int) -> dict[str, str]:
    """Returns the variables that limit the threads of a process on CPUs.

    Args:
        task: What it runs.
        num_devices: Number of its devices.
        num_here: Number of processes on its host.
    """
    num_threads = num_devices
    if is_free(task) and task["contender"].startswith("tnt_jax"):
        num_threads = max(1, count_cores() // num_here)  # As the launcher sets it.
    elif is_free(task) and not task["contender"].startswith("PyTorch"):
        return {}
    return {
        "PJRT_NPROC": str(max(num_threads, 2 * num_devices if num_devices > 1 else 1)),
        "OMP_NUM_THREADS": str(num_threads),
    }


def efficiencies(args: argparse.Namespace, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns for each contender and number of ranks above the first: its times and
    efficiencies.
    """

    def fastest_s(like: dict[str, Any], *, ranks: int, batch: int) -> float | None:
        kind = FREE if ranks == 1 else like["kind"]
        wanted = {
            **{key: like[key] for key in ("model", "data", "contender")},
            "kind": kind,
            "ranks": ranks,
            "batch": batch,
        }
        found = [row for row in rows if wanted.items() <= row.items() and "seconds" in row]
        return min(found[0]["seconds"]) if found else None

    lines, first, most = [], args.ranks[0], max(args.ranks)
    for row in rows:
        own, ranks = SIZES[row["model"]].rows, row["ranks"]
        if ranks == first or row["batch"] != ranks * own:
            continue
        weak = [fastest_s(row, ranks=n, batch=n * own) for n in (first, ranks)]
        strong = [fastest_s(row, ranks=n, batch=most * own) for n in (first, ranks)]
        line = {key: row[key] for key in ("model", "data", "contender", "kind", "ranks")} | {
            "reason": row.get("reason")
        }
        line |= {"fewest": first, "weak_s": weak, "strong_s": strong}
        line["weak"] = weak[0] / weak[1] if weak[0] and weak[1] else None
        line["strong"] = (
            strong[0] * first / (ranks * strong[1]) if strong[0] and strong[1] else None
        )
        lines.append(line)
    return lines


def table(lines: list[dict[str, Any]]) -> str:
    """Returns efficiencies as a Markdown table."""
    text = [
        "| model | data | contender | ranks | ms, 1 rank | ms, all, weak | weak | ms, 1 rank, "
        "whole batch | ms, all, strong | strong |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]

    def ms(value: float | None) -> str:
        return "-" if value is None else f"{value * 1e3:.1f}"

    for line in lines:
        start = (
            f"| {line['model']} | {line['data']} | {line['contender']} | {line['ranks']} "
            f"{line['kind']} |"
        )
        if line["reason"]:
            text.append(f"{start} did not run: {line['reason'].replace('|', '/')} | | | | | |")
            continue
        shares = ["-" if line[name] is None else f"{line[name]:.2f}" for name in ("weak", "strong")]
        (one, all_), (whole, strong) = line["weak_s"], line["strong_s"]
        text.append(
            f"{start} {ms(one)} | {ms(all_)} | {shares[0]} | {ms(whole)} | {ms(strong)} | "
            f"{shares[1]} |"
        )
    return "\n".join(text)


def draw(lines: list[dict[str, Any]], path: str) -> None:
    """Draws the rows a second of the fewest and the most ranks, with as many rows each, and their
    efficiency, for each model and kind of data.
    """
    from matplotlib import pyplot as plt

    most, fewest = max(line["ranks"] for line in lines), lines[0]["fewest"]
    names = (f"{fewest} rank{'s' * (fewest > 1)}", f"{most} ranks")
    groups = sorted({(line["model"], line["data"]) for line in lines})
    most_bars = max(
        sum((line["model"], line["data"], line["ranks"]) == (*group, most) for line in lines)
        for group in groups
    )
    size = (2 + 2.8 * len(groups), 1.4 + 0.28 * most_bars)
    figure, axes = plt.subplots(1, len(groups), figsize=size, sharey=True, squeeze=False)
    for axis, group in zip(axes[0], groups, strict=True):
        chosen = [
            line
            for line in lines
            if (line["model"], line["data"]) == group and line["ranks"] == most
        ]
        for number, label in enumerate(names):
            bars = axis.barh(
                [i + 0.4 * number - 0.2 for i in range(len(chosen))],
                [rows_per_s(line)[number] for line in chosen],
                0.38,
                label=label,
            )
        shown = ["" if line["weak"] is None else f"{line['weak']:.2f}" for line in chosen]
        axis.bar_label(bars, shown, padding=2, fontsize=7)
        axis.margins(x=0.12)
        labels = [f"{line['contender']}\n{line['kind']}" for line in chosen]
        axis.set_yticks(range(len(chosen)), labels, fontsize=7)
        axis.set_title(f"{group[0]}\n{group[1]} data", fontsize=9)
        axis.set_xlabel("rows a second", fontsize=8)
        axis.tick_params(axis="x", labelsize=7)
    axes[0, 0].invert_yaxis()
    figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="lower left", fontsize=7)
    figure.suptitle("Speed of training, and efficiency beside the bars", fontsize=10)
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def rows_per_s(line: dict[str, Any]) -> list[float]:
    """Returns the rows a second of the fewest and of the most ranks; 0 where there is no time."""
    fewest_s, most_s = line["weak_s"]
    rows = SIZES[line["model"]].rows
    found = [
        fewest_s and rows * line["fewest"] / fewest_s,
        most_s and rows * line["ranks"] / most_s,
    ]
    return [x or 0.0 for x in found]


def main() -> None:
    args = parse_arguments()
    args.contenders = installed(args.contenders)
    rows, tasks, about = [], plan(args), environment()
    for number, task in enumerate(tasks):
        load = os.getloadavg()[0]
        result = run_task(args, task, args.port + 10 * number)
        rows.append({**task, **result, "load": load})
        told = (
            "{:.1f} to {:.1f} ms".format(*[f(result["seconds"]) * 1e3 for f in (min, max)])
            if "seconds" in result
            else result["reason"]
        )
        description = " ".join(
            str(task[key]) for key in ("model", "data", "contender", "ranks", "kind")
        )
        print(
            f"{number + 1}/{len(tasks)} {description}, batch {task['batch']}: {told}",
            file=sys.stderr,
            flush=True,
        )
    lines = efficiencies(args, rows)
    print(table(lines))
    if args.output:
        Path(args.output).write_text(
            json.dumps(
                {"arguments": vars(args), **about, "efficiencies": lines, "rows": rows}, indent=1
            )
            + "\n"
        )
    if args.picture:
        draw(lines, args.picture)


if __name__ == "__main__":
    main()
