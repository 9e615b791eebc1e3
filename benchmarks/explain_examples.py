"""What `tnt-jax explain` and `tnt-jax verify` say of the examples.

They are models of Flax and of Keras Hub, a vision transformer, a residual network, and custom
training loops.

    TNT_JAX_DATA=DATA python benchmarks/explain_examples.py \
        --output benchmarks/results/explain_examples.json

With `--hostfile FILE`, the job of several hosts is explained, too, with a process on each. What is
in the output file already is not run again.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from machine import environment

EXAMPLES = Path(__file__).parents[1] / "examples"
DATA = os.environ.get("TNT_JAX_DATA", "")
# Words of the command that starts each, in the folder of the examples.
SCRIPTS = {
    "digits": "digits.py",
    "Flax MNIST (NNX)": f"flax/mnist.py --data {DATA}",
    "Flax MNIST, custom loop": f"flax/mnist_loop.py --data {DATA}",
    "Flax VAE": f"flax/vae.py --data {DATA}",
    "Flax language model": f"flax/lm1b.py --data {DATA}",
    "Flax language model, custom loop": f"flax/lm1b_loop.py --data {DATA}",
    "vision transformer": "gallery/vision_transformer.py",
    "BERT of Keras Hub": "gallery/keras_hub_bert.py",
    "ResNet-20": (
        f"cifar10/train.py cifar10/configs/fashion_resnet20.yaml data.data_dir={DATA}/fashion_mnist"
    ),
    "GAN, custom loop": "gallery/gan.py",
}


def call(command: str, script: str, *options: str) -> subprocess.CompletedProcess[str]:
    """Runs a command of the launcher on a script."""
    words = [sys.executable, "-m", "tnt_jax.launch", command, "--no-gpu", *options, "--"]
    return subprocess.run(
        [*words, *script.split()], cwd=EXAMPLES, capture_output=True, text=True, check=False
    )


def explain(script: str, *options: str) -> dict[str, Any]:
    """Returns the sentence about a step, and what the findings advise."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder, "found")
        done = call("explain", script, *options, "--steps", "8", "--output", str(output))
        if not (output / "explain.json").exists():
            return {"failed": done.stderr[-2000:]}
        found = json.loads((output / "explain.json").read_text())
    return {"sentence": found["sentence"], "findings": [each["line"] for each in found["findings"]]}


def verify(script: str) -> dict[str, Any]:
    """Returns what was compared, and the exit code."""
    with tempfile.TemporaryDirectory() as folder:
        receipt = Path(folder, "receipt.json")
        done = call("verify", script, "--steps", "4", "--receipt", str(receipt))
    return {"code": done.returncode, "lines": done.stdout.splitlines()}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("--scripts", nargs="+", choices=SCRIPTS, default=list(SCRIPTS), metavar="NAME")
    add("--hostfile", help="hosts of a further job")
    add("--ssh-args", default="", help="as that of tnt-jax")
    add("--output", type=Path, help="JSON file for the results")
    args = parser.parse_args()
    jobs = {"1 process": ["-n", "1"], "4 processes": ["-n", "4"]}
    if args.hostfile:
        hosts = ["--hostfile", str(Path(args.hostfile).resolve()), "--ssh-args", args.ssh_args]
        jobs["hosts"] = hosts
    has_begun = args.output and args.output.exists()
    runs: dict[str, Any] = json.loads(args.output.read_text())["runs"] if has_begun else {}
    for name in args.scripts:
        if name in runs:
            continue
        runs[name] = {job: explain(SCRIPTS[name], *options) for job, options in jobs.items()}
        runs[name]["verify"] = verify(SCRIPTS[name])
        print(json.dumps({name: runs[name]}, indent=1), flush=True)
        if args.output:
            kept = json.dumps({"about": environment(), "runs": runs}, indent=1)
            args.output.write_text(kept + "\n")


if __name__ == "__main__":
    main()
