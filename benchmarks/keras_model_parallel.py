"""A Keras model in parts on 8 virtual devices, beside Keras's own `ModelParallel`, in one run.

Contenders build the same Keras model with the same weights and train it with Adam on the same
batches in the same order. Each has a process of its own; their rounds are interleaved, so that a
disturbance of the machine hits all alike. "Bytes" are those of the weights and of the optimizer's
state on the first device, counted from live arrays; "lines" are those that a user writes besides
model, `compile` and `fit`, counted from the functions below.

    python benchmarks/keras_model_parallel.py --output benchmarks/results/keras_model_parallel.json
"""

import argparse
import inspect
import json
import multiprocessing
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

# In every process before JAX starts: devices, and threads enough for their collectives.
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
os.environ.setdefault("PJRT_NPROC", "32")
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["KERAS_BACKEND"] = "jax"

import jax
import keras
import numpy as np
from machine import commit, versions

import tnt_jax as tnt

WIDTH, DEPTH, CLASSES, BATCH = 1024, 6, 16, 64


def make_model() -> Any:
    keras.utils.set_random_seed(0)
    layers = [keras.layers.Dense(WIDTH, activation="relu") for _ in range(DEPTH)]
    return keras.Sequential(
        [keras.layers.Input((WIDTH,)), *layers, keras.layers.Dense(CLASSES, name="logits")]
    )


def keras_model_parallel() -> Any:
    devices = keras.distribution.DeviceMesh(
        (2, 4), ["batch", "model"], keras.distribution.list_devices()
    )
    layout = keras.distribution.LayoutMap(devices)
    layout["dense.*/kernel"] = (None, "model")
    layout["dense.*/bias"] = ("model",)
    layout["logits/kernel"] = ("model", None)
    keras.distribution.set_distribution(
        keras.distribution.ModelParallel(layout_map=layout, batch_dim_name="batch")
    )
    return make_model()


def tnt_fsdp() -> Any:
    return tnt.Model(make_model(), mesh={"data": 2, "fsdp": 4})


def tnt_tensor() -> Any:
    rules = [
        (f"*/Dense_{DEPTH}/kernel", ("tensor", None)),
        (f"*/Dense_{DEPTH}/bias", ()),
        ("*/kernel", (None, "tensor")),
        ("*/bias", ("tensor",)),
    ]
    return tnt.Model(make_model(), mesh={"data": 2, "tensor": 4}, sharding_rules=rules)


def keras_data_parallel() -> Any:
    keras.distribution.set_distribution(keras.distribution.DataParallel())
    return make_model()


CONTENDERS: dict[str, Callable[[], Any]] = {
    "Keras ModelParallel, batch 2 x model 4": keras_model_parallel,
    "tnt_jax, data 2 x tensor 4, the same cuts": tnt_tensor,
    "tnt_jax, data 2 x fsdp 4": tnt_fsdp,
    "Keras DataParallel, whole weights": keras_data_parallel,
}


def lines_of(function: Callable) -> int:
    """Returns the lines of a function's body, without those that call `make_model` alone."""
    body = inspect.getsource(function).splitlines()[1:]
    return sum(line.strip() != "return make_model()" for line in body)


def state_bytes(model: Any) -> tuple[int, int]:
    """Returns the bytes of weights and optimizer state on the first device, and of all of it."""
    if isinstance(model, tnt.Model):
        arrays = jax.tree.leaves((model.state.params, model.state.opt_state))
    else:
        arrays = [v.value for v in (*model.trainable_variables, *model.optimizer.variables)]
    first = jax.devices()[0]
    here = [s.data.nbytes for x in arrays for s in x.addressable_shards if s.device == first]
    return sum(here), sum(x.nbytes for x in arrays)


def serve(name: str, num_steps: int, connection: Any) -> None:
    """Trains rounds of a contender on request, and tells its times and its first losses."""
    model = CONTENDERS[name]()
    losses = tnt.losses if isinstance(model, tnt.Model) else keras.losses
    model.compile("adam", losses.SparseCategoricalCrossentropy(from_logits=True))
    rng = np.random.default_rng(0)
    x = rng.normal(size=(BATCH * num_steps, WIDTH)).astype(np.float32)
    y = rng.integers(0, CLASSES, len(x))

    def fit() -> float:
        history = model.fit(x, y, batch_size=BATCH, epochs=1, shuffle=False, verbose=0)
        return history.history["loss"][0]

    connection.send((fit(), *state_bytes(model)))
    while connection.recv():
        start = time.perf_counter()
        fit()
        connection.send((time.perf_counter() - start) / num_steps)


def measure(num_rounds: int, num_steps: int) -> list[dict[str, Any]]:
    """Returns a row for each contender."""
    spawn = multiprocessing.get_context("spawn")
    ends, processes, rows = {}, [], {}
    for name, function in CONTENDERS.items():
        ends[name], theirs = spawn.Pipe()
        processes.append(spawn.Process(target=serve, args=(name, num_steps, theirs), daemon=True))
        processes[-1].start()
        theirs.close()
        loss, nbytes, whole = ends[name].recv()
        rows[name] = {
            "contender": name,
            "lines": lines_of(function),
            "bytes_a_device": nbytes,
            "bytes_whole": whole,
            "first_epoch_loss": loss,
            "step_s": [],
        }
    for _ in range(num_rounds):
        for name, end in ends.items():
            end.send(True)
            rows[name]["step_s"].append(end.recv())
    for end, process in zip(ends.values(), processes, strict=True):
        end.send(False)
        process.join()
    return list(rows.values())


def table(rows: list[dict[str, Any]]) -> str:
    """Returns rows as a Markdown table."""
    lines = [
        "| contender | lines | MB a device | share | loss of epoch 1 | step ms, median (range) |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        ms = sorted(1e3 * value for value in row["step_s"])
        share = row["bytes_a_device"] / row["bytes_whole"]
        lines.append(
            f"| {row['contender']} | {row['lines']} | {row['bytes_a_device'] / 1e6:.1f} "
            f"| {share:.1%} | {row['first_epoch_loss']:.6f} | {statistics.median(ms):.1f} "
            f"({ms[0]:.1f} to {ms[-1]:.1f}) |"
        )
    return "\n".join(lines)


def about() -> dict[str, Any]:
    """Returns what the numbers belong to."""
    return {
        "command": " ".join(["python", *sys.argv]),
        "commit": commit(),
        "cores": os.cpu_count(),
        "machine": platform.machine(),
        "keras": keras.__version__,
        **versions(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7, help="measured rounds (default: 7)")
    parser.add_argument("--steps", type=int, default=20, help="steps of a round (default: 20)")
    parser.add_argument("--output", help="JSON file for the results")
    args = parser.parse_args()
    rows = measure(args.rounds, args.steps)
    print(table(rows))
    if args.output:
        with open(args.output, "w") as file:
            json.dump(about() | {"rows": rows}, file, indent=1)
            file.write("\n")


if __name__ == "__main__":
    main()
