"""What `fit` costs beside a hand-written JAX loop and Keras 3, in one run.

All contenders train the same network with SGD on the same batches in the same order, run for the
same number of steps, and keep loss and accuracy; rounds are interleaved so that a disturbance of
the machine hits all alike. The networks are an MLP 784-256-10, ResNet-20 on 32 x 32 pixels, and the
tiny Transformer on sentences of 32 tokens. Keras takes part with a model of its own where there is
one, and with its `FlaxLayer` around the same Flax module.

    python benchmarks/fit_overhead.py --devices 1 --batch-size 64 \
        --output benchmarks/results/fit_overhead_1x64.json
    python benchmarks/fit_overhead.py --model resnet20 --batch-size 16 --steps 20

`--busy N` lets N processes compute beside all contenders, one on each core in turn:

    python benchmarks/fit_overhead.py --busy 2 --output benchmarks/results/fit_overhead_busy.json
"""

import argparse
import json
import os
import statistics
import time
from pathlib import Path

from machine import add_platform, busy_processes, choose_devices, environment

MODELS = ("mlp", "resnet20", "transformer_tiny")


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=MODELS, default="mlp", help="network (default: mlp)")
    add_platform(parser)
    parser.add_argument(
        "--devices", type=int, default=1, help="devices; virtual ones on CPUs (default: 1)"
    )
    parser.add_argument(
        "--busy", type=int, default=0, metavar="N",
        help="processes that compute beside it, one on each core in turn (default: 0)",
    )  # fmt: skip
    parser.add_argument("--batch-size", type=int, default=64, help="global batch (default: 64)")
    parser.add_argument("--steps", type=int, default=500, help="steps per round (default: 500)")
    parser.add_argument(
        "--rounds", type=int, default=7, help="measured rounds of each contender (default: 7)"
    )
    parser.add_argument(
        "--per-program",
        type=int,
        default=20,
        help="steps_per_execution of the fused contenders (default: 20)",
    )
    parser.add_argument("--only", nargs="+", metavar="NAME", help="contenders; all by default")
    parser.add_argument("--output", help="JSON file for the results")
    return parser.parse_args()


ARGS = parse_arguments() if __name__ == "__main__" else None
if ARGS is not None:
    choose_devices(ARGS.platform, num_cpu_devices=ARGS.devices)
    os.environ.setdefault("KERAS_BACKEND", "jax")

import flax.linen as nn
import jax
import jax.numpy as jnp
import keras
import numpy as np
import optax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import tnt_jax as tnt

RATE = 0.01
VOCAB, LENGTH = 1000, 32


class MLP(nn.Module):
    @nn.compact
    def __call__(self, x, train):
        return nn.Dense(10)(nn.relu(nn.Dense(256)(x)))


class Translation(nn.Module):
    """The tiny Transformer over pairs of sentences in one array `[batch, 2, length]`."""

    @nn.compact
    def __call__(self, x, train):
        transformer = tnt.models.Transformer(**tnt.models.PARAM_SETS["tiny"], vocab_size=VOCAB)
        return transformer(x[:, 0], x[:, 1], train=train)


def make_problem(name, num_examples):
    """Returns module, inputs and labels."""
    rng = np.random.default_rng(0)
    if name == "transformer_tiny":
        tokens = rng.integers(1, VOCAB, (num_examples, 2, LENGTH)).astype(np.int32)
        return Translation(), tokens, tokens[:, 1]
    shape = (784,) if name == "mlp" else (32, 32, 3)
    module = MLP() if name == "mlp" else tnt.models.resnet20(num_classes=10)
    x = rng.standard_normal((num_examples, *shape), np.float32)
    return module, x, rng.integers(0, 10, num_examples).astype(np.int32)


def hand_written(args, module, x, y):
    """A jitted step over all devices, sharded by the compiler, and a Python loop; metrics stay on
    the device.
    """
    mesh = Mesh(np.array(jax.devices()[: args.devices]), ("data",), axis_types=(AxisType.Auto,))
    by_row, replicated = NamedSharding(mesh, P("data")), NamedSharding(mesh, P())
    optimizer = optax.sgd(RATE)
    variables = dict(module.init(jax.random.key(0), x[:1], train=False))
    params = jax.device_put(variables.pop("params"), replicated)
    state = jax.device_put((params, variables, optimizer.init(params), np.int32(0)), replicated)

    def step(state, sums, x, y):
        params, variables, opt_state, index = state
        rngs = {"dropout": jax.random.fold_in(jax.random.key(0), index)}

        def loss_of(params):
            outputs, changed = module.apply(
                {"params": params, **variables}, x, train=True, rngs=rngs, mutable=list(variables)
            )
            return optax.softmax_cross_entropy_with_integer_labels(outputs, y).mean(), (
                outputs,
                changed,
            )

        (loss, (outputs, variables)), grads = jax.value_and_grad(loss_of, has_aux=True)(params)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        correct = jnp.sum(jnp.argmax(outputs, -1) == y)
        state = optax.apply_updates(params, updates), variables, opt_state, index + 1
        return state, (sums[0] + loss * len(y), sums[1] + correct, sums[2] + len(y))

    step = jax.jit(step, donate_argnums=0, out_shardings=(replicated, replicated))
    zero = jax.device_put(
        (jnp.zeros(()), jnp.zeros((), jnp.int32), jnp.zeros((), jnp.int32)), replicated
    )

    def run():
        nonlocal state
        sums = zero
        order = np.random.default_rng(0).permutation(len(x))
        for start in range(0, len(x), args.batch_size):
            rows = order[start : start + args.batch_size]
            state, sums = step(state, sums, *jax.device_put((x[rows], y[rows]), by_row))
        return float(sums[0]) / float(sums[2])

    return run


