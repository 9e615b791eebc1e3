"""Trains a small network on one kind of input and writes the epoch losses: `train_pipelines.py KIND FILE`."""

import json
import sys

import flax.linen as nn
import numpy as np
import tensorflow as tf

import tnt_jax as tnt

KIND, FILE = sys.argv[1:]


def examples():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(70, 6)).astype(np.float32)
    return x, (x[:, 0] > 0).astype(np.int32)


def tf_data():
    def check(x, y):
        # One process alone meets row 33, because each prepares its own rows only.
        if KIND == "failing":
            tf.debugging.assert_none_equal(x[0], examples()[0][33, 0], "row 33 cannot be used")
        return x * 2.0, y

    data = tf.data.Dataset.from_tensor_slices(examples())
    return data.filter(lambda x, y: x[1] > -1.2).shuffle(50).map(check, num_parallel_calls=2).batch(16).prefetch(1)


def random_access():
    x, y = examples()
    return tnt.data.RandomAccess([(a, b) for a, b in zip(x, y, strict=True)], batch_size=16, shuffle=True, num_workers=2)


def own_shard():
    x, y = examples()
    size, process = tnt.get_process_count(), tnt.get_process_index()
    # The master's shard is longer, and none knows its length.
    rows = np.flatnonzero((np.arange(70) % size == process) & ((np.arange(70) < 40) | (process == 0)))
    return tf.data.Dataset.from_tensor_slices((x[rows], y[rows])).filter(lambda x, y: True).batch(8)


tnt.init()
model = tnt.Model(nn.Sequential([nn.Dense(8), nn.relu, nn.Dense(2)]), seed=1)
model.compile(optimizer="sgd", loss=tnt.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])
if KIND == "own_shard":
    history = model.fit(own_shard(), epochs=2, verbose=0, tnt_distribute_dataset=False)
else:
    history = model.fit(random_access() if KIND == "random_access" else tf_data(), epochs=3, verbose=0)
if tnt.is_master_rank():
    with open(FILE, "w") as file:
        json.dump(history.history, file)
