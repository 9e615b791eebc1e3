"""What `fit` costs beside a hand-written JAX loop and Keras 3, in one run.

The model is an MLP 784-256-10 with SGD on synthetic images in memory. All contenders see the same batches in the same order, run for
the same number of steps, and keep loss and accuracy; rounds are interleaved so that a disturbance of the machine hits all alike.

    python benchmarks/fit_overhead.py --devices 1 --batch-size 64 --output benchmarks/results/fit_overhead_1x64.json
"""

import argparse
import json
import os
import platform
import statistics
import time


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--devices", type=int, default=1, help="virtual CPU devices (default: 1)")
    parser.add_argument("--batch-size", type=int, default=64, help="global batch (default: 64)")
    parser.add_argument("--steps", type=int, default=500, help="steps per round (default: 500)")
    parser.add_argument("--rounds", type=int, default=7, help="measured rounds of each contender (default: 7)")
    parser.add_argument("--output", help="JSON file for the results")
    return parser.parse_args()


ARGS = parse_arguments() if __name__ == "__main__" else None
if ARGS is not None:
    # Before JAX starts: the number of devices, and threads enough for their collectives.
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={ARGS.devices}"
    os.environ.setdefault("PJRT_NPROC", str(max(os.cpu_count() or 1, 4 * ARGS.devices)))
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    os.environ.setdefault("KERAS_BACKEND", "jax")

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import tnt_jax as tnt

RATE = 0.01


class MLP(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(10)(nn.relu(nn.Dense(256)(x)))


def make_data(num_examples):
    rng = np.random.default_rng(0)
    return rng.normal(size=(num_examples, 784)).astype(np.float32), rng.integers(0, 10, num_examples).astype(np.int32)


def hand_written(x, y, batch_size, num_devices):
    """A jitted step over all devices, sharded by the compiler, and a Python loop; metrics stay on the device."""
    mesh = Mesh(np.array(jax.devices()[:num_devices]), ("data",), axis_types=(AxisType.Auto,))
    by_row, replicated = NamedSharding(mesh, P("data")), NamedSharding(mesh, P())
    module, optimizer = MLP(), optax.sgd(RATE)
    params = jax.device_put(module.init(jax.random.key(0), x[:1]), replicated)
    state = jax.device_put((params, optimizer.init(params)), replicated)

    def step(state, sums, x, y):
        params, opt_state = state

        def loss_of(params):
            logits = module.apply(params, x)
            return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean(), logits

        (loss, logits), grads = jax.value_and_grad(loss_of, has_aux=True)(params)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        correct = jnp.sum(jnp.argmax(logits, -1) == y)
        return (optax.apply_updates(params, updates), opt_state), (sums[0] + loss * len(y), sums[1] + correct, sums[2] + len(y))

    step = jax.jit(step, donate_argnums=0, out_shardings=(replicated, replicated))
    zero = jax.device_put((jnp.zeros(()), jnp.zeros((), jnp.int32), jnp.zeros((), jnp.int32)), replicated)

    def run():
        nonlocal state
        sums = zero
        order = np.random.default_rng(0).permutation(len(x))
        for start in range(0, len(x), batch_size):
            rows = order[start : start + batch_size]
            state, sums = step(state, sums, *jax.device_put((x[rows], y[rows]), by_row))
        return float(sums[0]) / float(sums[2])

    return run


def tnt_fit(x, y, batch_size, num_devices):
    tnt.init(devices=range(num_devices))
    model = tnt.Model(MLP())
    model.compile(optax.sgd(RATE), loss=tnt.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])
    return lambda: model.fit(x, y, batch_size=batch_size, verbose=0).history["loss"][-1]


def keras_fit(x, y, batch_size, num_devices):
    import keras

    devices = [f"cpu:{index}" for index in range(num_devices)]
    keras.distribution.set_distribution(keras.distribution.DataParallel(devices=devices) if num_devices > 1 else None)
    model = keras.Sequential([keras.Input((784,)), keras.layers.Dense(256, activation="relu"), keras.layers.Dense(10)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(RATE), loss=loss, metrics=["accuracy"])
    return lambda: model.fit(x, y, batch_size=batch_size, verbose=0).history["loss"][-1]


CONTENDERS = {"hand-written loop": hand_written, "tnt_jax fit": tnt_fit, "Keras 3 fit": keras_fit}


def measure(args):
    """Returns microseconds per step for each contender, one value a round."""
    x, y = make_data(args.steps * args.batch_size)
    runs = {name: make(x, y, args.batch_size, args.devices) for name, make in CONTENDERS.items()}
    for run in runs.values():
        run()
        run()
    times = {name: [] for name in runs}
    for _ in range(args.rounds):
        for name, run in runs.items():
            start = time.perf_counter()
            run()
            times[name].append((time.perf_counter() - start) / args.steps * 1e6)
    return times


def report(args, times):
    base = statistics.median(times["hand-written loop"])
    print(
        f"MLP 784-256-10, batch {args.batch_size}, {args.devices} CPU device(s), {args.steps} steps a round, {args.rounds} rounds"
    )
    print(f"{'contender':22} {'median us/step':>15} {'min':>8} {'max':>8} {'of hand-written':>16}")
    for name, values in times.items():
        median = statistics.median(values)
        print(f"{name:22} {median:15.1f} {min(values):8.1f} {max(values):8.1f} {median / base:16.3f}")


def main():
    times = measure(ARGS)
    report(ARGS, times)
    if ARGS.output:
        import keras

        versions = {
            "python": platform.python_version(),
            "jax": jax.__version__,
            "keras": keras.__version__,
            "tnt_jax": tnt.__version__,
        }
        hardware = {"cpus": os.cpu_count(), "machine": platform.machine()}
        with open(ARGS.output, "w") as file:
            json.dump({"arguments": vars(ARGS), "versions": versions, "hardware": hardware, "us_per_step": times}, file, indent=1)


if __name__ == "__main__":
    main()
