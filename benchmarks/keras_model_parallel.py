"""A Keras model in parts on 8 virtual devices, beside Keras's own `ModelParallel`, in one run.

Contenders build the same Keras model with the same weights and train it with Adam on the same
batches in the same order. Each has a process of its own; their rounds are interleaved, so that a
disturbance of the machine hits all alike. "Bytes" are those of the weights and of the optimizer's
state on the first device, counted from live arrays; "lines" are those that a user writes besides
model, `compile` and `fit`, counted from the functions below. A contender whose matrices are not cut
as it says, or whose losses are not those of the others, ends the run with an error.

    python benchmarks/keras_model_parallel.py --output benchmarks/results/keras_parts_64.json
"""

import argparse
import inspect
import json
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

# In every process before JAX starts: devices, and threads enough for their collectives.
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
os.environ.setdefault("PJRT_NPROC", "32")
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["KERAS_BACKEND"] = "jax"

import jax
import keras
import numpy as np
from machine import environment

import tnt_jax as tnt

WIDTH, DEPTH, CLASSES = 1024, 6, 16
TOLERANCE = 1e-4


def make_model() -> Any:
    keras.utils.set_random_seed(0)
    layers = [keras.layers.Dense(WIDTH, activation="relu") for _ in range(DEPTH)]
    return keras.Sequential(
        [keras.layers.Input((WIDTH,)), *layers, keras.layers.Dense(CLASSES, name="logits")]
    )


def keras_tensor() -> Any:
    devices = keras.distribution.DeviceMesh(
        (2, 4), ["batch", "model"], keras.distribution.list_devices()
    )
    layout = keras.distribution.LayoutMap(devices)
    layout[".*dense.*/kernel"] = (None, "model")
    layout[".*dense.*/bias"] = ("model",)
    layout[".*logits/kernel"] = ("model", None)
    keras.distribution.set_distribution(
        keras.distribution.ModelParallel(layout_map=layout, batch_dim_name="batch")
    )
    return make_model()


def tnt_tensor() -> Any:
    rules = [
        (f"*/Dense_{DEPTH}/kernel", ("tensor", None)),
        (f"*/Dense_{DEPTH}/bias", ()),
        ("*/kernel", (None, "tensor")),
        ("*/bias", ("tensor",)),
    ]
    return tnt.Model(make_model(), mesh={"data": 2, "tensor": 4}, sharding_rules=rules)


def keras_fsdp() -> Any:
    devices = keras.distribution.DeviceMesh((8,), ["batch"], keras.distribution.list_devices())
    layout = keras.distribution.LayoutMap(devices)
    layout[".*dense.*/kernel"] = (None, "batch")
    layout[".*dense.*/bias"] = ("batch",)
    layout[".*logits/kernel"] = ("batch", None)
    keras.distribution.set_distribution(keras.distribution.ModelParallel(layout_map=layout))
    return make_model()


def tnt_fsdp() -> Any:
    return tnt.Model(make_model(), mesh={"fsdp": 8})


def tnt_data_fsdp() -> Any:
    return tnt.Model(make_model(), mesh={"data": 2, "fsdp": 4})


def keras_data_parallel() -> Any:
    keras.distribution.set_distribution(keras.distribution.DataParallel())
    return make_model()


def tnt_data_parallel() -> Any:
    return tnt.Model(make_model())


class Contender(NamedTuple):
    """A way to train the model in one process of 8 devices.

    Attributes:
        name: Its name in the table.
        make: What a user writes.
        num_parts: Into how many parts each matrix is cut.
    """

    name: str
    make: Callable[[], Any]
    num_parts: int


CONTENDERS = (
    Contender("Keras ModelParallel, batch 2 x model 4", keras_tensor, 4),
    Contender("tnt_jax, data 2 x tensor 4, the same cuts", tnt_tensor, 4),
    Contender("tnt_jax, data 2 x fsdp 4", tnt_data_fsdp, 4),
    Contender("Keras ModelParallel, cut over its batch axis", keras_fsdp, 8),
    Contender("tnt_jax, fsdp 8", tnt_fsdp, 8),
    Contender("Keras DataParallel, whole weights", keras_data_parallel, 1),
    Contender("tnt_jax, whole weights", tnt_data_parallel, 1),
)


def lines_of(function: Callable) -> int:
    """Returns the lines of a function's body, without those that call `make_model` alone."""
    body = inspect.getsource(function).splitlines()[1:]
    return sum(line.strip() != "return make_model()" for line in body)


def state_arrays(model: Any) -> tuple[list[Any], list[Any]]:
    """Returns the arrays of the weights, and those of the optimizer's state."""
    if isinstance(model, tnt.Model):
        return jax.tree.leaves(model.state.params), jax.tree.leaves(model.state.opt_state)
    variables = model.trainable_variables, model.optimizer.variables
    return tuple([variable.value for variable in of] for of in variables)


