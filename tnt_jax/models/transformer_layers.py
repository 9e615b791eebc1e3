"""The encoder and decoder stacks of the Transformer, with pre-layer normalization.

Vaswani et al. 2017 (arXiv:1706.03762) normalise after the residual sum. The tutorial and
tensor2tensor normalise before each sublayer, and once more at the end of each stack, which trains
without a delicate warm-up.

Shape legend: B batch, T targets, S sources, L positions in the cache, K beams, D width, F width of
the inner layer, N heads, H width of a head.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from tnt_jax.models.attention import Attention

# Keys and values [B, K, L, N, H] of one decoder layer's own positions.
LayerCache = tuple[jax.Array, jax.Array]


class FeedForward(nn.Module):
    """Two dense layers with ReLU between them, the same at every position (section 3.3)."""

    filter_dim: int
    dropout: float
    dtype: Any

    @nn.compact
    def __call__(self, x_BTD: jax.Array, *, train: bool) -> jax.Array:
        """Maps [B, T, D] to [B, T, D]."""
        dense = {"dtype": self.dtype, "kernel_init": nn.initializers.xavier_uniform()}
        x_BTF = nn.relu(nn.Dense(self.filter_dim, name="filter", **dense)(x_BTD))
        x_BTF = nn.Dropout(self.dropout, deterministic=not train)(x_BTF)
        return nn.Dense(x_BTD.shape[-1], name="output", **dense)(x_BTF)


class EncoderLayer(nn.Module):
    """Self-attention and a feed-forward layer; drops a share of each one's result in training."""

    norm: Callable[..., nn.Module]
    attention: Callable[..., Attention]
    feed_forward: Callable[..., FeedForward]
    dropout: float

    def setup(self) -> None:
        """Builds the layers; Flax calls it."""
        self.attend_norm, self.attend = self.norm(), self.attention()
        self.filter_norm, self.filter = self.norm(), self.feed_forward()
        self.drop = nn.Dropout(self.dropout)

    def __call__(self, x_BSD: jax.Array, *, lengths_B: jax.Array, train: bool) -> jax.Array:
        """Maps [B, S, D] to [B, S, D]; `lengths_B` as in `Attention`."""
        y_BSD = self.attend_norm(x_BSD)
        y_BSD = self.attend(y_BSD, y_BSD, lengths_B=lengths_B, train=train)
        x_BSD = x_BSD + self.drop(y_BSD, deterministic=not train)
        y_BSD = self.filter(self.filter_norm(x_BSD), train=train)
        return x_BSD + self.drop(y_BSD, deterministic=not train)


class DecoderLayer(nn.Module):
    """Causal self-attention, attention to the encoded sources, and a feed-forward layer."""

    norm: Callable[..., nn.Module]
    attention: Callable[..., Attention]
    feed_forward: Callable[..., FeedForward]
    dropout: float

    def setup(self) -> None:
        """Builds the layers; Flax calls it."""
        self.attend_norm, self.attend = self.norm(), self.attention()
        self.memory_norm, self.attend_memory = self.norm(), self.attention()
        self.filter_norm, self.filter = self.norm(), self.feed_forward()
        self.drop = nn.Dropout(self.dropout)

    def __call__(
        self, x_BTD: jax.Array, memory_BSD: jax.Array, *, lengths_B: jax.Array, train: bool
    ) -> jax.Array:
        """Maps [B, T, D] to [B, T, D]; `lengths_B` are the real positions of `memory_BSD`."""
        y_BTD = self.attend_norm(x_BTD)
        y_BTD = self.attend(y_BTD, y_BTD, lengths_B=None, causal=True, train=train)
        x_BTD = x_BTD + self.drop(y_BTD, deterministic=not train)
        y_BTD = self.attend_memory(
            self.memory_norm(x_BTD), memory_BSD, lengths_B=lengths_B, train=train
        )
        x_BTD = x_BTD + self.drop(y_BTD, deterministic=not train)
        y_BTD = self.filter(self.filter_norm(x_BTD), train=train)
        return x_BTD + self.drop(y_BTD, deterministic=not train)

    def project_memory(self, memory_BSD: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns the keys and values of the encoded sources, computed once per translation."""
        return self.attend_memory.project(memory_BSD)

    def step(
        self,
        x_BKD: jax.Array,
        cache: LayerCache,
        memory: tuple[jax.Array, jax.Array],
        *,
        position: jax.Array,
        lengths_B: jax.Array,
    ) -> tuple[jax.Array, LayerCache]:
        """Returns the layer's result for one position of every beam, and the updated cache.

        Args:
            x_BKD: The position of every beam.
            cache: Keys and values [B, K, L, N, H] of earlier positions.
            memory: Keys and values [B, S, N, H] of the sources; all beams of a row share them, as
                queries of one attention call.
            position: Number of earlier positions, a scalar.
            lengths_B: Real positions of the sources.
        """
        y_BKD = self.attend_norm(x_BKD)
        key_BKNH, value_BKNH = self.attend.project(y_BKD)
        cache = (_put(cache[0], key_BKNH, position), _put(cache[1], value_BKNH, position))
        num_rows, num_beams, num_places = cache[0].shape[:3]
        flat = [kept.reshape(num_rows * num_beams, num_places, *kept.shape[3:]) for kept in cache]
        y_R1D = y_BKD.reshape(num_rows * num_beams, 1, -1)
        seen_R = jnp.full(num_rows * num_beams, position + 1, jnp.int32)
        x_BKD = x_BKD + self.attend.attend(y_R1D, *flat, lengths_B=seen_R).reshape(x_BKD.shape)
        x_BKD = x_BKD + self.attend_memory.attend(
            self.memory_norm(x_BKD), *memory, lengths_B=lengths_B
        )
        x_BKD = x_BKD + self.filter(self.filter_norm(x_BKD), train=False)
        return x_BKD, cache


def _put(kept_BKLNH: jax.Array, new_BKNH: jax.Array, position: jax.Array) -> jax.Array:
    return jax.lax.dynamic_update_slice_in_dim(kept_BKLNH, new_BKNH[:, :, None], position, axis=2)