def tnt_fit(args, module, x, y, *, fused=False):
    tnt.init(devices=range(args.devices))
    model = tnt.Model(module)
    loss = tnt.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(
        optax.sgd(RATE),
        loss=loss,
        metrics=["accuracy"],
        steps_per_execution=args.per_program if fused else 1,
    )
    return lambda: model.fit(x, y, batch_size=args.batch_size, verbose=0).history["loss"][-1]


def keras_model(args, module, x):
    """A Keras model of the same network: of Keras layers for the MLP, else None."""
    if args.model != "mlp":
        return None
    return keras.Sequential(
        [keras.Input((784,)), keras.layers.Dense(256, activation="relu"), keras.layers.Dense(10)]
    )


def flax_layer(args, module, x):
    """Keras's wrapper of the same Flax module."""

    def call(module, inputs, training):
        # Keras initialises layers with float inputs, whatever the data is.
        return module(inputs.astype(x.dtype), train=training)

    variables = dict(module.init(jax.random.key(0), x[:1], train=False))
    layer = keras.layers.FlaxLayer(module, method=call, variables=variables)
    return keras.Sequential([keras.Input(x.shape[1:], dtype=str(x.dtype)), layer])


def keras_fit(args, module, x, y, *, make, wrapped=False, fused=False):
    devices = keras.distribution.list_devices()[: args.devices]
    several = args.devices > 1 and not wrapped
    keras.distribution.set_distribution(
        keras.distribution.DataParallel(devices=devices) if several else None
    )
    model = make(args, module, x)
    if model is None:
        return None
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    trained = tnt.Model(model) if wrapped else model
    trained.compile(
        keras.optimizers.SGD(RATE),
        loss=loss,
        metrics=["accuracy"],
        steps_per_execution=args.per_program if fused else 1,
    )
    keras.distribution.set_distribution(None)

    def run():
        keras.distribution.set_distribution(
            keras.distribution.DataParallel(devices=devices) if several else None
        )
        loss = trained.fit(x, y, batch_size=args.batch_size, verbose=0).history["loss"][-1]
        keras.distribution.set_distribution(None)
        return loss

    return run


CONTENDERS = {
    "hand-written loop": hand_written,
    "tnt_jax fit": tnt_fit,
    "tnt_jax fit, fused": lambda *a: tnt_fit(*a, fused=True),
    "Keras 3 fit": lambda *a: keras_fit(*a, make=keras_model),
    "Keras 3 fit, fused": lambda *a: keras_fit(*a, make=keras_model, fused=True),
    "Keras model in tnt_jax": lambda *a: keras_fit(*a, make=keras_model, wrapped=True),
    "Keras model in tnt_jax, fused": lambda *a: keras_fit(
        *a, make=keras_model, wrapped=True, fused=True
    ),
    "Keras 3 FlaxLayer": lambda *a: keras_fit(*a, make=flax_layer),
}


def measure(args):
    """Returns microseconds per step for each contender, one value a round."""
    module, x, y = make_problem(args.model, args.steps * args.batch_size)
    names = args.only or list(CONTENDERS)
    made = {name: CONTENDERS[name](args, module, x, y) for name in names}
    runs = {name: run for name, run in made.items() if run is not None}
    losses = {name: (run(), run()) for name, run in runs.items()}
    times = {name: [] for name in runs}
    for _ in range(args.rounds):
        for name, run in runs.items():
            start = time.perf_counter()
            run()
            times[name].append((time.perf_counter() - start) / args.steps * 1e6)
    print(
        "loss of the first two epochs:",
        {name: [round(float(x), 3) for x in pair] for name, pair in losses.items()},
    )
    return times


def report(args, times):
    base = statistics.median(next(iter(times.values())))
    print(
        f"{args.model}, batch {args.batch_size}, {args.devices} device(s) "
        f"({jax.devices()[0].device_kind}), {args.busy} busy process(es), {args.steps} steps a "
        f"round, {args.rounds} rounds; fused: {args.per_program} steps a program"
    )
    print(f"{'contender':30} {'median us/step':>15} {'min':>10} {'max':>10} {'of the first':>13}")
    for name, values in times.items():
        median = statistics.median(values)
        print(
            f"{name:30} {median:15.1f} {min(values):10.1f} {max(values):10.1f} "
            f"{median / base:13.3f}"
        )


def main():
    with busy_processes(ARGS.busy):
        times = measure(ARGS)
    report(ARGS, times)
    if ARGS.output:
        found = {
            "arguments": vars(ARGS),
            **environment(),
            "device": jax.devices()[0].device_kind,
            "us_per_step": times,
        }
        Path(ARGS.output).write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
