"""What `tnt_micro_batch_size="auto"` chooses for budgets of memory, and what it costs.

    python benchmarks/fit_memory.py --output benchmarks/results/fit_memory.json

Each network trains in a process of its own with a global batch that needs much memory: all rows at
once, then with a budget of 3/4, 1/2 and 1/4 of what that needs, on one CPU device. "Predicted" is
what the compiler states for the step that was chosen, with batches that wait; "measured" the
largest resident memory of the process while it trains, beyond what it had before the first step,
and the training state. All forms of a network must end with the same loss.
"""

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from machine import add_platform, choose_devices, environment

NETWORKS = {"mlp": 8192, "nnx": 8192, "cnn": 512, "decoder": 128, "keras": 8192}
BUDGETS = {"all memory": None, "3/4": 0.75, "1/2": 0.5, "1/4": 0.25}
RESULT = "result: "


def make_network(name: str, rows: int) -> tuple[Any, Any, Any]:
    """Returns a module, inputs `[rows, ...]` and targets of a network."""
    import numpy as np
    from flax import linen as nn
    from flax import nnx

    from tnt_jax import models

    rng = np.random.default_rng(0)
    if name == "cnn":
        x = rng.normal(size=(rows, 28, 28, 1)).astype(np.float32)
        return models.CNN(), x, rng.integers(0, 10, rows)
    if name == "decoder":
        tokens = rng.integers(0, 256, (rows, 64), np.int32)
        return models.Decoder(**models.DECODER_SIZES["tiny"]), tokens, np.roll(tokens, -1, 1)
    x = rng.normal(size=(rows, 64)).astype(np.float32)
    if name == "keras":
        import keras

        keras.utils.set_random_seed(0)
        hidden = [keras.layers.Dense(512, "relu") for _ in range(4)]
        layers = [keras.layers.Input((64,)), *hidden, keras.layers.Dropout(0.1, seed=1)]
        return keras.Sequential([*layers, keras.layers.Dense(10)]), x, y_of(rng, rows)
    if name == "nnx":
        rngs = nnx.Rngs(0)
        sizes = [64, 512, 512, 512]
        layers = [
            layer
            for inputs, outputs in itertools.pairwise(sizes)
            for layer in (nnx.Linear(inputs, outputs, rngs=rngs), nnx.relu)
        ]
        dropout = nnx.Dropout(0.1, rngs=rngs)
        return nnx.Sequential(*layers, dropout, nnx.Linear(512, 10, rngs=rngs)), x, y_of(rng, rows)
    layers = [layer for _ in range(6) for layer in (nn.Dense(1024), nn.relu)]
    return nn.Sequential([*layers, nn.Dense(10)]), x, y_of(rng, rows)


def y_of(rng: Any, rows: int) -> Any:
    """Returns targets of ten classes."""
    return rng.integers(0, 10, rows)


def status(name: str) -> int:
    """Returns a line of `/proc/self/status` in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(name)).split()[1]) * 1024


def train(name: str, rows: int, steps: int, platform: str | None) -> dict[str, Any]:
    """Trains a network in this process, whose environment has the budget."""
    choose_devices(platform)
    import jax

    import tnt_jax as tnt

    module, x, y = make_network(name, rows)
    model = tnt.Model(module, seed=0)
    loss = tnt.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(tnt.optimizers.SGD(0.01), loss=loss)
    compiled: list[float] = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda event, seconds, **_: (
            compiled.append(seconds) if event.endswith("backend_compile_duration") else None
        )
    )
    notes: dict[str, Any] = {}
    times: list[float] = []

    class Measure(tnt.callbacks.Callback):
        def on_train_begin(self, logs: Any = None) -> None:
            notes["choosing_s"] = time.perf_counter() - began
            Path("/proc/self/clear_refs").write_text("5")
            notes["before"] = status("VmRSS")

        def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
            self.began = time.perf_counter()

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            notes["loss"] = float(logs["loss"])
            times.append(time.perf_counter() - self.began)

    model.build(x[:1])
    began = time.perf_counter()
    model.fit(
        x, y, batch_size=rows, epochs=steps, verbose=0, callbacks=[Measure()], shuffle=False,
        tnt_micro_batch_size="auto",
    )  # fmt: skip
    state = sum(leaf.nbytes for leaf in jax.tree.leaves(model.state))
    [*_, attempt] = model._core.memory_choice.attempts[-1]
    return {
        "chosen": attempt.name,
        "rows_at_once": attempt.rows_at_once,
        "predicted": attempt.nbytes,
        "measured": status("VmHWM") - notes["before"] + state,
        "programs": sum(map(len, model._core.memory_choice.attempts)),
        "choosing_s": notes["choosing_s"],
        "longest_compilation_s": max(compiled),
        "step_ms": [1000 * value for value in times[1:]],
        "loss": notes["loss"],
    }


def measure(name: str, rows: int, budget: int | None, args: argparse.Namespace) -> dict[str, Any]:
    """Trains a network in a process of its own with a budget of bytes."""
    variables = {**os.environ, "TNT_LOG_LEVEL": "WARNING", "KERAS_BACKEND": "jax"}
    if budget is not None:
        variables["TNT_DEVICE_MEMORY"] = f"{budget}B"
    options = ["--worker", name, "--steps", str(args.steps)]
    options += ["--platform", args.platform] if args.platform else []
    done = subprocess.run(
        [sys.executable, __file__, *options], env=variables, capture_output=True, text=True
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith(RESULT)]
    if not lines:
        raise RuntimeError(done.stdout + done.stderr)
    return json.loads(lines[-1].removeprefix(RESULT))


def row(name: str, budget: str, found: dict[str, Any], whole: dict[str, Any]) -> str:
    """Returns a line of the table."""
    median, least, most = (f(found["step_ms"]) for f in (statistics.median, min, max))
    slower = median / statistics.median(whole["step_ms"])
    cells = [
        name, budget, found["chosen"], f"{found['predicted'] / 2**20:.0f}",
        f"{found['measured'] / 2**20:.0f}", found["programs"],
        f"{found['choosing_s']:.1f} ({found['choosing_s'] / whole['choosing_s']:.1f})",
        f"{median:.0f} ({least:.0f} to {most:.0f})", f"{slower:.2f}",
    ]  # fmt: skip
    return f"| {' | '.join(map(str, cells))} |"


def main() -> None:
    """Measures all networks with all budgets, and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_platform(parser)
    parser.add_argument("--networks", nargs="+", choices=NETWORKS, default=list(NETWORKS))
    parser.add_argument("--steps", type=int, default=6, help="steps, the first not timed")
    parser.add_argument("--output", type=Path, help="JSON file for the results")
    parser.add_argument("--worker", choices=NETWORKS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        found = train(args.worker, NETWORKS[args.worker], args.steps, args.platform)
        print(RESULT + json.dumps(found), flush=True)
        return
    print("| network | budget | chosen | predicted MiB | measured MiB | programs | choosing s "
          "(times all memory) | step ms | times one pass |")  # fmt: skip
    print("|" + " --- |" * 9)
    results: dict[str, dict[str, Any]] = {}
    for name in args.networks:
        results[name] = {}
        for budget, share in BUDGETS.items():
            whole = results[name].get("all memory")
            limit = None if share is None or whole is None else int(share * whole["predicted"])
            found = measure(name, NETWORKS[name], limit, args)
            results[name][budget] = found
            print(row(name, budget, found, whole or found), flush=True)
            assert whole is None or abs(found["loss"] - whole["loss"]) < 1e-4, "other numbers"
    if args.output:
        found = {**environment(), "results": results}
        args.output.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
