"""Computes with less memory than the compiler's analysis takes for granted; prints the results.

On CPUs the limit is one of address space, and is for arrays: whatever is small has memory of its
own. On a GPU, arrays that nobody uses leave a part of what the compiler states for the step.
"""

import ctypes
import gc
import json
import logging
import resource
import sys
from contextlib import contextmanager
from functools import cache

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

import tnt_jax as tnt

ROWS, WIDTH = 131072, 128
# Number of the process that gets less memory: of two the second.
LEAST = tnt.get_process_count() - 1
_, MOST = resource.getrlimit(resource.RLIMIT_AS)
# Arrays that take the memory of a GPU.
HELD = []
LIBC = ctypes.CDLL(None)
# From malloc.h: the heap is not given back, blocks from 1 MiB on are outside, all threads share it.
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_ARENA_MAX = -1, -3, -8


class Net(nn.Module):
    @nn.compact
    def __call__(self, x, train=False):
        for _ in range(4):
            x = nn.tanh(nn.Dense(WIDTH)(x))
        return nn.Dense(1)(nn.Dropout(0.2, deterministic=not train)(x))


class Block(nn.Module):
    """Its statistics are of all rows, which can therefore not be computed in passes."""

    @nn.compact
    def __call__(self, x, train):
        x = nn.BatchNorm(use_running_average=not train, axis_name="data")(nn.Dense(WIDTH)(x))
        return nn.tanh(nn.Dense(WIDTH)(nn.tanh(x)))


class Blocks(nn.Module):
    @nn.compact
    def __call__(self, x, train=False):
        x = nn.Dense(WIDTH)(x)
        for _ in range(3):
            x = Block()(x, train)
        return nn.Dense(1)(x)


@cache
def keep_a_heap(mib):
    """Gets memory for what is small: without it, glibc ends a thread without thread-local data.

    Every eighth block stays, so that the heap has no place for a large array.
    """
    for name, value in ((M_TRIM_THRESHOLD, -1), (M_MMAP_THRESHOLD, 2**20), (M_ARENA_MAX, 1)):
        assert LIBC.mallopt(name, value) == 1
    LIBC.malloc.restype, LIBC.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
    for number, block in enumerate([LIBC.malloc(2**16) for _ in range(mib * 16)]):
        if number % 8:
            LIBC.free(block)


def leave_on_gpu(nbytes):
    """Takes the memory of the GPU but for a little, in pieces that fill what is between arrays."""
    (device,) = jax.local_devices()
    for size in (2**28, 2**24, 2**20):
        stats = device.memory_stats()
        spare = stats["bytes_limit"] - stats["bytes_in_use"] - nbytes
        HELD.extend(jnp.zeros(size, jnp.uint8, device=device) for _ in range(int(spare) // size))
        jax.block_until_ready(HELD)


def leave(mib):
    """Leaves the process a little more memory than it has."""
    if tnt.get_process_index() == LEAST:
        gc.collect()
        keep_a_heap(256)
        with open("/proc/self/statm") as pages:
            used = int(pages.read().split()[0]) * resource.getpagesize()
        spare = mib * 2**20 // tnt.get_process_count()
        resource.setrlimit(resource.RLIMIT_AS, (used + spare, MOST))


class LeaveOnceChosen(logging.Handler):
    """Leaves the process little memory once a step was chosen and compiled."""

    def __init__(self, mib, share):
        super().__init__()
        self.mib, self.share = mib, share

    def emit(self, record):
        if " chose " not in record.getMessage():
            return
        if jax.default_backend() == "gpu":
            (choice,) = record.args
            leave_on_gpu(self.share * choice.chosen.nbytes)
        else:
            leave(self.mib)


@contextmanager
def little_memory(mib, share):
    """Leaves `mib` of the address space, or a share of a step's memory on a GPU."""
    logger, handler = logging.getLogger("tnt_jax"), LeaveOnceChosen(mib, share)
    logger.addHandler(handler)
    yield
    logger.removeHandler(handler)
    HELD.clear()
    resource.setrlimit(resource.RLIMIT_AS, (MOST, MOST))


class TakeMemory(tnt.callbacks.Callback):
    def on_train_begin(self, logs=None):
        leave(300)


def make_model(module=None):
    model = tnt.Model(module or Net(), seed=0)
    model.compile(tnt.optimizers.SGD(0.1), loss="mse")
    return model


def fit(micro, callbacks=()):
    return trained(make_model(), micro, callbacks)


def fit_in_blocks(micro):
    model = make_model(Blocks())
    losses, _ = trained(model, micro)
    return losses, model._core._used.remat


def trained(model, micro, callbacks=()):
    options = {"batch_size": ROWS, "epochs": 2, "verbose": 0, "shuffle": False}
    history = model.fit(x, y, tnt_micro_batch_size=micro, callbacks=list(callbacks), **options)
    return history.history["loss"], model._core.at_once.training


def evaluate(micro):
    model = make_model()
    loss = model.evaluate(X, Y, batch_size=2 * ROWS, verbose=0, tnt_micro_batch_size=micro)
    return [loss], model._core.at_once.evaluation


def predict(micro):
    model = tnt.Model(Net(), seed=0)
    outputs = model.predict(X, batch_size=2 * ROWS, verbose=0, tnt_micro_batch_size=micro)
    return outputs[::1001, 0].tolist(), model._core.at_once.evaluation


def loop(rows_at_once):
    net = Net()

    @tnt.distributed_step(rows_at_once=rows_at_once)
    def step(params, batch, key):
        def loss_fn(params, batch, key):
            options = {"train": True, "rngs": {"dropout": key}}
            outputs = net.apply({"params": params}, batch.inputs, **options)
            return tnt.compute_average_loss((outputs - batch.targets)[:, 0] ** 2)

        loss, grads = tnt.value_and_grad(loss_fn)(params, batch, key)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), {"loss": loss}

    params, losses = net.init(jax.random.key(0), x[:1])["params"], []
    dataset = tnt.distribute(x, y, batch_size=ROWS, shuffle=False)
    for _ in range(2):
        for batch in dataset:
            params, metrics = step(params, batch, jax.random.key(1))
            losses.append(float(metrics["loss"]))
    return losses, step._engine.get()._chosen.get(False)


X = np.random.default_rng(0).normal(size=(2 * ROWS, 16)).astype(np.float32)
Y = X[:, :1]
x, y = X[:ROWS], Y[:ROWS]
if "without passes" in sys.argv:
    fit(None, [TakeMemory()])
found = {}
for call, mib, share in (
    (fit, 300, 0.6),
    (fit_in_blocks, 700, 0.7),
    (evaluate, 200, 0.6),
    (predict, 200, 0.6),
    (loop, 300, 0.6),
):
    whole = call(None)
    with little_memory(mib, share):
        found[call.__name__] = (whole, call("auto"))
print(json.dumps(found))
