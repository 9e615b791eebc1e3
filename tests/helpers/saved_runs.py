"""A small model that is trained before and after it is saved."""

import flax.linen as nn
import numpy as np
from keras_beside import data

import tnt_jax as tnt


class WithState(nn.Module):
    """Has batch statistics and dropout, so that every part of the state matters."""

    @nn.compact
    def __call__(self, x, train):
        x = nn.BatchNorm(use_running_average=not train)(nn.Dense(8)(x))
        return nn.Dense(3)(nn.Dropout(0.3, deterministic=not train)(nn.relu(x)))


def make_model(*, seed=0, optimizer=None):
    model = tnt.Model(WithState(), seed=seed)
    model.compile(
        optimizer or tnt.optimizers.SGD(0.05, momentum=0.9),
        loss=tnt.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    return model


def fit(model, **options):
    x, y = data()
    return model.fit(x, y, **({"batch_size": 8, "verbose": 0, "epochs": 2} | options))


def assert_equal_weights(a, b):
    assert len(a) == len(b)
    for mine, theirs in zip(a, b, strict=True):
        np.testing.assert_array_equal(mine, theirs)
