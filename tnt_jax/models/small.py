"""Small networks of courses: a convolutional one for images, and a classifier of texts.

Shape legend: B batch, H height, W width, C channels, D features, T tokens, K classes or outputs.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

PAD_ID = 0


class CNN(nn.Module):
    """3x3 convolutions of 16, 32 and 64 channels, each with 2x2 max-pooling, and two dense layers.

    It is the small network of the NERSC course "Deep Learning at Scale".

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


class TextClassifier(nn.Module):
    """Averages a text's word vectors and applies dense layers with ReLU, then one of `num_outputs`.

    It is the NNLM model of the `tf.distribute` lesson, which takes pretrained word vectors from the
    neural language model of Bengio et al. 2003 (NNLM-128); here they are trained with the rest. The
    mean of a text without words is zero.

    Attributes:
        vocab_size: Number of token ids, the padding id 0 included.
        num_outputs: Outputs K: 1 for binary classification, else the number of classes.
        embedding_dim: Length D of a word vector.
        hidden_dims: Widths of the hidden dense layers.
        dropout: Fraction of the mean vector dropped in training, from 0 to 1; the lesson has no
            dropout.
        dtype: Dtype of the computation; parameters and logits are float32.
    """

    vocab_size: int
    num_outputs: int = 1
    embedding_dim: int = 128
    hidden_dims: Sequence[int] = (256, 64)
    dropout: float = 0.0
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, tokens: jax.Array, *, train: bool) -> jax.Array:
        """Returns the logits [B, K], float32, of token ids [B, T].

        The id 0 is padding at any position. If K is 1, they are those of the positive class. In
        training dropout is on and needs a `dropout` key.
        """
        embed = nn.Embed(self.vocab_size, self.embedding_dim, dtype=self.dtype, name="embedding")
        weight_BT1 = (tokens != PAD_ID)[..., None].astype(jnp.float32)
        total_BD = jnp.sum(embed(tokens).astype(jnp.float32) * weight_BT1, axis=1)
        x_BD = (total_BD / jnp.maximum(jnp.sum(weight_BT1, axis=1), 1.0)).astype(self.dtype)
        x_BD = nn.Dropout(self.dropout, deterministic=not train)(x_BD)
        for index, features in enumerate(self.hidden_dims, start=1):
            x_BD = nn.relu(nn.Dense(features, dtype=self.dtype, name=f"hidden{index}")(x_BD))
        return nn.Dense(self.num_outputs, name="classifier")(x_BD.astype(jnp.float32))