def bytes_here(arrays: list[Any]) -> int:
    """Returns the bytes of arrays on the first device."""
    first = jax.devices()[0]
    return sum(s.data.nbytes for x in arrays for s in x.addressable_shards if s.device == first)


def check_cuts(contender: Contender, model: Any) -> None:
    """Raises a RuntimeError if a matrix, or its moments, are not cut as a contender says."""
    for of, expected in zip(state_arrays(model), (DEPTH + 1, 2 * (DEPTH + 1)), strict=True):
        matrices = [x for x in of if x.ndim == 2]
        found = [x.nbytes / bytes_here([x]) for x in matrices]
        if found != [contender.num_parts] * expected:
            raise RuntimeError(
                f"{contender.name}: {expected} matrices must lie in {contender.num_parts} parts, "
                f"but they lie in {found}."
            )


def serve(contender: Contender, batch_size: int, num_steps: int, connection: Any) -> None:
    """Trains rounds of a contender on request, and tells its times and its losses."""
    model = contender.make()
    library = tnt if isinstance(model, tnt.Model) else keras
    # With larger steps, rounding grows beyond the tolerance.
    optimizer = library.optimizers.Adam(1e-5)
    model.compile(optimizer, library.losses.SparseCategoricalCrossentropy(from_logits=True))
    rng = np.random.default_rng(0)
    x = rng.normal(size=(batch_size * num_steps, WIDTH)).astype(np.float32)
    y = rng.integers(0, CLASSES, len(x))

    def fit() -> float:
        history = model.fit(x, y, batch_size=batch_size, epochs=1, shuffle=False, verbose=0)
        return history.history["loss"][0]

    loss = fit()
    check_cuts(contender, model)
    arrays = [x for of in state_arrays(model) for x in of]
    connection.send((loss, bytes_here(arrays), sum(x.nbytes for x in arrays)))
    while connection.recv():
        start = time.perf_counter()
        loss = fit()
        connection.send(((time.perf_counter() - start) / num_steps, loss))


def measure(batch_size: int, num_rounds: int, num_steps: int) -> list[dict[str, Any]]:
    """Returns a row for each contender.

    Raises:
        RuntimeError: If their losses differ.
    """
    spawn = multiprocessing.get_context("spawn")
    ends, processes, rows = {}, [], {}
    for contender in CONTENDERS:
        ends[contender.name], theirs = spawn.Pipe()
        arguments = contender, batch_size, num_steps, theirs
        processes.append(spawn.Process(target=serve, args=arguments, daemon=True))
        processes[-1].start()
        theirs.close()
        loss, nbytes, whole = ends[contender.name].recv()
        rows[contender.name] = {
            "contender": contender.name,
            "lines": lines_of(contender.make),
            "bytes_a_device": nbytes,
            "bytes_whole": whole,
            "losses": [loss],
            "step_s": [],
        }
    for _ in range(num_rounds):
        for name, end in ends.items():
            end.send(True)
            seconds, loss = end.recv()
            rows[name]["step_s"].append(seconds)
            rows[name]["losses"].append(loss)
    for end, process in zip(ends.values(), processes, strict=True):
        end.send(False)
        process.join()
    check_losses(list(rows.values()))
    return list(rows.values())


def check_losses(rows: list[dict[str, Any]]) -> None:
    """Raises a RuntimeError if contenders did not train to the same losses."""
    expected = rows[0]["losses"]
    for row in rows[1:]:
        if not np.allclose(row["losses"], expected, rtol=TOLERANCE, atol=TOLERANCE):
            raise RuntimeError(
                f"{row['contender']} trained to the losses {row['losses']}, but "
                f"{rows[0]['contender']} to {expected}."
            )


def table(rows: list[dict[str, Any]]) -> str:
    """Returns rows as a Markdown table."""
    lines = [
        "| contender | lines | MB a device | share | last loss | step ms, median (range) |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        ms = sorted(1e3 * value for value in row["step_s"])
        share = row["bytes_a_device"] / row["bytes_whole"]
        lines.append(
            f"| {row['contender']} | {row['lines']} | {row['bytes_a_device'] / 1e6:.1f} "
            f"| {share:.1%} | {row['losses'][-1]:.6f} | {statistics.median(ms):.1f} "
            f"({ms[0]:.1f} to {ms[-1]:.1f}) |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--batch", type=int, default=64, help="global batch size (default: 64)")
    parser.add_argument("--rounds", type=int, default=5, help="measured rounds (default: 5)")
    parser.add_argument("--steps", type=int, default=20, help="steps of a round (default: 20)")
    parser.add_argument("--output", help="JSON file for the results")
    args = parser.parse_args()
    about = {"arguments": vars(args), **environment()}
    rows = measure(args.batch, args.rounds, args.steps)
    print(table(rows))
    if args.output:
        with open(args.output, "w") as file:
            json.dump(about | {"rows": rows}, file, indent=1)
            file.write("\n")


if __name__ == "__main__":
    main()
