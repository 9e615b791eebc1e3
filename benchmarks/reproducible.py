"""What the same bits on any number of devices cost: reproducible steps beside the fast ones, on 1, 2, 4 and 8 virtual CPU devices.

    python benchmarks/reproducible.py --output benchmarks/results/reproducible.json

Each number of devices runs in a process of its own, with the same pool of threads. The two kinds of steps take turns; a time is that
of one step of a warm trainer on batches that are on the devices already. The batch is the same everywhere.
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

VIRTUAL_RANKS = 8
DEVICES = (1, 2, 4, 8)


def models():
    import numpy as np
    from flax import linen as nn

    from tnt_jax.models.cnn import CNN

    generator = np.random.default_rng(0)

    class Mlp(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(10)(nn.relu(nn.Dense(256)(x)))

    def data(rows, *shape):
        return generator.normal(size=(rows, *shape)).astype(np.float32), generator.integers(0, 10, rows)

    return {"mlp 784-256-10, batch 1024": (Mlp(), data(1024, 784)), "cnn 32x32x3, batch 64": (CNN(), data(64, 32, 32, 3))}


def make_step(module, data, *, reproducible):
    """Returns a function that runs a training step to its end."""
    import jax
    import optax

    import tnt_jax as tnt

    model = tnt.Model(module, reproducible=reproducible, virtual_ranks=VIRTUAL_RANKS, seed=0)
    model.compile(optimizer=optax.adam(1e-3), loss=tnt.losses.SparseCategoricalCrossentropy(from_logits=True))
    rows = len(data[1])
    model.fit(*data, batch_size=rows, epochs=3, verbose=0)

    def step():
        model.fit(*data, batch_size=rows, epochs=1, verbose=0, shuffle=False)
        jax.block_until_ready(model.state.params)

    return step


def measure(repeats):
    results = []
    for name, (module, data) in models().items():
        steps = {kind: make_step(module, data, reproducible=kind == "reproducible") for kind in ("fast", "reproducible")}
        times = {kind: [] for kind in steps}
        for _ in range(repeats):
            for kind, step in steps.items():
                start = time.perf_counter()
                step()
                times[kind].append((time.perf_counter() - start) * 1e3)
        row = {"model": name}
        for kind, values in times.items():
            low, median, high = statistics.quantiles(values, n=4)
            row |= {f"{kind}_ms": round(median, 3), f"{kind}_quartiles_ms": [round(low, 3), round(high, 3)]}
        results.append(row | {"ratio": round(row["reproducible_ms"] / row["fast_ms"], 2)})
    return results


def run_on(devices, repeats):
    flags = f"--xla_force_host_platform_device_count={devices}"
    env = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags, "PJRT_NPROC": str(2 * VIRTUAL_RANKS)}
    command = [sys.executable, __file__, "--inside", "--repeats", str(repeats)]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(done.stderr)
    return [{"devices": devices, **row} for row in json.loads(done.stdout.splitlines()[-1])]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=30, help="timed steps of each kind (default: %(default)s)")
    parser.add_argument("--output", type=Path, help="JSON file for the results")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.inside:
        print(json.dumps(measure(options.repeats)))
        return
    import jax

    load = os.getloadavg()[0]
    rows = [row for devices in DEVICES for row in run_on(devices, options.repeats)]
    print(f"{'model':28} {'devices':>7} {'fast ms':>9} {'reproducible ms':>16} {'ratio':>6}")
    for row in rows:
        print(f"{row['model']:28} {row['devices']:7} {row['fast_ms']:9} {row['reproducible_ms']:16} {row['ratio']:6}")
    if options.output:
        commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True).stdout.strip()
        about = {
            "command": " ".join(["python", *sys.argv]), "commit": commit, "jax": jax.__version__, "python": platform.python_version(),
            "machine": platform.machine(), "cores": os.cpu_count(), "load_before": round(load, 1), "virtual_ranks": VIRTUAL_RANKS,
            "repeats": options.repeats,
        }  # fmt: skip
        options.output.write_text(json.dumps({"about": about, "results": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
