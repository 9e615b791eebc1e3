"""The step of parts of a batch beside the compiler's step, on 8 virtual devices and in processes.

    python benchmarks/two_steps.py --output benchmarks/results/two_steps.json

In one step of tnt_jax each rank computes its own rows; the other one, for models that compare rows,
hands whole batches to the compiler. Here both train networks whose rows are independent, beside
Keras's `ModelParallel`, cut over its batch axis, where the network is a Keras model. All train to
the same losses; rounds of the forms alternate within a job.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from typing import Any

NETWORKS = ("mlp", "transformer", "decoder")
# Name, processes, and devices of each.
JOBS = (("8 devices", 1, 8), ("2 processes", 2, 1), ("4 processes", 4, 1))
RESULT = "result: "
TOLERANCE = 1e-4


def make_network(name: str) -> tuple[Any, Any, Any]:
    """Returns a model, inputs and targets of 64 rows."""
    import numpy as np

    rng = np.random.default_rng(0)
    if name == "mlp":
        import keras_model_parallel

        x = rng.normal(size=(64, keras_model_parallel.WIDTH)).astype(np.float32)
        return keras_model_parallel.make_model(), x, rng.integers(0, 16, 64)
    if name == "transformer":
        import keras
        import scaling_models

        keras.utils.set_random_seed(0)
        inputs, targets = scaling_models.load("transformer_tiny", real=False, num_rows=64)
        return scaling_models.make_keras("transformer_tiny", ()), inputs, targets
    from tnt_jax import models

    tokens = rng.integers(0, 256, (64, 64), np.int32)
    return models.Decoder(**models.DECODER_SIZES["tiny"]), tokens, np.roll(tokens, -1, 1)


def largest_cut(shape: tuple[int, ...], num_devices: int) -> tuple[str | None, ...]:
    """Returns an array's layout, cut over `batch` along its largest dimension that allows it."""
    sizes = [(size, axis) for axis, size in enumerate(shape) if size % num_devices == 0]
    cut = max(sizes, default=(0, -1))[1]
    return tuple("batch" if axis == cut else None for axis in range(len(shape)))


def keras_in_parts(name: str, num_devices: int) -> Any:
    """Returns the Keras model with its arrays cut over all devices by `ModelParallel`."""
    import re

    import keras

    keras.utils.clear_session()  # So that both models have the same names.
    model = make_network(name)[0]
    # While a layer is built, the paths of its variables do not begin with the model's name.
    shapes = {
        v.path.removeprefix(f"{model.name}/"): tuple(v.shape) for v in model.trainable_variables
    }
    keras.utils.clear_session()
    devices = keras.distribution.list_devices()
    mesh = keras.distribution.DeviceMesh((num_devices,), ["batch"], devices)
    layout = keras.distribution.LayoutMap(mesh)
    for path, shape in shapes.items():
        layout[rf"^(.*/)?{re.escape(path)}$"] = largest_cut(shape, num_devices)
    keras.distribution.set_distribution(keras.distribution.ModelParallel(layout_map=layout))
    model = make_network(name)[0]
    whole = [v.path for v in model.trainable_variables if v.value.sharding.is_fully_replicated]
    if whole:
        raise RuntimeError(f"Keras keeps {whole} whole.")
    return model


