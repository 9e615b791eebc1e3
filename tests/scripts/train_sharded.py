"""Trains a small model of a kind over a mesh, going on from a checkpoint if there is one.

Arguments: the kind, the mesh as JSON, the last epoch, the directory of checkpoints (or -), the file
of results, and whether rules divide operations. Each process writes its mesh beside the results.
"""

import json
import sys
from pathlib import Path

import jax
import numpy as np
from sharded_kinds import KINDS

import tnt_jax as tnt
from tnt_jax.train.checkpoints.checkpoint import Checkpoints
from tnt_jax.train.checkpoints.files import HostArray, is_spread
from tnt_jax.train.state import state_arrays

SIZE = 8


def train(kind, mesh, epochs, directory="-", rules=()):
    """Returns the model, its history and its predictions."""
    kind = KINDS[kind]
    x, y = kind.data(np.random.default_rng(0))
    pipeline = None
    if mesh is not None and "stage" in mesh:
        pipeline = tnt.Pipeline(kind.blocks, microbatches=3)
    model = tnt.Model(kind.make(), seed=0, mesh=mesh, sharding_rules=rules, pipeline=pipeline)
    loss = tnt.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(kind.optimizer(), loss=loss, metrics=["accuracy"])
    backup = tnt.callbacks.BackupAndRestore(directory, delete_checkpoint=False)
    callbacks = [] if directory == "-" else [backup]
    history = model.fit(
        x, y, batch_size=SIZE, epochs=epochs, verbose=0, callbacks=callbacks
    ).history
    return model, history, model.predict(x, batch_size=SIZE, verbose=0)


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


def main(kind, mesh, epochs, directory, target, ruled):
    rules = KINDS[kind].rules if int(ruled) else ()
    model, history, predicted = train(kind, json.loads(mesh), int(epochs), directory, rules)
    share = -1.0 if directory == "-" else largest_share_read(model, directory)
    weights = model.get_weights()
    if tnt.is_master_rank():
        arrays = {f"w{i:03}": w for i, w in enumerate(weights)}
        logs = {f"history {name}": values for name, values in history.items()}
        np.savez(target, predicted=predicted, share=share, **arrays, **logs)
    mesh = jax.tree.leaves(model.state.params)[0].sharding.mesh
    Path(f"{target}.mesh{tnt.get_rank()}").write_text(str(dict(mesh.shape)))


if __name__ == "__main__":
    main(*sys.argv[1:])
