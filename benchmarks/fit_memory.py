"""What `tnt_micro_batch_size="auto"` chooses for budgets of memory, and what it costs.

    python benchmarks/fit_memory.py --output benchmarks/results/fit_memory.json
    python benchmarks/fit_memory.py --modelled --output benchmarks/results/fit_memory_modelled.json
    python benchmarks/fit_memory.py --table benchmarks/results/fit_memory.json

Each network trains in a process of its own with a global batch that needs much memory: all rows at
once, then with a budget of 3/4, 1/2 and 1/4 of what that needs, on one CPU device. "Predicted" is
what the compiler states for the step that was chosen, with batches that wait; "measured" the
largest resident memory of the process in later steps, beyond what it has between them, and the
training state. "First step" is the largest until the first one has ended, beyond what there was
before it: the code of its program, stacks of threads, and a copy of the state, which takes its
place if there is no memory for a step. All forms of a network must end with the same loss. Memory
does not depend on what else runs; times do, so that the table has them with `--times` alone.
With `--ranks 3 --more-rows 5`, three CPU devices have unequal parts of the batch; numbers are those
of a device, measured as a third of what the process takes.

On a GPU the networks are those of `--modelled`, and "measured" is the most memory that arrays and
programs have taken, in a second process that finds its programs compiled: trials of kernels take
memory as well.

Each result is added to the output file as it is found; the same command at the same commit goes on
from there.

With `--modelled`, the same choice is made for an H100 that need not be there, for larger networks:
steps are compiled ahead of time, and nothing runs. It needs the environment of
`benchmarks/overlap.py`, with JAX and its plugins of 0.12.0.1.
"""

import argparse
import ctypes
import itertools
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from machine import add_platform, choose_devices, environment, on_cpus

NETWORKS = {
    "mlp": 8192, "nnx": 8192, "cnn": 512, "resnet20": 256, "transformer": 512, "decoder": 128,
    "vit": 256, "unet": 128, "moe": 4096, "keras": 8192, "bert": 64,
}  # fmt: skip
MODELLED = {
    "mlp": 65536, "resnet50": 256, "vit": 4096, "unet": 512, "transformer": 4096,
    "decoder 1.1b": 64,
}  # fmt: skip
BUDGETS = {"all memory": None, "3/4": 0.75, "1/2": 0.5, "1/4": 0.25}
# Lets the C library return large blocks to the system, as allocators of devices reuse them.
ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": str(2**20), "MALLOC_TRIM_THRESHOLD_": str(2**20)}
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
    if name.startswith("resnet"):
        module, size = (
            (models.CifarResNet(depth=20), 32) if name == "resnet20" else (models.resnet50(), 224)
        )
        return module, rng.normal(size=(rows, size, size, 3)).astype(np.float32), y_of(rng, rows)
    if name in ("vit", "unet", "moe"):
        from fit_memory_networks import MoE, UNet, ViT

        module = {"vit": ViT, "unet": UNet, "moe": MoE}[name]()
        if name == "moe":
            return module, rng.normal(size=(rows, 64)).astype(np.float32), y_of(rng, rows)
        x = rng.normal(size=(rows, 32, 32, 3)).astype(np.float32)
        pixels = rng.integers(0, 10, (rows, 32, 32))
        return module, x, pixels if name == "unet" else y_of(rng, rows)
    if name == "transformer":
        tokens = rng.integers(1, 256, (rows, 32), np.int32)
        module = models.Transformer(**models.PARAM_SETS["tiny"], vocab_size=256)
        return module, (tokens, tokens), np.roll(tokens, -1, 1)
    if name == "bert":
        from fit_memory_networks import bert

        tokens = rng.integers(1, 1000, (rows, 64), np.int32)
        return bert(), tokens, rng.integers(0, 2, rows)
    if name.startswith("decoder"):
        size = name.partition(" ")[2] or "tiny"
        tokens = rng.integers(0, 256, (rows, 64 if size == "tiny" else 2048), np.int32)
        module = models.Decoder(**models.DECODER_SIZES[size], implementation="xla")
        return module, tokens, np.roll(tokens, -1, 1)
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