def work(network: str, num_rounds: int, num_steps: int) -> None:
    """Trains in this process of a job, whose master prints the seconds of each step."""
    import jax
    import numpy as np

    import tnt_jax as tnt

    tnt.init()
    num_devices = jax.device_count()
    is_keras, is_alone = network != "decoder", jax.process_count() == 1
    makers = {
        "own rows, whole": lambda: tnt.Model(make_network(network)[0]),
        "compiler's, whole": lambda: tnt.Model(make_network(network)[0]),
        "own rows, fsdp": lambda: tnt.Model(make_network(network)[0], mesh={"fsdp": num_devices}),
        "compiler's, fsdp": lambda: tnt.Model(make_network(network)[0], mesh={"fsdp": num_devices}),
    }
    if is_keras and is_alone:
        makers["Keras ModelParallel"] = lambda: keras_in_parts(network, num_devices)
    _, x, y = make_network(network)
    copies = [np.tile(leaf, (num_steps,) + (1,) * (leaf.ndim - 1)) for leaf in jax.tree.leaves(x)]
    rows = jax.tree.unflatten(jax.tree.structure(x), copies)
    labels = np.tile(y, (num_steps,) + (1,) * (y.ndim - 1))
    models, seconds, losses = {}, {}, {}

    def fit(name: str) -> float:
        options: dict[str, Any] = {"batch_size": len(y), "shuffle": False, "verbose": 0}
        inputs = list(rows) if isinstance(rows, tuple) else rows
        return models[name].fit(inputs, labels, **options).history["loss"][0]

    for name, make in makers.items():
        model = models[name] = make()
        library = tnt
        if not isinstance(model, tnt.Model):
            import keras

            library = keras
        loss = library.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(library.optimizers.Adam(1e-5), loss)
        if name.startswith("compiler's"):
            take_compilers_step(model, rows, labels, len(y))
        seconds[name], losses[name] = [], [fit(name)]
    for _ in range(num_rounds):
        for name in makers:
            start = time.perf_counter()
            losses[name].append(fit(name))
            seconds[name].append((time.perf_counter() - start) / num_steps)
    first = next(iter(losses.values()))
    for name, found in losses.items():
        if not np.allclose(found, first, rtol=TOLERANCE, atol=TOLERANCE):
            raise RuntimeError(f"{name} trained to the losses {found}, and not to {first}.")
    if tnt.is_master_rank():
        print(RESULT + json.dumps(seconds), flush=True)


def take_compilers_step(model: Any, rows: Any, labels: Any, size: int) -> None:
    """Lets a model compute whole batches, as if its rows had been found to depend on others."""
    import jax

    core = model._core
    first = jax.tree.map(lambda leaf: leaf[:size], rows)
    # Makes the variables, and a step that another one then replaces.
    model.test_on_batch(list(first) if isinstance(first, tuple) else first, labels[:size])
    compilation = core.compilation
    compilation.dependence = "This benchmark computes whole batches"
    compilation.traced_rows |= {True, False}
    compilation.checked_rows |= {True, False}
    core.choose_step_of_rows()


def run_job(network: str, job: tuple[str, int, int], args: argparse.Namespace) -> dict[str, Any]:
    """Returns the row of one network in one job."""
    name, num_processes, num_devices = job
    words = ["--work", network, "--rounds", str(args.rounds), "--steps", str(args.steps)]
    command = [sys.executable, __file__, *words]
    environment = {**os.environ, "KERAS_BACKEND": "jax", "JAX_PLATFORMS": "cpu"}
    if num_processes > 1:
        command = ["tnt-jax", "-n", str(num_processes), "--", *command[1:]]
    else:
        environment["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={num_devices}"
        environment["PJRT_NPROC"] = str(2 * num_devices)
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    found = [line for line in done.stdout.splitlines() if line.startswith(RESULT)]
    if not found:
        raise RuntimeError(f"{network}, {name}: {done.stdout[-2000:]}{done.stderr[-3000:]}")
    return {"network": network, "job": name, "step_s": json.loads(found[0].removeprefix(RESULT))}


def as_row(row: dict[str, Any]) -> str:
    """Returns a line of the Markdown table."""
    cells = []
    for form in ("own rows, whole", "compiler's, whole", "own rows, fsdp", "compiler's, fsdp",
                 "Keras ModelParallel"):  # fmt: skip
        ms = sorted(1e3 * value for value in row["step_s"].get(form, []))
        shown = f"{statistics.median(ms):.1f} ({ms[0]:.1f} to {ms[-1]:.1f})" if ms else ""
        cells.append(shown)
    return f"| {row['network']} | {row['job']} | {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--work", choices=NETWORKS, help=argparse.SUPPRESS)
    parser.add_argument("--networks", nargs="+", choices=NETWORKS, default=NETWORKS)
    parser.add_argument("--rounds", type=int, default=7, help="measured rounds (default: 7)")
    parser.add_argument("--steps", type=int, default=10, help="steps of a round (default: 10)")
    parser.add_argument("--output", help="JSON file for the results")
    args = parser.parse_args()
    if args.work:
        work(args.work, args.rounds, args.steps)
        return
    from machine import environment

    about = {"arguments": vars(args), **environment()}
    rows = []
    for network in args.networks:
        for job in JOBS:
            rows.append(run_job(network, job, args))
            print(as_row(rows[-1]), flush=True)
    if args.output:
        with open(args.output, "w") as file:
            json.dump(about | {"rows": rows}, file, indent=1)
            file.write("\n")


if __name__ == "__main__":
    main()
