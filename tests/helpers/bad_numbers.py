"""A network with dropout and batch statistics, and rows to train it on."""

import flax.linen as nn
import jax
import numpy as np

import tnt_jax as tnt
from tnt_jax.train.contracts import Batch

NAN_ROW = 19


class Net(nn.Module):
    plain: bool = False

    @nn.compact
    def __call__(self, x, train=False):
        if self.plain:
            return nn.Dense(1)(x)
        x = nn.BatchNorm(use_running_average=not train, momentum=0.9)(nn.Dense(8)(x))
        return nn.Dense(1)(nn.Dropout(0.3, deterministic=not train)(nn.relu(x)))


def rows(count):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(count, 5)).astype(np.float32)
    return x, (x[:, :1] ** 2 + 1).astype(np.float32)


def batches():
    yield Batch(*rows(8))


def compiled(*, on_nan, optimizer=None, net=None, steps_per_execution=1, **options):
    model = tnt.Model(Net() if net is None else net, seed=1, **options)
    optimizer = tnt.optimizers.Adam(0.01) if optimizer is None else optimizer()
    model.compile(optimizer, loss="mse", on_nan=on_nan, steps_per_execution=steps_per_execution)
    return model


def fit(x, y, *, epochs=2, callbacks=None, **options):
    model = compiled(**options)
    history = model.fit(
        x, y, batch_size=8, epochs=epochs, shuffle=False, verbose=0, callbacks=callbacks
    ).history
    return model, history


def leaves(tree):
    return [np.array(leaf) for leaf in jax.tree.leaves(tree)]
