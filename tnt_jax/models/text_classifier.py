"""A text classifier: averaged word embeddings and three dense layers.

This is the NNLM model of the `tf.distribute` lesson.

Shape legend: B batch, T tokens, D width, K outputs.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

PAD_ID = 0


class TextClassifier(nn.Module):
    """Averages a text's word vectors and applies dense layers with ReLU, then one of `num_outputs`.

    The lesson takes pretrained word vectors from the neural language model of Bengio et al. 2003
    (NNLM-128); here they are trained with the rest. The mean of a text without words is zero.

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
