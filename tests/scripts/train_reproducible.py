"""Trains reproducibly on the devices of the job and writes digests of the results, as JSON, from
the master.
"""

import hashlib
import json
import os
import sys
from pathlib import Path

import flax.linen as nn
import jax
import numpy as np
import optax

import tnt_jax as tnt


class Net(nn.Module):
    @nn.compact
    def __call__(self, x, train):
        x = nn.relu(nn.BatchNorm(use_running_average=not train)(nn.Conv(8, (3, 3))(x)))
        x = nn.Dropout(0.3, deterministic=not train)(x.reshape(x.shape[0], -1))
        return nn.Dense(3)(nn.relu(nn.Dense(64)(x)))


def digest(tree):
    return [hashlib.md5(np.asarray(leaf).tobytes()).hexdigest() for leaf in jax.tree.leaves(tree)]


def main():
    generator = np.random.default_rng(0)
    x, y = generator.normal(size=(43, 8, 8, 2)).astype(np.float32), generator.integers(0, 3, 43)
    model = tnt.Model(Net(), reproducible=True, virtual_ranks=4, seed=3)
    loss = tnt.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer=optax.adam(0.01), loss=loss, metrics=["accuracy"])
    # Virtual ranks have 11, 11, 11 and 10 rows.
    history = model.fit(x, y, batch_size=43, epochs=4, verbose=0).history
    outputs = model.predict(x, batch_size=43, verbose=0)
    state = model.state
    results = {
        "history": history,
        "state": digest((state.params, state.model_state, state.opt_state)),
        "outputs": digest(outputs),
        "threads": os.environ["PJRT_NPROC"],
    }
    if tnt.is_master_rank():
        Path(sys.argv[1]).write_text(json.dumps(results))


main()
