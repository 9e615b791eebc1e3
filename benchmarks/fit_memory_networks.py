"""Small networks of usual kinds for `fit_memory.py`: ViT, U-Net, mixture of experts, BERT."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn


class ViT(nn.Module):
    """Patches of 4 x 4 pixels, and layers of attention (Dosovitskiy et al. 2021)."""

    width: int = 128
    num_layers: int = 4

    @nn.compact
    def __call__(self, x: jax.Array, train: bool = False) -> jax.Array:
        x = nn.Conv(self.width, (4, 4), (4, 4))(x)
        x = x.reshape(len(x), -1, self.width)
        x = x + self.param("positions", nn.initializers.normal(0.02), (1, *x.shape[1:]))
        for _ in range(self.num_layers):
            y = nn.LayerNorm()(x)
            y = nn.MultiHeadDotProductAttention(4, deterministic=True)(y)
            x = x + nn.Dropout(0.1, deterministic=not train)(y)
            y = nn.Dense(4 * self.width)(nn.LayerNorm()(x))
            x = x + nn.Dense(self.width)(nn.gelu(y))
        return nn.Dense(10)(jnp.mean(x, axis=1))


class UNet(nn.Module):
    """Two levels down and up, with what was skipped (Ronneberger et al. 2015); GroupNorm."""

    width: int = 32

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        def block(x: jax.Array, width: int) -> jax.Array:
            for _ in range(2):
                x = nn.relu(nn.GroupNorm(8)(nn.Conv(width, (3, 3))(x)))
            return x

        skipped = []
        for level in range(2):
            skipped.append(block(x, self.width * 2**level))
            x = nn.avg_pool(skipped[-1], (2, 2), (2, 2))
        x = block(x, self.width * 4)
        for level in (1, 0):
            x = nn.ConvTranspose(self.width * 2**level, (2, 2), (2, 2))(x)
            x = block(jnp.concatenate([x, skipped[level]], axis=-1), self.width * 2**level)
        return nn.Conv(10, (1, 1))(x)


class MoE(nn.Module):
    """Layers of eight experts, weighed by a softmax for each row."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = nn.Dense(256)(x)
        for _ in range(3):
            gates = nn.softmax(nn.Dense(8)(x))
            experts = nn.DenseGeneral((8, 256))(x)
            x = x + jnp.einsum("be,bed->bd", gates, nn.relu(experts))
        return nn.Dense(10)(x)


def bert() -> Any:
    """Returns a Keras classifier with the layers of BERT, of the size "tiny" (2 layers of 128)."""
    import keras
    from keras import layers

    keras.utils.set_random_seed(0)
    tokens = layers.Input((64,), dtype="int32")
    x = layers.Embedding(1000, 128)(tokens)
    x = layers.Dropout(0.1, seed=1)(layers.LayerNormalization()(x))
    for _ in range(2):
        x = layers.LayerNormalization()(x + layers.MultiHeadAttention(2, 64)(x, x))
        y = layers.Dense(128)(layers.Dense(512, "gelu")(x))
        x = layers.LayerNormalization()(x + y)
    return keras.Model(tokens, layers.Dense(2)(layers.Dense(128, "tanh")(x[:, 0])))
