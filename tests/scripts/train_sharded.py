"""Trains a small model over a mesh, going on from a checkpoint if there is one.

Arguments: the mesh as JSON, the last epoch, the directory of checkpoints (or -), the file of
results, and whether rules divide operations.
"""

import json
import sys

import jax
import numpy as np
import optax
from flax import linen as nn

import tnt_jax as tnt
from tnt_jax.train.checkpoint import Checkpoints
from tnt_jax.train.checkpoint_arrays import HostArray, is_spread
from tnt_jax.train.state_arrays import state_arrays

RULES = [("Dense_0/kernel", (None, "tensor")), ("Dense_1/kernel", ("tensor", None))]


class Net(nn.Module):
    @nn.compact
    def __call__(self, x, train=False):
        x = nn.relu(nn.Dense(64)(x))
        x = nn.Dropout(0.3, deterministic=not train)(x)
        return nn.Dense(32)(x)


def make_data():
    rng = np.random.default_rng(0)
    return rng.normal(size=(27, 32)).astype(np.float32), rng.integers(0, 32, 27)


def train(mesh, epochs, directory, rules=()):
    x, y = make_data()
    model = tnt.Model(Net(), seed=0, mesh=mesh, sharding_rules=rules)
    optimizer = optax.chain(optax.clip_by_global_norm(0.5), optax.adam(0.01))
    loss = tnt.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss=loss, metrics=["accuracy"])
    backup = tnt.callbacks.BackupAndRestore(directory, delete_checkpoint=False)
    callbacks = [] if directory == "-" else [backup]
    history = model.fit(x, y, batch_size=8, epochs=epochs, verbose=0, callbacks=callbacks).history
    return model, history, model.predict(x, batch_size=8, verbose=0)


def largest_share_read(model, directory):
    """Returns the largest part of the spread arrays that a process reads of a checkpoint."""
    spread = {path for path, x in state_arrays(model.state).items() if is_spread(x)}
    assert spread
    saved = Checkpoints(directory, prefix="tnt_jax_backup").read(like=model.state)
    shares = []
    for path in spread:
        read = saved.arrays[path]
        assert isinstance(read, HostArray)
        shares.append(sum(v.size for _, v in read.shards) / np.prod(read.shape))
    return max(shares)


def main(mesh, epochs, directory, target, ruled):
    mesh = json.loads(mesh)
    model, history, predicted = train(mesh, int(epochs), directory, RULES if int(ruled) else ())
    share = -1.0 if directory == "-" else largest_share_read(model, directory)
    weights = model.get_weights()
    if tnt.is_master_rank():
        named = {f"w{i}": w for i, w in enumerate(weights)}
        losses = history.get("loss", [])
        np.savez(target, predicted=predicted, loss=losses, share=share, **named)
    print(f"rank {tnt.get_rank()} of {tnt.get_size()}, {jax.local_device_count()} devices")


if __name__ == "__main__":
    main(*sys.argv[1:])
