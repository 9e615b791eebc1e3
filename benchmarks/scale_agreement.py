"""`tnt-jax scale` beside `benchmarks/scaling.py`: the same networks on the same hosts and cores.

Both are run in turns. Each measures in its own way: `scaling.py` times whole calls of `fit` in
processes that it starts itself; `tnt-jax scale` starts a script whose `fit` it replaces by timed
steps. A step of one rank and of two, and the efficiency, should be the same within their spread.

On two hosts, processes are placed by a command prefix, and the launcher runs on the first:

    python benchmarks/scale_agreement.py --prefix "ip netns exec node{number}"
    --address 10.77.0.{number} --launch-prefix "ip netns exec node1" --hostfile hosts
    --output benchmarks/results/scale_agreement.json
"""

import argparse
import json
import shlex
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from machine import environment
from scaling import BOUND, SIZES

HERE = Path(__file__).parent
TOOLS = ("scaling.py", "tnt-jax scale")
# One core each, as scaling.py gives its processes on CPUs.
VARIABLES = ("PJRT_NPROC=1", "OMP_NUM_THREADS=1", "TF_CPP_MIN_LOG_LEVEL=2")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("--models", nargs="+", choices=SIZES, default=["mlp", "resnet20", "transformer_tiny"])
    add("--turns", type=int, default=3, help="runs of each tool (default: 3)")
    add("--rounds", type=int, default=3, help="rounds of a run (default: 3)")
    add("--prefix", default="", help="as of scaling.py")
    add("--address", default="127.0.0.1", help="as of scaling.py")
    add("--launch-prefix", default="", help="command that runs tnt-jax on the first host")
    add("--hostfile", help="hosts of tnt-jax (default: processes on this host)")
    add("--ssh-args", default="", help="as of tnt-jax")
    add("--output", help="JSON file for the results")
    return parser.parse_args()


def by_scaling(args: argparse.Namespace, model: str, folder: Path) -> dict[int, list[float]]:
    """Returns the seconds of a step in each round, by number of ranks, from `scaling.py`."""
    output = folder / "scaling.json"
    run(
        [
            sys.executable, str(HERE / "scaling.py"), "--platform", "cpu", "--models", model,
            "--data", "synthetic", "--kinds", BOUND, "--contenders", "tnt_jax",
            "--rounds", str(args.rounds), "--prefix", args.prefix, "--address", args.address,
            "--output", str(output),
        ]
    )  # fmt: skip
    rows = json.loads(output.read_text())["rows"]
    weak = [row for row in rows if row["batch"] == row["ranks"] * SIZES[model].rows]
    return {row["ranks"]: row["seconds"] for row in weak}


def by_scale(args: argparse.Namespace, model: str, folder: Path) -> dict[int, list[float]]:
    """Returns the same from `tnt-jax scale`."""
    output = folder / "scale"
    hosts = ["--hostfile", args.hostfile] if args.hostfile else []
    hosts += [f"--ssh-args={args.ssh_args}"] if args.ssh_args else []
    interpreter = shlex.join([str(HERE / "own_core.sh"), sys.executable])
    run(
        [
            *shlex.split(args.launch_prefix), str(Path(sys.executable).with_name("tnt-jax")),
            "scale", *hosts, "--no-gpu", "--ranks", "1", "2", "--weak",
            "--rounds", str(args.rounds), "--output", str(output), "-x", *VARIABLES,
            "--python-interpreter", interpreter,
            "--", str(HERE / "scaling_script.py"), model,
        ]
    )  # fmt: skip
    runs = json.loads((output / "scaling.json").read_text())["runs"]
    found: dict[int, list[float]] = {}
    for each in runs:
        found.setdefault(each["ranks"], []).append(each["seconds"] / each["steps"])
    return found


def run(command: list[str]) -> str:
    """Returns what a command prints, or ends this program if it fails."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{shlex.join(command)} failed:\n{done.stdout}{done.stderr}")
    return done.stdout


def spread(values: list[float]) -> tuple[float, float, float]:
    return statistics.median(values), min(values), max(values)


def main() -> None:
    args = parse_arguments()
    about, rows = environment(), []
    measured: dict[tuple[str, str], dict[int, list[list[float]]]] = {}
    for turn in range(args.turns):
        for model in args.models:
            for tool, measure in zip(TOOLS, (by_scaling, by_scale), strict=True):
                with tempfile.TemporaryDirectory() as folder:
                    seconds = measure(args, model, Path(folder))
                for ranks, values in seconds.items():
                    measured.setdefault((model, tool), {}).setdefault(ranks, []).append(values)
                    row: dict[str, Any] = {"model": model, "tool": tool, "turn": turn}
                    rows.append({**row, "ranks": ranks, "seconds": values})
                    text = " ".join(f"{x * 1e3:.1f}" for x in values)
                    print(f"{turn} {model} {tool} {ranks}: {text} ms", file=sys.stderr, flush=True)
    print(table(measured))
    if args.output:
        given = {name: getattr(args, name) for name in ("models", "turns", "rounds", "prefix")}
        results = {"arguments": given, **about, "rows": rows}
        Path(args.output).write_text(json.dumps(results, indent=1) + "\n")


def table(measured: dict[tuple[str, str], dict[int, list[list[float]]]]) -> str:
    """Returns a Markdown table of medians and ranges of all rounds, and efficiencies of turns."""
    lines = ["| model | tool | ms, 1 rank | ms, 2 ranks | efficiency |", "| --- " * 5 + "|"]
    for (model, tool), turns in sorted(measured.items()):
        steps = [spread([x * 1e3 for turn in turns[ranks] for x in turn]) for ranks in (1, 2)]
        efficiency = spread(
            [
                statistics.median(one) / statistics.median(two)
                for one, two in zip(turns[1], turns[2], strict=True)
            ]
        )
        cells = ["{:.1f} ({:.1f} to {:.1f})".format(*step) for step in steps]
        cells.append("{:.2f} ({:.2f} to {:.2f})".format(*efficiency))
        lines.append(f"| {model} | {tool} | {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
