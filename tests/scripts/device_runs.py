"""Trains or computes on the devices that JAX finds, and prints JSON: `device_runs.py WHAT [WORDS]`.

The tests marked `gpu` run it on GPUs; on CPUs it runs as well, except `attention`.
"""

import gc
import json
import sys
from pathlib import Path

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

import tnt_jax as tnt
from tnt_jax.models.attention import fastest_implementation


class Net(nn.Module):
    """A network whose gradients fill several buckets."""

    @nn.compact
    def __call__(self, x, train):
        x = nn.relu(nn.Conv(16, (3, 3))(x))
        x = nn.Dropout(0.2, deterministic=not train)(x.mean((1, 2)))
        for _ in range(6):
            x = nn.relu(nn.Dense(512)(x))
        return nn.Dense(10)(x)


def train(num_devices, *, reproducible):
    """Returns history and weights of two epochs with an incomplete last batch."""
    tnt.init(devices=range(num_devices))
    rng = np.random.default_rng(0)
    x = rng.standard_normal((90, 8, 8, 3)).astype(np.float32)
    y = rng.integers(0, 10, 90).astype(np.int32)
    options = {"reproducible": True, "virtual_ranks": 8} if reproducible else {}
    model = tnt.Model(Net(), seed=3, fusion_threshold=1024, **options)
    loss = tnt.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(tnt.optimizers.SGD(0.05), loss=loss)
    history = model.fit(x, y, batch_size=32, epochs=2, verbose=0).history["loss"]
    weights = np.concatenate([np.ravel(w) for w in jax.tree.leaves(model.variables["params"])])
    return history, weights


def weights(num_devices, kind):
    history, found = train(int(num_devices), reproducible=kind == "reproducible")
    digest = found.astype(np.float32).tobytes().hex()
    return {"history": history, "weights": digest}


def trace(folder):
    """Writes the profiler's trace of a training on all devices that has been compiled before."""
    train(jax.device_count(), reproducible=False)
    with jax.profiler.trace(folder):
        train(jax.device_count(), reproducible=False)
    return {"trace": str(next(Path(folder).rglob("*.trace.json.gz")))}


def beside():
    """Returns what a fit gives alone, and beside arrays that leave half of what it needs."""
    (device,), num_rows = jax.local_devices(), 2**19
    x = np.random.default_rng(0).standard_normal((num_rows, 64)).astype(np.float32)
    layers = [layer for _ in range(8) for layer in (nn.Dense(256), nn.tanh)]

    def fit():
        model = tnt.Model(nn.Sequential([*layers, nn.Dense(1)]), seed=0)
        model.compile(tnt.optimizers.SGD(0.1), loss="mse")
        options = {"batch_size": num_rows, "epochs": 2, "verbose": 0, "shuffle": False}
        history = model.fit(x, x[:, :1], tnt_micro_batch_size="auto", **options).history
        found = {"losses": history["loss"], "rows": model._core.at_once.training}
        return model._core.memory_choice.chosen.nbytes, found

    nbytes, alone = fit()
    gc.collect()
    stats = device.memory_stats()
    held = jnp.zeros(stats["bytes_limit"] - stats["bytes_in_use"] - nbytes // 2, jnp.uint8)
    jax.block_until_ready(held)
    return {"alone": alone, "beside": fit()[1], "num_rows": num_rows}


def attention():
    """Returns which kernel is chosen and how far its results are from those of XLA."""
    keys = jax.random.split(jax.random.key(0), 3)
    query, key, value = (jax.random.normal(k, (2, 64, 4, 64), jnp.bfloat16) for k in keys)
    chosen = fastest_implementation(query)

    def loss(implementation):
        def of(query):
            out = jax.nn.dot_product_attention(
                query, key, value, is_causal=True, implementation=implementation
            )
            return jnp.sum(out.astype(jnp.float32) ** 2), out

        (_, out), grad = jax.jit(jax.value_and_grad(of, has_aux=True))(query)
        return np.asarray(out, np.float32), np.asarray(grad, np.float32)

    errors = [
        float(np.abs(a - b).max() / np.abs(b).max())
        for a, b in zip(loss(chosen), loss("xla"), strict=True)
    ]
    return {"implementation": chosen, "errors": errors}


if __name__ == "__main__":
    run = {f.__name__: f for f in (weights, trace, attention, beside)}[sys.argv[1]]
    print("RESULT " + json.dumps({"platform": jax.default_backend(), **run(*sys.argv[2:])}))
