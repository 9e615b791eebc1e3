"""Trains a small model of a kind over a mesh, going on from a checkpoint if there is one.

Arguments: the kind, the mesh as JSON, the last epoch, the directory of checkpoints (or -), the file
of results, and whether rules divide operations. Each process writes its mesh beside the results.
"""

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import optax
from flax import linen as nn
from flax import nnx

import tnt_jax as tnt
from tnt_jax import models
from tnt_jax.models.transformer_rules import rules as transformer_rules
from tnt_jax.train.checkpoint import Checkpoints
from tnt_jax.train.checkpoint_arrays import HostArray, is_spread
from tnt_jax.train.state_arrays import state_arrays

ROWS, SIZE, WIDTH, CLASSES = 27, 8, 32, 32


class MLP(nn.Module):
    @nn.compact
    def __call__(self, x, train=False):
        x = nn.relu(nn.Dense(64)(x))
        x = nn.Dropout(0.3, deterministic=not train)(x)
        return nn.Dense(CLASSES)(x)


class ResNet(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.relu(nn.GroupNorm(4)(nn.Conv(16, (3, 3))(x)))
        for _ in range(2):
            y = nn.relu(nn.GroupNorm(4)(nn.Conv(16, (3, 3))(x)))
            x = nn.relu(x + nn.GroupNorm(4)(nn.Conv(16, (3, 3))(y)))
        return nn.Dense(CLASSES)(x.mean((1, 2)))


class OfNnx(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0)
        self.first = nnx.Linear(WIDTH, 64, rngs=rngs)
        self.drop = nnx.Dropout(0.3, rngs=rngs)
        self.norm = nnx.LayerNorm(64, rngs=rngs)
        self.last = nnx.Linear(64, CLASSES, rngs=rngs)

    def __call__(self, x):
        return self.last(self.norm(self.drop(nnx.relu(self.first(x)))))


def transformer():
    return models.Transformer(
        vocab_size=CLASSES, width=16, num_heads=2, filter_dim=64, num_layers=1
    )


def of_keras():
    import keras

    keras.utils.set_random_seed(0)
    return keras.Sequential([
        keras.layers.Input((WIDTH,)),
        keras.layers.Dense(64, activation="relu", kernel_regularizer="l2"),
        keras.layers.Dropout(0.3),
        keras.layers.LayerNormalization(),
        keras.layers.Dense(CLASSES),
    ])  # fmt: skip


class Kind(NamedTuple):
    """A model, how it is optimized, what it is trained on, and its rules for an axis `tensor`."""

    make: Callable[[], Any]
    optimizer: Callable[[], Any]
    data: Callable[[np.random.Generator], tuple[Any, np.ndarray]]
    rules: Sequence[Any] = ()


def numbers(rng):
    return rng.normal(size=(ROWS, WIDTH)).astype(np.float32), rng.integers(0, CLASSES, ROWS)


def images(rng):
    x = rng.normal(size=(ROWS, 8, 8, 3)).astype(np.float32)
    return x, rng.integers(0, CLASSES, ROWS)


def sentences(rng):
    sources, targets = rng.integers(2, CLASSES, (ROWS, 6)), rng.integers(2, CLASSES, (ROWS, 5))
    return (sources, targets), targets


def clipped_adam():
    return optax.chain(optax.clip_by_global_norm(0.5), optax.adam(0.01))


def averaged_sgd():
    return tnt.optimizers.SGD(0.1, use_ema=True, ema_momentum=0.9)


KINDS = {
    "mlp": Kind(
        MLP,
        clipped_adam,
        numbers,
        [("Dense_0/kernel", (None, "tensor")), ("Dense_1/kernel", ("tensor", None))],
    ),
    "resnet": Kind(ResNet, lambda: optax.sgd(0.05, momentum=0.9), images),
    "transformer": Kind(transformer, lambda: optax.adam(1e-3), sentences, transformer_rules),
    "nnx": Kind(OfNnx, averaged_sgd, numbers),
    "keras": Kind(of_keras, lambda: "adam", numbers),
}


def train(kind, mesh, epochs, directory="-", rules=()):
    """Returns the model, its history and its predictions."""
    kind = KINDS[kind]
    x, y = kind.data(np.random.default_rng(0))
    model = tnt.Model(kind.make(), seed=0, mesh=mesh, sharding_rules=rules)
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
