"""Trains with less memory than the compiler's analysis takes for granted; prints what came of it."""

import json
import resource
import sys

import flax.linen as nn
import numpy as np

import tnt_jax as tnt

ROWS, WIDTH = 32768, 512
SPARE_BYTES = 300 * 2**20 // tnt.get_process_count()
# Number of the process that gets less memory: of two the second.
LEAST = tnt.get_process_count() - 1


class Net(nn.Module):
    @nn.compact
    def __call__(self, x, train=False):
        for _ in range(4):
            x = nn.tanh(nn.Dense(WIDTH)(x))
        return nn.Dense(1)(nn.Dropout(0.2, deterministic=not train)(x))


class TakeMemory(tnt.callbacks.Callback):
    """Leaves the process a little more than it has, once the step was chosen and compiled."""

    def on_train_begin(self, logs=None):
        if tnt.get_process_index() != LEAST:
            return
        with open("/proc/self/statm") as pages:
            used = int(pages.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + SPARE_BYTES,) * 2)


def train(micro, callbacks=()):
    model = tnt.Model(Net(), seed=0)
    model.compile(tnt.optimizers.SGD(0.1), loss="mse")
    options = {"batch_size": ROWS, "epochs": 2, "verbose": 0, "shuffle": False}
    history = model.fit(x, y, tnt_micro_batch_size=micro, callbacks=list(callbacks), **options)
    return history.history["loss"], model._core.at_once.training


x = np.random.default_rng(0).normal(size=(ROWS, 16)).astype(np.float32)
y = x[:, :1]
if "without passes" in sys.argv:
    train(None, [TakeMemory()])
print(json.dumps([train(None), train("auto", [TakeMemory()])]))
