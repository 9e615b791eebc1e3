"""Predicts, and evaluates, shards of unequal length: `predict_shards.py FOLDER`; every process
writes what it got.
"""

import sys
from pathlib import Path

import flax.linen as nn
import numpy as np

import tnt_jax as tnt

SIZES = [3, 9, 1, 5]

tnt.init()
process = tnt.get_process_index()
model = tnt.Model(nn.Dense(1, kernel_init=nn.initializers.ones))
model.compile("sgd", "mse", steps_per_execution=2)


def shard(size):
    x = np.arange(SIZES[process], dtype=np.float32)[:, None] + 100 * process
    return [(x[i : i + size], x[i : i + size] * 2) for i in range(0, len(x), size)]


results = {
    f"predicted_{size}": model.predict(shard(size), tnt_distribute_dataset=False, verbose=0)
    for size in (1, 4)
}
results["generator"] = model.predict(
    (batch for batch in shard(2)), tnt_distribute_dataset=False, verbose=0
)
results["loss"] = model.evaluate(shard(4), tnt_distribute_dataset=False, verbose=0)
np.savez(Path(sys.argv[1]) / f"{process}.npz", **results)
