"""`tnt-jax scale` on the example scripts, beside what the same scripts need when they train.

The scripts are started as they are: by `tnt-jax scale`, which replaces their first `fit` by timed
steps, and by `tnt-jax`, where they train and print the examples a second of each epoch. What the
tool says before should be what training shows then. Both are run in turns, on one rank and on two.

    TNT_JAX_DATA=... python benchmarks/scale_examples.py --output results.json

Options for several hosts are those of `scale_agreement.py`.
"""

import argparse
import json
import os
import re
import shlex
import statistics
import sys
import tempfile
from pathlib import Path

from machine import environment
from scale_agreement import HERE, VARIABLES, run, spread

EXAMPLES = HERE.parent / "examples"
SCRIPTS = {
    "digits": "digits.py --epochs 20",
    "CIFAR ResNet": "cifar10/train.py {examples}/cifar10/configs/fashion_resnet20.yaml "
    "data.data_dir={data}/fashion_mnist data.n_train=2560 data.n_valid=128 training.n_epochs=4",
    "Transformer": "transformer.py --data_dir {data}/tatoeba_ende --model_dir {folder} "
    "--param_set tiny --width 128 --filter_dim 512 --num_layers 3 --vocab_size 4000 "
    "--max_length 32 --batch_size 1024 --num_sentences 4000 --train_epochs 4 --max_words 2 "
    "--no-enable_checkpointing",
}
RATE = re.compile(r"^Epoch \d+/\d+ - .* - ([\d,]+) examples/s", re.MULTILINE)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("--scripts", nargs="+", choices=SCRIPTS, default=list(SCRIPTS), help="(default: all)")
    add("--turns", type=int, default=3, help="runs of each script (default: 3)")
    add("--steps", type=int, default=20, help="timed steps of the tool (default: 20)")
    add("--launch-prefix", default="", help="command that runs tnt-jax on the first host")
    add("--hostfile", help="hosts of tnt-jax (default: processes on this host)")
    add("--ssh-args", default="", help="as of tnt-jax")
    add("--output", help="JSON file for the results")
    return parser.parse_args()


def launcher(args: argparse.Namespace) -> list[str]:
    return [*shlex.split(args.launch_prefix), str(Path(sys.executable).with_name("tnt-jax"))]


def options(args: argparse.Namespace, *, hosts: bool) -> list[str]:
    """Returns the options of both: a core for each process, on CPUs."""
    interpreter = shlex.join([str(HERE / "own_core.sh"), sys.executable])
    found = ["--no-gpu", "-x", *VARIABLES, "--python-interpreter", interpreter]
    if hosts and args.hostfile:
        found += ["--hostfile", args.hostfile]
        found += [f"--ssh-args={args.ssh_args}"] if args.ssh_args else []
    return found


def words(name: str, folder: str) -> list[str]:
    """Returns a script with its arguments."""
    data = os.environ["TNT_JAX_DATA"]
    script, *rest = SCRIPTS[name].format(examples=EXAMPLES, data=data, folder=folder).split()
    return [str(EXAMPLES / script), *rest]


def by_training(args: argparse.Namespace, name: str, ranks: int, folder: str) -> list[float]:
    """Returns the examples a second of each epoch but the first, which compiles."""
    places = ["-n", str(ranks)] if ranks == 1 or not args.hostfile else ["--devices-per-node", "1"]
    command = [*launcher(args), *options(args, hosts=ranks > 1), *places, "--"]
    out = run([*command, *words(name, folder)])
    rates = [float(rate.replace(",", "")) for rate in RATE.findall(out)]
    if len(rates) < 2:
        sys.exit(f"{name} has not told its examples/s:\n{out}")
    return rates[1:]


def by_scale(args: argparse.Namespace, name: str, folder: str) -> dict[int, float]:
    """Returns examples a second by number of ranks, as the tool measures them."""
    with tempfile.TemporaryDirectory() as results:
        output = Path(results) / "scale"
        run(
            [
                *launcher(args), "scale", *options(args, hosts=True), "--ranks", "1", "2",
                "--rounds", "1", "--steps", str(args.steps), "--output", str(output),
                "--", *words(name, folder),
            ]
        )  # fmt: skip
        runs = json.loads((output / "scaling.json").read_text())["runs"]
    return {each["ranks"]: each["rows"] / each["seconds"] for each in runs}


def main() -> None:
    args = parse_arguments()
    about, rows = environment(), []
    with tempfile.TemporaryDirectory() as folder:
        for turn in range(args.turns):
            for name in args.scripts:
                scaled = by_scale(args, name, folder)
                for ranks in (1, 2):
                    trained = by_training(args, name, ranks, folder)
                    row = {"script": name, "turn": turn, "ranks": ranks}
                    rows.append({**row, "scale": scaled[ranks], "training": trained})
                    print(rows[-1], file=sys.stderr, flush=True)
    print(table(rows))
    if args.output:
        given = {"turns": args.turns, "steps": args.steps, "scripts": SCRIPTS}
        results = {"arguments": given, **about, "rows": rows}
        Path(args.output).write_text(json.dumps(results, indent=1) + "\n")


def table(rows: list[dict]) -> str:
    """Returns a Markdown table of examples a second, median and range of all turns."""
    heads = ("script", "ranks", "`tnt-jax scale`", "training", "ratio of medians")
    lines = [f"| {' | '.join(heads)} |", "| --- " * len(heads) + "|"]
    for name, ranks in dict.fromkeys((row["script"], row["ranks"]) for row in rows):
        some = [row for row in rows if (row["script"], row["ranks"]) == (name, ranks)]
        scaled = spread([row["scale"] for row in some])
        # The median of a run stands for its epochs.
        trained = spread([statistics.median(row["training"]) for row in some])
        cells = ["{:,.0f} ({:,.0f} to {:,.0f})".format(*each) for each in (scaled, trained)]
        lines.append(f"| {name} | {ranks} | {' | '.join(cells)} | {scaled[0] / trained[0]:.2f} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
