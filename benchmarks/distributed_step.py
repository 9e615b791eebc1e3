"""What a distributed step costs beside the same step written by hand with `shard_map`, in one run.

Both train the same MLP with SGD on the same batches on the devices, with gradients in the same
buckets; Keras's `fit` and PyTorch's DDP (one process for each device) train a network of the same
shape on the same data where they are installed. Rounds are interleaved so that a disturbance of the
machine hits all alike; the quotient of each round is that of neighbours in time.

    python benchmarks/distributed_step.py --devices 2 --width 1024 --output results.json
"""

import argparse
import json
import os
import platform
import statistics
import time
from itertools import pairwise

from machine import add_platform, choose_devices


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_platform(parser)
    parser.add_argument(
        "--devices", type=int, default=1, help="devices; virtual ones on CPUs (default: 1)"
    )
    parser.add_argument("--batch-size", type=int, default=256, help="global batch (default: 256)")
    parser.add_argument("--width", type=int, default=512, help="of two hidden layers")
    parser.add_argument("--steps", type=int, default=100, help="steps per round (default: 100)")
    parser.add_argument("--rounds", type=int, default=7, help="measured rounds (default: 7)")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="contenders; all by default")
    parser.add_argument("--output", help="JSON file for the results")
    return parser.parse_args()


ARGS = parse_arguments() if __name__ == "__main__" else None
if ARGS is not None:
    choose_devices(ARGS.platform, num_cpu_devices=ARGS.devices)
    os.environ.setdefault("KERAS_BACKEND", "jax")

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import tnt_jax as tnt
from tnt_jax.distributed.sums.reduction import default_reduction, sum_over_ranks

RATE = 0.01


def make_data(args):
    """Returns inputs and labels of a round."""
    rng = np.random.default_rng(0)
    rows = args.batch_size * args.steps
    x = rng.standard_normal((rows, 784), np.float32)
    return x, rng.integers(0, 10, rows).astype(np.int32)


def make_params(width):
    """Returns parameters of an MLP 784-width-width-10."""
    rng = np.random.default_rng(1)
    sizes = [784, width, width, 10]
    return [
        (
            (rng.standard_normal((a, b), np.float32) / np.sqrt(a)).astype(np.float32),
            np.zeros(b, np.float32),
        )
        for a, b in pairwise(sizes)
    ]


def losses_of(params, x, y):
    """Returns the losses `[rows]` of an MLP."""
    for index, (kernel, bias) in enumerate(params):
        x = x @ kernel + bias
        x = jax.nn.relu(x) if index < len(params) - 1 else x
    return optax.softmax_cross_entropy_with_integer_labels(x, y)


def distributed(args, batches):
    optimizer = optax.sgd(RATE, momentum=0.9)

    @tnt.distributed_step
    def step(state, batch):
        params, opt_state = state

        def loss_fn(params):
            return tnt.compute_average_loss(losses_of(params, batch.inputs, batch.targets))

        loss, grads = tnt.value_and_grad(loss_fn)(params)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), {"loss": loss}

    state = make_params(args.width)
    state = state, optimizer.init(state)

    def run():
        nonlocal state
        for batch in batches:
            state, metrics = step(state, batch)
        return float(metrics["loss"])

    return run


def hand_written(args, batches):
    optimizer, mesh = optax.sgd(RATE, momentum=0.9), tnt.init().mesh
    reduction = default_reduction(mesh.devices.flat[0].platform, mesh.size)

    def step(state, x, y):
        params, opt_state = state

        def loss_fn(params):
            return jnp.sum(losses_of(params, x, y)) / args.batch_size

        varying = jax.tree.map(lambda p: jax.lax.pcast(p, "data", to="varying"), params)
        loss, grads = jax.value_and_grad(loss_fn)(varying)
        loss, grads = sum_over_ranks((loss, grads), reduction)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), {"loss": loss}

    mapped = jax.shard_map(
        step,
        mesh=mesh,
        in_specs=(P(), P("data"), P("data")),
        out_specs=P(),
        check_vma=mesh.size > 1,
    )
    program = jax.jit(mapped, donate_argnums=0)
    params = make_params(args.width)
    state = jax.device_put((params, optimizer.init(params)), NamedSharding(mesh, P()))

    def run():
        nonlocal state
        for batch in batches:
            state, metrics = program(state, batch.inputs, batch.targets)
        return float(metrics["loss"])

    return run


