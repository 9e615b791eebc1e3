"""Small models of every library, for training on meshes: how each is optimized, and on what."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import listed_models
import numpy as np
import optax
from flax import linen as nn
from flax import nnx

import tnt_jax as tnt
from tnt_jax import models
from tnt_jax.models.transformer import rules as transformer_rules

ROWS, WIDTH, CLASSES = 27, 32, 32


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


def of_keras(*, normalized=False):
    import keras

    keras.utils.set_random_seed(0)
    norm = keras.layers.BatchNormalization if normalized else keras.layers.LayerNormalization
    return keras.Sequential([
        keras.layers.Input((WIDTH,)),
        keras.layers.Dense(64, activation="relu", kernel_regularizer="l2"),
        keras.layers.Dropout(0.3),
        norm(),
        keras.layers.Dense(CLASSES),
    ])  # fmt: skip


def words(rng):
    tokens = rng.integers(0, listed_models.WORDS, (ROWS, 6))
    return tokens, (tokens + 1) % listed_models.WORDS


class Kind(NamedTuple):
    """A model, how it is optimized, what it is trained on, its rules for an axis `tensor`, and its
    list of blocks for an axis `stage`.
    """

    make: Callable[[], Any]
    optimizer: Callable[[], Any]
    data: Callable[[np.random.Generator], tuple[Any, np.ndarray]]
    rules: Sequence[Any] = ()
    blocks: str | None = None


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
    "listed": Kind(
        lambda: listed_models.OfNnx(0.3),
        lambda: optax.sgd(0.01, momentum=0.9),
        words,
        blocks="layers",
    ),
}
