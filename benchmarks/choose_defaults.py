"""Measures the defaults for GPUs that were only modelled, and says what to write into
`tnt_jax/distributed/sums/reduction.py`.

`tnt-jax tune` times the training steps of ResNet-50 and of the Transformers, with each size of a
bucket, on all devices of the machine; in an allocation of SLURM or with `--hostfile` on all of
them.

    python -m benchmarks --choose-defaults --output defaults.json
"""

import argparse
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from machine import add_platform, environment, on_cpus

from tnt_jax.distributed.sums import reduction

MODELS = ("resnet50", "transformer_base", "transformer_big")
# A line of tune's table for a size of buckets: the option, and the median in ms.
_WAY = re.compile(r"^(what it uses|--fusion-threshold \w+)\s+([\d.]+) ", re.MULTILINE)


def parse_arguments(words: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("--models", nargs="+", choices=MODELS, default=MODELS, help="(default: all)")
    add("--ranks", "-n", type=int, help="devices (default: all of the machine)")
    add("--hostfile", help="hosts to run on, as of tnt-jax")
    add("--steps", type=int, default=20, help="steps of a round (default: 20)")
    add("--batch-size", type=int, help="rows of a device (default: 256 images, 64 sentences)")
    add("--image-size", type=int, default=224, help="(default: 224)")
    add("--output", help="JSON file for the results")
    add("--worker", choices=MODELS, help=argparse.SUPPRESS)
    add_platform(parser)
    return parser.parse_args(words)


def train(args: argparse.Namespace) -> None:
    """Fits a model; in a process of `tnt-jax tune` the trials take the place of training."""
    import jax.numpy as jnp
    import numpy as np
    import optax

    import tnt_jax as tnt

    num_ranks = tnt.get_size()
    size = (args.batch_size or (256 if args.worker == "resnet50" else 64)) * num_ranks
    rng = np.random.default_rng(0)
    if args.worker == "resnet50":
        model = tnt.Model(tnt.models.resnet50(num_classes=1000, dtype=jnp.bfloat16))
        x = rng.standard_normal((size, args.image_size, args.image_size, 3), np.float32)
        y: Any = rng.integers(0, 1000, size).astype(np.int32)
        optimizer = optax.sgd(0.1, momentum=0.9)
    else:
        chosen = tnt.models.PARAM_SETS[args.worker.removeprefix("transformer_")]
        model = tnt.Model(tnt.models.Transformer(**chosen, dtype=jnp.bfloat16))
        y = rng.integers(1, 33708, (size, 64)).astype(np.int32)
        x, optimizer = (y, y), optax.adam(1e-4)
    loss = tnt.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss=loss)
    model.fit(x, y, batch_size=size, verbose=0)


def tuned(args: argparse.Namespace, model: str) -> dict[str, float]:
    """Returns the median milliseconds of each way, as `tnt-jax tune` prints them."""
    where = ["--hostfile", args.hostfile] if args.hostfile else []
    where += ["-n", str(args.ranks)] if args.ranks else []
    where += ["--no-gpu"] if args.platform == "cpu" else []
    options = [f"--image-size={args.image_size}", f"--worker={model}"]
    options += [f"--batch-size={args.batch_size}"] if args.batch_size else []
    command = [
        sys.executable, "-m", "tnt_jax.launch", "tune", *where, f"--steps={args.steps}", "--",
        __file__, *options,
    ]  # fmt: skip
    print(f"{model}:", flush=True)
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    print(done.stdout)
    if done.returncode:
        sys.exit(f"{' '.join(command)} ended with exit code {done.returncode}.")
    return times_of(done.stdout)


def times_of(text: str) -> dict[str, float]:
    """Returns the median milliseconds of each size of buckets in a table of `tnt-jax tune`."""
    return {way: float(ms) for way, ms in _WAY.findall(text)}


def best_threshold(times: dict[str, dict[str, float]]) -> tuple[str, float]:
    """Returns the option with the least mean time, relative to what each model uses, and that."""
    ways = set.intersection(*(set(found) for found in times.values()))
    mean = {
        way: sum(found[way] / found["what it uses"] for found in times.values()) / len(times)
        for way in ways
    }
    return min(mean.items(), key=lambda item: (item[1], item[0] != "what it uses"))


def main(words: list[str] | None = None) -> None:
    args = parse_arguments(words)
    if args.worker:
        train(args)
        return
    if on_cpus(args.platform) and args.platform != "cpu":
        sys.exit(
            "There is no GPU to choose defaults for. `--platform cpu` tries the script on CPUs, "
            "whose numbers say nothing about GPUs."
        )
    times = {model: tuned(args, model) for model in args.models}
    way, share = best_threshold(times)
    print(f"Best for all: {way}, {share:.3f} of the time of what they use.")
    print(
        f"Now: HOST_BUCKET_BYTES {reduction.HOST_BUCKET_BYTES >> 20} MiB up to "
        f"{reduction.RANKS_OF_A_HOST} ranks, else CLUSTER_BUCKET_BYTES "
        f"{reduction.CLUSTER_BUCKET_BYTES >> 20} MiB, in tnt_jax/distributed/sums/reduction.py."
    )
    if args.output:
        found = {"arguments": vars(args), **environment(), "ms": times, "best": way}
        Path(args.output).write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
