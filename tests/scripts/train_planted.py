"""Trains with `fit` or in a custom loop, with a fault that makes ranks matter, if one is named.

tnt-jax verify -- train_planted.py [fault]
"""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn

import tnt_jax as tnt

FAULT = sys.argv[1] if len(sys.argv) > 1 else ""
RNG = np.random.default_rng(0)
X, Y = RNG.normal(size=(60, 8)).astype("f4"), RNG.integers(0, 3, 60)


class Net(nn.Module):
    @nn.compact
    def __call__(self, x, train=False):
        x = nn.relu(nn.Dense(16)(x))
        if FAULT == "batch norm":
            x = nn.BatchNorm(use_running_average=not train)(x)
        else:
            x = nn.Dropout(0.2, deterministic=not train)(x)
        return nn.Dense(3)(x)


def batches():
    for number in range(4):
        rank = tnt.get_process_index() if number else 0
        rows = np.random.default_rng(100 * rank + number).integers(0, len(X), 16)
        yield X[rows], Y[rows]


def fit():
    rate = 0.05 * (tnt.get_size() if FAULT == "rate" else 1)
    model = tnt.Model(Net(), seed=np.random.randint(1000) if FAULT == "weights" else 0)
    optimizer = "sgd" if FAULT else "adam"
    loss = tnt.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(
        getattr(tnt.optimizers, {"sgd": "SGD", "adam": "Adam"}[optimizer])(rate),
        loss,
        metrics=["accuracy"],
    )
    if FAULT == "loader":
        model.fit(batches(), verbose=0)
    else:
        model.fit(X, Y, batch_size=16, epochs=3, verbose=0)
    raise AssertionError("Training has ended.")


def loop():
    dataset = tnt.distribute(X[:55], Y[:55], batch_size=16)
    net = Net()
    optimizer = optax.sgd(0.1)
    params = net.init(jax.random.key(0), X[:1])
    state = (params, optimizer.init(params))

    @tnt.distributed_step
    def train_step(state, batch, key):
        params, opt_state = state

        def loss_fn(params, batch, key):
            logits = net.apply(params, batch.inputs, train=True, rngs={"dropout": key})
            if FAULT == "draws":
                noise = jax.random.normal(jax.random.key(1), logits.shape)
                logits = logits + 0.5 * noise
            losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch.targets)
            if FAULT == "own rows":
                return jax.lax.pmean(jnp.mean(losses), "data")
            return tnt.compute_average_loss(losses)

        loss, grads = tnt.value_and_grad(loss_fn)(params, batch, key)
        updates, opt_state = optimizer.update(grads, opt_state)
        return (optax.apply_updates(params, updates), opt_state), {"loss": loss}

    # Nobody can write there.
    checkpoints = tnt.LoopCheckpoints("/proc/nowhere", on_save_error="raise")
    if FAULT == "loop":
        state = checkpoints.restore(state, dataset)
    while dataset.position["epoch"] < 3:
        for batch in dataset:
            state, _ = train_step(state, batch, jax.random.key(7))
            checkpoints.save(state, dataset)
    raise AssertionError("Training has ended.")


if FAULT in ("loop", "draws", "own rows"):
    loop()
else:
    fit()
