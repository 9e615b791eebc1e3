"""The network of the SVHN exercise, and what a training starts from."""

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn
from flax.training.train_state import TrainState


class Network(nn.Module):
    """Three convolutions and two dense layers; from images, uint8 `[n, 32, 32, 3]`, to logits
    `[n, 10]`.
    """

    @nn.compact
    def __call__(self, images, *, train):
        x = images.astype(jnp.float32) / 127.5 - 1
        for features in (16, 32, 64):
            x = nn.max_pool(nn.relu(nn.Conv(features, (3, 3))(x)), (2, 2), (2, 2))
        x = nn.relu(nn.Dense(128)(x.reshape(len(x), -1)))
        return nn.Dense(10)(nn.Dropout(0.3, deterministic=not train)(x))


def make_optimizer():
    """Returns the optimizer of all trainings."""
    return optax.adam(2e-3)


def make_state(seed):
    """Returns untrained parameters with their optimizer."""
    network = Network()
    images = jnp.zeros((1, 32, 32, 3), jnp.uint8)
    params = network.init(jax.random.key(seed), images, train=False)["params"]
    return TrainState.create(apply_fn=network.apply, params=params, tx=make_optimizer())
