"""Trains a small network on each of some kinds of input and writes the epoch losses:
`train_pipelines.py FOLDER KINDS`.
"""

import json
import sys
from pathlib import Path

import flax.linen as nn
import numpy as np
import tensorflow as tf

import tnt_jax as tnt

FOLDER, *KINDS = sys.argv[1:]


def examples():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(70, 6)).astype(np.float32)
    return x, (x[:, 0] > 0).astype(np.int32)


def tf_data(*, is_failing=False):
    def check(x, y):
        # One process alone meets row 33, because each prepares its own rows only.
        if is_failing:
            tf.debugging.assert_none_equal(x[0], examples()[0][33, 0], "row 33 cannot be used")
        return x * 2.0, y

    data = tf.data.Dataset.from_tensor_slices(examples())
    return (
        data.filter(lambda x, y: x[1] > -1.2)
        .shuffle(50)
        .map(check, num_parallel_calls=2)
        .batch(16)
        .prefetch(1)
    )


def random_access():
    x, y = examples()
    return tnt.data.RandomAccess(
        [(a, b) for a, b in zip(x, y, strict=True)], batch_size=16, shuffle=True, num_workers=2
    )


def own_shard():
    x, y = examples()
    size, process = tnt.get_process_count(), tnt.get_process_index()
    # The master's shard is longer, and none knows its length.
    rows = np.flatnonzero(
        (np.arange(70) % size == process) & ((np.arange(70) < 40) | (process == 0))
    )
    return tf.data.Dataset.from_tensor_slices((x[rows], y[rows])).filter(lambda x, y: True).batch(8)


def failing():
    return tf_data(is_failing=True)


DATA = {make.__name__: make for make in (tf_data, random_access, own_shard, failing)}

tnt.init()
for kind in KINDS:
    model = tnt.Model(nn.Sequential([nn.Dense(8), nn.relu, nn.Dense(2)]), seed=1)
    model.compile(
        optimizer="sgd",
        loss=tnt.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    options = (
        {"epochs": 2, "tnt_distribute_dataset": False} if kind == "own_shard" else {"epochs": 3}
    )
    history = model.fit(DATA[kind](), verbose=0, **options)
    if tnt.is_master_rank():
        (Path(FOLDER) / f"{kind}.json").write_text(json.dumps(history.history))
