"""The small convolutional network of the NERSC course "Deep Learning at Scale".

Shape legend: B batch, H height, W width, C channels, D features, K classes.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn


class CNN(nn.Module):
    """Three 3x3 convolutions, each followed by 2x2 max-pooling, and two dense layers.

    The convolutions have 16, 32 and 64 channels.

    Attributes:
        num_classes: Classes K.
        dropout: Fraction of the 128 features dropped in training, from 0 to 1.
        dtype: Dtype of the computation; parameters and logits are float32.
    """

    num_classes: int = 10
    dropout: float = 0.1
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, images: jax.Array, *, train: bool) -> jax.Array:
        """Returns the logits [B, K], float32, of float pixels [B, H, W, C].

        H and W are fixed by the first call and at least 8. In training dropout is on and needs a
        `dropout` key.
        """
        x_BHWC = images.astype(self.dtype)
        for features in (16, 32, 64):
            x_BHWC = nn.relu(nn.Conv(features, (3, 3), dtype=self.dtype)(x_BHWC))
            x_BHWC = nn.max_pool(x_BHWC, (2, 2), strides=(2, 2))
        x_BD = x_BHWC.reshape(x_BHWC.shape[0], -1)
        x_BD = nn.relu(nn.Dense(128, dtype=self.dtype)(x_BD))
        x_BD = nn.Dropout(self.dropout, deterministic=not train)(x_BD)
        return nn.Dense(self.num_classes, name="classifier")(x_BD.astype(jnp.float32))
