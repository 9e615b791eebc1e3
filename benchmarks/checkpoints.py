"""What checkpoints cost: memory, threads and open files over many saves, and time beside training.

Each contender saves the training state of ResNet-20 in a process of its own: `Checkpoints`, and
Orbax's `CheckpointManager` alone. Then ResNet-20 trains in epochs that are followed by one save or
by none, in turns.

    python benchmarks/checkpoints.py --saves 1000 --epochs 10 --steps 200 \
        --output benchmarks/results/checkpoints.json
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import tracemalloc
from dataclasses import replace

from machine import add_platform, choose_devices

CONTENDERS = ("ours", "orbax")


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--saves", type=int, default=1000, help="saves of each (default: 1000)")
    parser.add_argument("--epochs", type=int, default=10, help="epochs of each kind (default: 10)")
    parser.add_argument("--steps", type=int, default=200, help="steps of an epoch (default: 200)")
    parser.add_argument("--batch-size", type=int, default=32, help="batch (default: 32)")
    parser.add_argument("--directory", help="where to save (default: a temporary directory)")
    add_platform(parser)
    parser.add_argument("--output", help="JSON file for the results")
    parser.add_argument("--trace", action="store_true", help="print where memory was allocated")
    parser.add_argument("--contender", choices=CONTENDERS, help=argparse.SUPPRESS)
    return parser.parse_args()


ARGS = parse_arguments() if __name__ == "__main__" else None
if ARGS is not None:
    choose_devices(ARGS.platform)

import jax
import jax.numpy as jnp
import numpy as np
import optax

import tnt_jax as tnt
from tnt_jax.train.checkpoints.checkpoint import Checkpoints
from tnt_jax.train.state import create_state


def resnet_state():
    """Returns the training state of ResNet-20 with momentum."""
    module = tnt.models.resnet20()
    shapes = jax.eval_shape(
        lambda: module.init(jax.random.key(0), jnp.zeros((1, 32, 32, 3)), train=False)
    )
    variables = jax.tree.map(lambda x: np.ones(x.shape, x.dtype), shapes)
    return create_state(
        variables["params"],
        {"batch_stats": variables["batch_stats"]},
        optax.sgd(0.1, momentum=0.9),
        seed=0,
    )


def saver(contender, directory):
    """Returns a function that saves a state and waits, given the number of the save."""
    if contender == "ours":
        checkpoints = Checkpoints(directory, max_to_keep=2)

        def save(state, number):
            checkpoints.save(replace(state, step=jnp.int32(number)))
            checkpoints.wait()

        return save
    import orbax.checkpoint as ocp

    manager = ocp.CheckpointManager(directory, options=ocp.CheckpointManagerOptions(max_to_keep=2))

    def save_with_orbax(state, number):
        manager.save(number, args=ocp.args.PyTreeSave(jax.tree.leaves(state)), force=True)
        manager.wait_until_finished()

    return save_with_orbax


def usage():
    """Returns resident memory in MB, threads, and open files of this process."""
    with open("/proc/self/statm") as file:
        pages = int(file.read().split()[1])
    return [
        pages * os.sysconf("SC_PAGE_SIZE") / 1e6,
        threading.active_count(),
        len(os.listdir("/proc/self/fd")),
    ]


def measure_leak(contender, num_saves, directory, *, trace):
    """Prints the usage over many saves, as JSON."""
    state, save = resnet_state(), saver(contender, directory)
    rows, seconds = [], []
    every = max(1, num_saves // 40)
    for number in range(num_saves):
        if trace and number == num_saves // 4:
            tracemalloc.start(8)
            first = tracemalloc.take_snapshot()
        start = time.perf_counter()
        save(state, number)
        seconds.append(time.perf_counter() - start)
        if number % every == 0 or number == num_saves - 1:
            rows.append([number, *usage()])
    if trace:
        for line in tracemalloc.take_snapshot().compare_to(first, "lineno")[:15]:
            print(line, file=sys.stderr)
    print(json.dumps({"usage": rows, "median_s": statistics.median(seconds)}))


def growth_per_save(rows):
    """Returns the slope of resident memory in MB per save, after the first quarter."""
    numbers, memory = np.array([row[:2] for row in rows[len(rows) // 4 :]]).T
    return float(np.polyfit(numbers, memory, 1)[0])


def measure_cost(num_epochs, num_steps, batch_size, directory):
    """Returns the seconds of epochs with and without a save at their end, in turns."""
    model = tnt.Model(tnt.models.resnet20())
    model.compile("sgd", loss=tnt.losses.SparseCategoricalCrossentropy(from_logits=True))
    rng = np.random.default_rng(0)
    x = rng.normal(size=(num_steps * batch_size, 32, 32, 3)).astype(np.float32)
    y = rng.integers(10, size=len(x))
    checkpoints = Checkpoints(directory, max_to_keep=2)
    seconds = {"none": [], "save": []}
    model.fit(x, y, batch_size=batch_size, verbose=0)
    checkpoints.save(model.state)
    checkpoints.wait()
    blocked = []
    for epoch in range(num_epochs):
        for kind in ("none", "save") if epoch % 2 else ("save", "none"):
            start = time.perf_counter()
            if kind == "save":
                # The state before the epoch: the whole epoch then trains beside the writing.
                checkpoints.save(model.state)
                blocked.append(time.perf_counter() - start)
            model.fit(x, y, batch_size=batch_size, verbose=0)
            seconds[kind].append(time.perf_counter() - start)
            checkpoints.wait()
    checkpoints.close()
    return {"seconds": seconds, "blocked_s": blocked}


def main():
    if ARGS.contender:
        measure_leak(ARGS.contender, ARGS.saves, ARGS.directory, trace=ARGS.trace)
        return
    results = {"arguments": vars(ARGS), "machine": platform.platform(), "jax": jax.__version__}
    with tempfile.TemporaryDirectory(dir=ARGS.directory) as folder:
        for contender in CONTENDERS if ARGS.saves else ():
            trace = ["--trace"] if ARGS.trace else []
            done = subprocess.run(
                [sys.executable, __file__, "--contender", contender, "--saves", str(ARGS.saves),
                 "--directory", f"{folder}/{contender}", *trace],
                stdout=subprocess.PIPE, text=True, check=True,
            )  # fmt: skip
            found = json.loads(done.stdout.splitlines()[-1])
            results[contender] = found | {"mb_per_save": growth_per_save(found["usage"])}
            first, last = found["usage"][len(found["usage"]) // 4], found["usage"][-1]
            print(
                f"{contender}: {results[contender]['mb_per_save']:.4f} MB a save, "
                f"{found['median_s'] * 1e3:.1f} ms a save; save {first[0]} to {last[0]}: memory "
                f"{first[1]:.0f} to {last[1]:.0f} MB, threads {first[2]} to {last[2]}, open files "
                f"{first[3]} to {last[3]}",
                flush=True,
            )
        if ARGS.epochs:
            cost = measure_cost(ARGS.epochs, ARGS.steps, ARGS.batch_size, f"{folder}/cost")
            waits = statistics.median(cost["blocked_s"])
            none, save = (statistics.median(cost["seconds"][kind]) for kind in ("none", "save"))
            results["cost"] = cost | {"share": save / none - 1}
            print(
                f"epoch of {ARGS.steps} steps: {none:.3f} s, with a save {save:.3f} s "
                f"({save / none - 1:+.2%}); training waits {waits:.4f} s for "
                "the copy"
            )
    if ARGS.output:
        with open(ARGS.output, "w") as file:
            json.dump(results, file, indent=1)


if __name__ == "__main__":
    main()