def keras_fit(args, data):
    """Keras's own `fit`, on all devices by its `DataParallel`."""
    import keras

    if args.devices != 1:
        keras.distribution.set_distribution(keras.distribution.DataParallel())
    layers = [keras.layers.Dense(args.width, activation="relu") for _ in range(2)]
    model = keras.Sequential([keras.Input((784,)), *layers, keras.layers.Dense(10)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(RATE, momentum=0.9), loss=loss)
    x, y = data

    def run():
        history = model.fit(x, y, batch_size=args.batch_size, verbose=0, shuffle=False)
        return history.history["loss"][-1]

    return run


def ddp_s(args, data):
    """Returns seconds of each round of PyTorch's DDP, a process for each device."""
    import torch.multiprocessing as processes

    size = max(args.devices, 1)
    found = processes.get_context("spawn").SimpleQueue()
    processes.spawn(_ddp_rank, (size, args, data, found), nprocs=size)
    return found.get()


def _ddp_rank(rank, size, args, data, found):
    import torch
    from torch import nn

    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29541"}
    torch.set_num_threads(max((os.cpu_count() or 1) // size, 1))
    torch.distributed.init_process_group("gloo", rank=rank, world_size=size)
    hidden = [nn.Linear(784, args.width), nn.ReLU(), nn.Linear(args.width, args.width), nn.ReLU()]
    model = nn.parallel.DistributedDataParallel(nn.Sequential(*hidden, nn.Linear(args.width, 10)))
    optimizer = torch.optim.SGD(model.parameters(), RATE, momentum=0.9)
    rows = args.batch_size // size
    x, y = torch.from_numpy(data[0]), torch.from_numpy(data[1]).long()
    durations = []
    for _ in range(args.rounds + 1):
        start_s = time.perf_counter()
        for step in range(args.steps):
            part = slice(step * args.batch_size + rank * rows, None)
            x_part, y_part = x[part][:rows], y[part][:rows]
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x_part), y_part)
            loss.backward()
            optimizer.step()
        loss.item()
        durations.append(time.perf_counter() - start_s)
    if rank == 0:
        found.put(durations[1:])
    torch.distributed.destroy_process_group()


def measured(args, contenders):
    """Returns seconds of each round, by contender, after one round of warm-up."""
    losses = {name: run() for name, run in contenders.items()}
    durations = {name: [] for name in contenders}
    for number in range(args.rounds):
        order = list(contenders) if number % 2 else list(reversed(contenders))
        for name in order:
            start_s = time.perf_counter()
            contenders[name]()
            durations[name].append(time.perf_counter() - start_s)
    ours = [losses[name] for name in ("distributed_step", "hand_written") if name in losses]
    assert np.allclose(ours, ours[0], rtol=1e-4), losses
    return durations


def is_wanted(args, name, module=None):
    """Returns whether a contender takes part: it was asked for, and is installed."""
    import importlib.util

    is_there = module is None or importlib.util.find_spec(module) is not None
    return is_there and (args.only is None or name in args.only)


def main():
    args = ARGS
    tnt.init()
    data = make_data(args)
    batches = list(tnt.distribute(*data, batch_size=args.batch_size, shuffle=False))
    contenders = {}
    if is_wanted(args, "distributed_step"):
        contenders["distributed_step"] = distributed(args, batches)
    if is_wanted(args, "hand_written"):
        contenders["hand_written"] = hand_written(args, batches)
    if is_wanted(args, "keras_fit", "keras"):
        contenders["keras_fit"] = keras_fit(args, data)
    durations = measured(args, contenders)
    if is_wanted(args, "torch_ddp", "torch"):
        durations["torch_ddp"] = ddp_s(args, data)
    results = {
        "arguments": vars(args),
        "versions": {"jax": jax.__version__, "python": platform.python_version()},
        "machine": {"cores": os.cpu_count(), "device": str(jax.devices()[0].device_kind)},
        "ms_per_step": {
            name: [round(1000 * value / args.steps, 4) for value in values]
            for name, values in durations.items()
        },
    }
    for name, values in results["ms_per_step"].items():
        print(
            f"{name:18} median {statistics.median(values):8.3f} ms a step, "
            f"{min(values):.3f} to {max(values):.3f}"
        )
    if {"distributed_step", "hand_written"} <= set(durations):
        pairs = zip(durations["distributed_step"], durations["hand_written"], strict=True)
        results["of_hand_written"] = statistics.median(a / b for a, b in pairs)
        print(f"distributed_step takes {results['of_hand_written']:.3f} of hand_written")
    if args.output:
        with open(args.output, "w") as file:
            json.dump(results, file, indent=1)


if __name__ == "__main__":
    main()
