"""Trains until one process runs a line of Python at one place.

The arguments: the line, the place, the process, and how to train.
"""

import os
import sys
import time
from pathlib import Path

import flax.linen as nn
import numpy as np

import tnt_jax as tnt

what, where, who = sys.argv[1], sys.argv[2], int(sys.argv[3])
mode = sys.argv[4] if len(sys.argv) > 4 else "fit"


def act(here):
    if here == where and tnt.get_process_index() == who:
        Path(os.environ["FAULT_FILE"]).write_text(str(time.time()))
        exec(what)  # THE FAULT.


class Act(tnt.callbacks.Callback):
    def on_train_begin(self, logs=None):
        if seconds := float(os.environ.get("LONG_CALLBACK_S", 0)):
            time.sleep(seconds + tnt.get_rank())

    def on_train_batch_begin(self, batch, logs=None):
        if batch == 2:
            act("callback")

    def on_predict_batch_begin(self, batch, logs=None):
        if batch == 2:
            act("callback")

    def on_test_batch_begin(self, batch, logs=None):
        act("validation")
        if batch == 2:
            act("callback")

    def on_epoch_end(self, epoch, logs=None):
        act("epoch end")


def batches():
    while True:
        for index in range(8):
            if index == 2:
                act("data")
            yield np.zeros((4, 3), "f4"), np.zeros((4, 1), "f4")


class Dense(nn.Module):
    @nn.compact
    def __call__(self, x):
        act("trace")
        return nn.Dense(1)(x)


def train():
    global model
    model = tnt.Model(Dense(), reproducible=True) if mode == "reproducible" else tnt.Model(Dense())
    model.compile("sgd", loss="mse")
    act("before")
    steps = {"steps": 8, "callbacks": [Act()], "verbose": 0}
    if mode == "predict":
        model.build((None, 3))
        while True:
            model.predict((x for x, _ in batches()), **steps)
    if mode == "evaluate":
        while True:
            model.evaluate(batches(), **steps)
    model.fit(
        batches(), steps_per_epoch=8, epochs=3 if where == "after" else 10**6, verbose=0,
        callbacks=[Act()], validation_data=batches(), validation_steps=3,
    )  # fmt: skip
    act("after")


def loop():
    def step(state, batch):
        def loss_fn(w):
            act("trace")
            return tnt.compute_average_loss(((batch.inputs @ w - batch.targets) ** 2)[:, 0])

        loss, grads = tnt.value_and_grad(loss_fn)(state)
        return state - 0.1 * grads, {"loss": loss}

    train_step = tnt.distributed_step(step)
    data = tnt.distribute(batches(), steps_per_epoch=8)
    state = np.zeros((3, 1), "f4")
    while True:
        for batch in data:
            state, metrics = train_step(state, batch)
            if batch.index == 2:
                act("callback")
            float(metrics["loss"])
        act("epoch end")


train() if mode != "loop" else loop()