def trimmed() -> int:
    """Returns the resident memory, of which what was freed is not part, and forgets its peak."""
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    return status("VmRSS")


def train(name: str, args: argparse.Namespace) -> dict[str, Any]:
    """Trains a network in this process, whose environment has the budget."""
    rows, steps = args.rows, args.steps
    choose_devices(args.platform, num_cpu_devices=args.ranks)
    import jax

    import tnt_jax as tnt

    device = jax.devices()[0]
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
            if stats := device.memory_stats():
                notes["before"] = stats["bytes_in_use"]
                return
            notes["start"] = trimmed()

        def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
            self.began = time.perf_counter()

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            notes["loss"] = float(logs["loss"])
            times.append(time.perf_counter() - self.began)
            if "start" in notes:
                most = status("VmHWM")
                if "first" in notes:
                    notes["most"] = max(notes.get("most", 0), most)
                else:
                    notes["first"] = most - notes["start"]
                # Temporary arrays may be freed a moment after a step.
                notes["before"] = min(notes.get("before", math.inf), trimmed())

    model.build(jax.tree.map(lambda a: a[:1], x))
    began = time.perf_counter()
    try:
        model.fit(
            x, y, batch_size=rows, epochs=steps, verbose=0, callbacks=[Measure()], shuffle=False,
            tnt_micro_batch_size="auto",
        )  # fmt: skip
    except ValueError as error:
        if "found no way" not in str(error):
            raise
        return {"chosen": "nothing fits", "error": str(error)}
    leaves = jax.tree.leaves(model.state)
    state = sum(leaf.addressable_shards[0].data.nbytes for leaf in leaves)
    stats = device.memory_stats()
    num_ranks = 1 if stats else args.ranks
    most = stats["peak_bytes_in_use"] if stats else notes["most"]
    choice = model._core.memory_choice
    [*_, chosen] = choice.attempts[-1]
    return {
        "chosen": chosen.name,
        "rows": -(-rows // num_ranks),
        "rows_at_once": chosen.rows_at_once,
        "predicted": chosen.nbytes,
        "measured": (most - notes["before"]) / num_ranks + state,
        **({} if stats else {"first_step": notes["first"] / num_ranks + state}),
        "programs": choice.num_compiled,
        "choosing_s": notes["choosing_s"],
        "longest_compilation_s": max(compiled),
        "step_ms": [1000 * value for value in times[1:]],
        "loss": notes["loss"],
    }


def choose_modelled(name: str, rows: int, share: float | None) -> dict[str, Any]:
    """Chooses for an H100 with a share of what all rows at once need, or with 80 GB."""
    import jax
    import numpy as np
    import optax
    import overlap  # Sets the environment of JAX, so that it must come first.
    from jax.experimental import topologies

    import tnt_jax as tnt
    from tnt_jax import _jax
    from tnt_jax.adapters.base import Variables
    from tnt_jax.adapters.linen import LinenAdapter
    from tnt_jax.distributed.joining.runtime import Runtime
    from tnt_jax.distributed.sums.reduction import Reduction
    from tnt_jax.settings import Settings
    from tnt_jax.sharded.blocks.remat import rematerialized_apply
    from tnt_jax.sharded.planning import trace_step
    from tnt_jax.train import memory_choice
    from tnt_jax.train.contracts import Batch, LossTerm, StepParts, TrainingStep
    from tnt_jax.train.state import create_state
    from tnt_jax.train.steps.data_parallel import DataParallelSteps

    tnt.init(devices=[0])
    topology = topologies.get_topology_desc(
        platform="cuda", topology=overlap.TOPOLOGIES[8], target_config=overlap.H100
    )
    mesh = _jax.make_data_mesh(topology.devices[:1])
    steps = DataParallelSteps(Runtime(mesh, Settings()), Reduction("xla"))
    module, x, y = make_network(name, 2)
    adapter, optimizer = LinenAdapter(module), optax.adam(1e-4)

    def start() -> Any:
        variables = Variables(*adapter.init(x, seed=0))
        return create_state(*variables, optimizer, seed=0)

    def loss_terms(outputs: Any, batch: Batch) -> list[LossTerm]:
        losses = optax.softmax_cross_entropy_with_integer_labels(outputs, batch.targets)
        return [LossTerm(losses.sum(), float(losses.size))]

    state = steps.place(jax.eval_shape(start))
    batch = jax.tree.map(
        lambda a: jax.ShapeDtypeStruct((rows, *a.shape[1:]), np.result_type(a, np.int32)
                                       if a.dtype.kind == "i" else a.dtype), Batch(x, y)
    )  # fmt: skip
    seconds: list[float] = []
    why_whole = "BatchNorm compares rows" if jax.tree.leaves(state.model_state) else None

    def way_of(kind: str, apply: Any) -> memory_choice.Way:
        def program(rows_at_once: int | None) -> Any:
            parts = StepParts(apply, loss_terms, lambda outputs, batch: (), rows_at_once)
            training = TrainingStep(parts, optimizer)
            return _jax.TracedProgram(trace_step(training, steps, mesh, state, batch))

        floor, grads = (memory_choice.local_bytes(tree) for tree in (state, state.params))
        return memory_choice.Way(kind, floor, grads, program, 0, rows, lambda: why_whole)

    ways = [way_of("", adapter.apply)]
    began = time.perf_counter()
    whole = ways[0].program(None).compile().most_bytes(0)
    seconds.append(time.perf_counter() - began)
    ways.append(way_of("remat='full'", rematerialized_apply(adapter.apply, "full")))
    limit = int(80e9 if share is None else share * whole)
    began = time.perf_counter()
    try:
        choice = memory_choice.choose("modelled", ways, limit)
    except ValueError as error:
        return {"chosen": "nothing fits", "error": str(error), "limit": limit}
    seconds.append(time.perf_counter() - began)
    [*_, chosen] = choice.attempts[-1]
    return {
        "chosen": chosen.name, "predicted": chosen.nbytes, "limit": limit, "whole": whole,
        "programs": choice.num_compiled, "choosing_s": seconds[1], "one_program_s": seconds[0],
    }  # fmt: skip


def run(command: list[str], variables: dict[str, str]) -> dict[str, Any]:
    """Returns what a worker has found."""
    done = subprocess.run(command, env=variables, capture_output=True, text=True)
    lines = [line for line in done.stdout.splitlines() if line.startswith(RESULT)]
    if not lines:
        raise RuntimeError(done.stdout + done.stderr)
    return json.loads(lines[-1].removeprefix(RESULT))


def measure(name: str, rows: int, budget: int | None, args: argparse.Namespace) -> dict[str, Any]:
    """Trains a network in a process of its own with a budget of bytes."""
    variables = {**os.environ, **ALLOCATOR, "TNT_LOG_LEVEL": "WARNING", "KERAS_BACKEND": "jax"}
    if budget is not None:
        variables["TNT_DEVICE_MEMORY"] = f"{budget}B"
    options = ["--worker", name, "--steps", str(args.steps), "--ranks", str(args.ranks)]
    options += ["--platform", args.platform] if args.platform else []
    command = [sys.executable, __file__, *options, "--rows", str(rows)]
    if on_cpus(args.platform):
        return run(command, variables)
    with tempfile.TemporaryDirectory() as folder:
        variables["JAX_COMPILATION_CACHE_DIR"] = folder
        variables["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
        variables["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"
        first = run(command, variables)
        if "error" in first:
            return first
        kept = run(command, variables)
    return kept | {x: first[x] for x in ("choosing_s", "longest_compilation_s")}


def main_modelled(args: argparse.Namespace, results: "Results") -> None:
    """Chooses for all networks and budgets, each in a process of its own."""
    # The plugin's own check needs a driver where CUDA is among the platforms.
    variables = {**os.environ, "TNT_LOG_LEVEL": "WARNING", "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, __file__, "--modelled", "--worker"]
    for name in args.networks or MODELLED:
        for budget, share in BUDGETS.items():
            options = [name, "--share", str(share or 0)]
            results.add(name, budget, partial(run, [*command, *options], variables))


def main_measured(args: argparse.Namespace, results: "Results") -> None:
    """Measures all networks with all budgets."""
    networks = NETWORKS if on_cpus(args.platform) else MODELLED
    for name in args.networks or networks:
        rows = max(int(networks[name] * args.scale), 8) + args.more_rows
        for budget, share in BUDGETS.items():
            whole = results.of(name).get("all memory", {"predicted": 0, "loss": 0})
            limit = None if share is None else int(share * whole["predicted"])
            found = results.add(name, budget, partial(measure, name, rows, limit, args))
            if limit is not None and abs(found.get("loss", whole["loss"]) - whole["loss"]) > 1e-4:
                print(f"Another loss: {found['loss']} instead of {whole['loss']}", flush=True)


class Results:
    """What was found, in a file that grows with each result; without one, to print alone."""

    def __init__(self, path: Path | None) -> None:
        self._path, self.found = path, {**environment(), "results": {}}
        if path is not None and path.exists():
            before = json.loads(path.read_text())
            if before["commit"] == self.found["commit"]:
                self.found = before

    def of(self, name: str) -> dict[str, dict[str, Any]]:
        """Returns the results of a network, by budget."""
        return self.found["results"].setdefault(name, {})

    def add(self, name: str, budget: str, find: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Returns a result, which is found unless the file has it."""
        if budget not in self.of(name):
            self.of(name)[budget] = find()
            print(f"{name}, {budget}: {self.of(name)[budget]['chosen']}", flush=True)
            if self._path is not None:
                self._path.write_text(json.dumps(self.found, indent=1) + "\n")
        return self.of(name)[budget]


def table_of(found: dict[str, Any], *, times: bool) -> str:
    """Returns results as a table, with what they show."""
    is_modelled = "limit" in next(iter(found["results"].values()))["all memory"]
    return (table_modelled if is_modelled else table_measured)(found, times)


def table_measured(found: dict[str, Any], times: bool) -> str:
    """Returns memory by network and budget, and times if they are asked for."""
    titles = ["network", "budget", "chosen", "predicted MiB", "of the budget", "with a pass less"]
    titles += ["measured MiB", "of predicted", "first step MiB", "programs"]
    titles += ["choosing s (times all memory)", "step ms", "times one pass"] if times else []
    lines, parts = [], []
    for name, budgets in found["results"].items():
        whole = budgets["all memory"]
        for budget, one in budgets.items():
            if "error" in one:
                lines.append([name, budget, one["chosen"], *[""] * (len(titles) - 3)])
                continue
            limit = (BUDGETS[budget] or 0) * whole["predicted"]
            larger = bytes_with_a_pass_less(one, whole)
            part = one["measured"] / one["predicted"]
            fits = [not limit or one[x] <= limit for x in ("predicted", "measured")]
            parts.append((*fits, part, one["programs"], abs(one["loss"] - whole["loss"])))
            cells = [name, budget, one["chosen"], mib(one["predicted"])]
            cells += [f"{one['predicted'] / limit:.0%}" if limit else ""]
            cells += [f"{larger / limit:.0%}" if limit and larger else ""]
            first = mib(one["first_step"]) if "first_step" in one else ""
            cells += [mib(one["measured"]), f"{part:.2f}", first, one["programs"]]
            if times:
                median, least, most = (f(one["step_ms"]) for f in (statistics.median, min, max))
                choosing = one["choosing_s"] / whole["choosing_s"]
                cells += [f"{one['choosing_s']:.1f} ({choosing:.1f})"]
                cells += [f"{median:.0f} ({least:.0f} to {most:.0f})"]
                cells += [f"{median / statistics.median(whole['step_ms']):.2f}"]
            lines.append(list(map(str, cells)))
    stated, fit, measured, programs, apart = zip(*parts, strict=True)
    shown = (
        f"{sum(stated)} of {len(parts)} chosen steps fit by the compiler's account, {sum(fit)} as "
        f"measured. Measured are "
        f"{min(measured):.2f} to {max(measured):.2f} times what is predicted (median "
        f"{statistics.median(measured):.2f}), in {sum(abs(x - 1) <= 0.1 for x in measured)} cases "
        f"within 10 %. Programs compiled: "
        f"{', '.join(f'{n} in {programs.count(n)}' for n in sorted(set(programs)))} cases. "
        f"Losses differ by {max(apart):.1g} at most from those of all rows at once."
    )
    return f"{as_table(titles, lines)}\n\n{shown}"


def bytes_with_a_pass_less(one: dict[str, Any], whole: dict[str, Any]) -> float | None:
    """Returns what one pass less would need, on the line to all rows; None where that says nothing.

    A larger pass than the chosen one is faster only if there are fewer.
    """
    num_rows, rows = one["rows"], one["rows_at_once"]
    if rows is None or "remat" in one["chosen"]:
        return None
    more = -(-num_rows // (-(-num_rows // rows) - 1))
    per_row = (whole["predicted"] - one["predicted"]) / (num_rows - rows)
    return one["predicted"] + (more - rows) * per_row


def table_modelled(found: dict[str, Any], times: bool) -> str:
    """Returns choices by network and budget, and times if they are asked for."""
    titles = ["network", "budget", "chosen", "needs MiB", "of MiB", "used", "programs"]
    titles += ["times one"] if times else []
    lines = []
    for name, budgets in found["results"].items():
        for budget, one in budgets.items():
            if "error" in one:
                lines.append([name, budget, one["chosen"], *[""] * (len(titles) - 3)])
                continue
            cells = [name, budget, one["chosen"], mib(one["predicted"]), mib(one["limit"])]
            cells += [f"{one['predicted'] / one['limit']:.0%}", str(one["programs"])]
            cells += [f"{one['choosing_s'] / one['one_program_s']:.2f}"] if times else []
            lines.append(cells)
    return as_table(titles, lines)


def mib(nbytes: float) -> str:
    """Returns bytes in MiB."""
    return f"{nbytes / 2**20:.0f}"


def as_table(titles: list[str], lines: list[list[str]]) -> str:
    """Returns a table in Markdown."""
    rows = [titles, ["---"] * len(titles), *lines]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in rows)


def main() -> None:
    """Measures or models all networks with all budgets, and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_platform(parser)
    parser.add_argument("--networks", nargs="+", help="some of those that there are")
    parser.add_argument("--scale", type=float, default=1, help="part of the rows, to try it")
    parser.add_argument(
        "--modelled", action="store_true", help="for an H100, which need not be here"
    )
    parser.add_argument("--ranks", type=int, default=1, help="CPU devices")
    parser.add_argument("--more-rows", type=int, default=0, help="rows beyond equal parts")
    parser.add_argument("--share", type=float, help=argparse.SUPPRESS)
    parser.add_argument("--rows", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--steps", type=int, default=3, help="steps, the first not timed")
    parser.add_argument("--output", type=Path, help="JSON file for the results")
    parser.add_argument("--table", type=Path, metavar="FILE", help="print its table, and end")
    parser.add_argument("--times", action="store_true", help="print times of an idle machine, too")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        found = (
            choose_modelled(args.worker, MODELLED[args.worker], args.share or None)
            if args.modelled
            else train(args.worker, args)
        )
        print(RESULT + json.dumps(found), flush=True)
        return
    if args.table is not None:
        print(table_of(json.loads(args.table.read_text()), times=args.times))
        return
    results = Results(args.output)
    (main_modelled if args.modelled else main_measured)(args, results)
    print(table_of(results.found, times=args.times))


if __name__ == "__main__":
    main()
