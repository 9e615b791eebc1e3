"""The Transformer for translation, as the tutorial trains it.

Vaswani et al. 2017 (arXiv:1706.03762) normalise after the residual sum. The tutorial and
tensor2tensor normalise before each sublayer, and once more at the end of each stack, which trains
without a delicate warm-up.

    model = Transformer(**PARAM_SETS["big"], vocab_size=33708, dtype=jnp.bfloat16)
    variables = model.init(key, sources, targets, train=False)
    logits = model.apply(variables, sources, targets, train=False)

Token 0 is padding, always at the end of a sentence. `Translator` in `translation.py` decodes with
the same variables.

Shape legend: B batch, S sources, T targets, L positions in the cache, K beams, D width, F width
of the inner layer, V vocabulary, N heads, H width of a head.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn

from tnt_jax.models.attention import Attention, Implementation

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


class _Layer(nn.Module):
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


class EncoderLayer(_Layer):
    """Self-attention and a feed-forward layer."""

    def __call__(self, x_BSD: jax.Array, *, lengths_B: jax.Array, train: bool) -> jax.Array:
        """Maps [B, S, D] to [B, S, D]; `lengths_B` as in `Attention`."""
        y_BSD = self.attend_norm(x_BSD)
        y_BSD = self.attend(y_BSD, y_BSD, lengths_B=lengths_B, train=train)
        x_BSD = x_BSD + self.drop(y_BSD, deterministic=not train)
        y_BSD = self.filter(self.filter_norm(x_BSD), train=train)
        return x_BSD + self.drop(y_BSD, deterministic=not train)


class DecoderLayer(_Layer):
    """Causal self-attention, attention to the encoded sources, and a feed-forward layer."""

    def setup(self) -> None:
        """Builds the layers; Flax calls it."""
        super().setup()
        self.memory_norm, self.attend_memory = self.norm(), self.attention()

    def __call__(
        self, x_BTD: jax.Array, memory_BSD: jax.Array, *, lengths_B: jax.Array, train: bool
    ) -> jax.Array:
        """Maps [B, T, D] to [B, T, D]; `lengths_B` are the real positions of `memory_BSD`."""
        y_BTD = self.attend_norm(x_BTD)
        y_BTD = self.attend(y_BTD, y_BTD, lengths_B=None, causal=True, train=train)
        x_BTD = x_BTD + self.drop(y_BTD, deterministic=not train)
        y_BTD = self.memory_norm(x_BTD)
        y_BTD = self.attend_memory(y_BTD, memory_BSD, lengths_B=lengths_B, train=train)
        x_BTD = x_BTD + self.drop(y_BTD, deterministic=not train)
        y_BTD = self.filter(self.filter_norm(x_BTD), train=train)
        return x_BTD + self.drop(y_BTD, deterministic=not train)

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

        The cache has keys and values [B, K, L, N, H] of the `position` earlier positions, a scalar;
        the memory those [B, S, N, H] of the sources, of which `lengths_B` are real. All beams of a
        row share them, as queries of one attention call.
        """
        y_BKD = self.attend_norm(x_BKD)
        key_BKNH, value_BKNH = self.attend.project(y_BKD)
        cache = (_put(cache[0], key_BKNH, position), _put(cache[1], value_BKNH, position))
        num_rows, num_beams, num_places = cache[0].shape[:3]
        flat = [kept.reshape(num_rows * num_beams, num_places, *kept.shape[3:]) for kept in cache]
        y_R1D = y_BKD.reshape(num_rows * num_beams, 1, -1)
        seen_R = jnp.full(num_rows * num_beams, position + 1, jnp.int32)
        x_BKD = x_BKD + self.attend.attend(y_R1D, *flat, lengths_B=seen_R).reshape(x_BKD.shape)
        y_BKD = self.memory_norm(x_BKD)
        x_BKD = x_BKD + self.attend_memory.attend(y_BKD, *memory, lengths_B=lengths_B)
        x_BKD = x_BKD + self.filter(self.filter_norm(x_BKD), train=False)
        return x_BKD, cache


def _put(kept_BKLNH: jax.Array, new_BKNH: jax.Array, position: jax.Array) -> jax.Array:
    return jax.lax.dynamic_update_slice_in_dim(kept_BKLNH, new_BKNH[:, :, None], position, axis=2)


# How the Transformer is cut over an axis `tensor`: the first of two matrices in a row is cut by
# columns, that is by heads or by inner features, and the second by rows, so that each pair needs
# one sum over the devices (Shoeybi et al. 2019, arXiv:1909.08053, section 3).
# For tnt.Model(Transformer(...), mesh={"data": 4, "tensor": 2}, sharding_rules=rules).
rules: tuple[tuple[str, tuple[str | None, ...]], ...] = (
    ("*/query/kernel", (None, "tensor", None)),
    ("*/key/kernel", (None, "tensor", None)),
    ("*/value/kernel", (None, "tensor", None)),
    ("*/attend*/output/kernel", ("tensor", None, None)),
    ("*/filter/filter/kernel", (None, "tensor")),
    ("*/filter/filter/bias", ("tensor",)),
    ("*/filter/output/kernel", ("tensor", None)),
)
PAD_ID = 0

# Vaswani et al. 2017, table 3 (base and big); tiny is the tutorial's set for experiments.
PARAM_SETS: dict[str, dict[str, Any]] = {
    "tiny": {"width": 32, "num_heads": 4, "filter_dim": 256, "dropout": 0.1},
    "base": {"width": 512, "num_heads": 8, "filter_dim": 2048, "dropout": 0.1},
    "big": {"width": 1024, "num_heads": 16, "filter_dim": 4096, "dropout": 0.3},
}


class Memory(NamedTuple):
    """Encoded sources: keys and values [B, S, N, H] of each decoder layer, and real lengths."""

    layers: list[tuple[jax.Array, jax.Array]]
    lengths_B: jax.Array


class Transformer(nn.Module):
    """Encoder, decoder, and a shared embedding matrix.

    The matrix embeds sources and targets and maps the decoder's result to logits.

    Attributes:
        vocab_size: Number of token ids V, padding included.
        width: Width D.
        num_heads: Attention heads N.
        filter_dim: Width of the feed-forward layers.
        num_layers: Number of layers of the encoder, and of the decoder.
        dropout: Fraction of embeddings and of each sublayer's result dropped in training.
        attention_dropout: Fraction of attention weights dropped in training; with 0, training can
            use the fused attention kernels.
        relu_dropout: Fraction of the feed-forward layers' inner values dropped in training.
        dtype: Dtype of the computation; parameters and logits are float32.
        implementation: Attention kernel, "cudnn" or "xla"; None for the fastest one on the device.
    """

    vocab_size: int = 33708
    width: int = 512
    num_heads: int = 8
    filter_dim: int = 2048
    num_layers: int = 6
    dropout: float = 0.1
    attention_dropout: float = 0.1
    relu_dropout: float = 0.1
    dtype: Any = jnp.float32
    implementation: Implementation | None = None

    def setup(self) -> None:
        """Builds the layers; Flax calls it."""
        norm = partial(nn.LayerNorm, epsilon=1e-6, dtype=self.dtype)
        attention = partial(
            Attention,
            self.num_heads,
            self.width,
            self.attention_dropout,
            self.dtype,
            self.implementation,
        )
        feed_forward = partial(FeedForward, self.filter_dim, self.relu_dropout, self.dtype)
        layer = (norm, attention, feed_forward, self.dropout)
        init = nn.initializers.normal(self.width**-0.5)
        self.embedding = self.param("embedding", init, (self.vocab_size, self.width))
        self.encoder = [EncoderLayer(*layer) for _ in range(self.num_layers)]
        self.decoder = [DecoderLayer(*layer) for _ in range(self.num_layers)]
        self.encoder_norm = norm()
        self.decoder_norm = norm()
        self.drop = nn.Dropout(self.dropout)

    def __call__(self, sources: jax.Array, targets: jax.Array, *, train: bool) -> jax.Array:
        """Returns the logits [B, T, V], float32, of each target token after the ones before.

        Sources [B, S] and targets [B, T] are token ids, padded with 0 at the end; this method
        shifts targets right. In training dropout is on and needs a `dropout` key.
        """
        lengths_B = real_lengths(sources)
        memory_BSD = self.encode(sources, train=train)
        x_BTD = jnp.pad(self._embed(targets), ((0, 0), (1, 0), (0, 0)))[:, :-1]
        x_BTD = self._add_positions(x_BTD, jnp.arange(targets.shape[1]))
        x_BTD = self.drop(x_BTD, deterministic=not train)
        for layer in self.decoder:
            x_BTD = layer(x_BTD, memory_BSD, lengths_B=lengths_B, train=train)
        return self._logits(self.decoder_norm(x_BTD))

    def encode(self, sources: jax.Array, *, train: bool) -> jax.Array:
        """Returns the encoded sources [B, S, D] of token ids [B, S].

        Rows that are all padding have finite values without meaning.
        """
        lengths_B = real_lengths(sources)
        x_BSD = self._add_positions(self._embed(sources), jnp.arange(sources.shape[1]))
        x_BSD = self.drop(x_BSD, deterministic=not train)
        for layer in self.encoder:
            x_BSD = layer(x_BSD, lengths_B=lengths_B, train=train)
        return self.encoder_norm(x_BSD)

    def remember(self, sources: jax.Array) -> Memory:
        """Encodes token ids [B, S] and projects them for all decoder layers, once a translation."""
        memory_BSD = self.encode(sources, train=False)
        layers = [layer.attend_memory.project(memory_BSD) for layer in self.decoder]
        return Memory(layers, real_lengths(sources))

    def empty_cache(self, batch_size: int, *, num_beams: int, num_places: int) -> list[LayerCache]:
        """Returns zeros [B, K, L, N, H] for the keys and values of each decoder layer."""
        shape = (batch_size, num_beams, num_places, self.num_heads, self.width // self.num_heads)
        layers = range(self.num_layers)
        return [(jnp.zeros(shape, self.dtype), jnp.zeros(shape, self.dtype)) for _ in layers]

    def decode_step(
        self, tokens_BK: jax.Array, cache: list[LayerCache], memory: Memory, *, position: jax.Array
    ) -> tuple[jax.Array, list[LayerCache]]:
        """Returns the logits [B, K, V], float32, of the token at `position`, and the updated cache.

        Tokens are those before `position`, from 0 on, in every beam; 0 at the start. The cache has
        keys and values of earlier positions, the memory the encoded sources.
        """
        x_BKD = self._add_positions(self._embed(tokens_BK), position)
        where = {"position": position, "lengths_B": memory.lengths_B}
        filled = []
        for layer, kept, of_layer in zip(self.decoder, cache, memory.layers, strict=True):
            x_BKD, kept = layer.step(x_BKD, kept, of_layer, **where)
            filled.append(kept)
        return self._logits(self.decoder_norm(x_BKD)), filled

    def _embed(self, tokens: jax.Array) -> jax.Array:
        # Section 3.4: the embedding times sqrt(D). The embedding of padding, which also starts a
        # target, is zero.
        x = self.embedding[tokens] * (tokens != PAD_ID)[..., None] * math.sqrt(self.width)
        return x.astype(self.dtype)

    def _add_positions(self, x: jax.Array, positions: jax.Array) -> jax.Array:
        return x + sinusoids(positions, self.width).astype(self.dtype)

    def _logits(self, x: jax.Array) -> jax.Array:
        embedding = self.embedding.astype(self.dtype)
        return jnp.einsum("...D,VD->...V", x, embedding, preferred_element_type=jnp.float32)


def real_lengths(tokens: jax.Array) -> jax.Array:
    """Returns the number of tokens that are not padding [B], int32, 1 at least for attention."""
    return jnp.maximum(jnp.sum(tokens != PAD_ID, axis=-1, dtype=jnp.int32), 1)


def sinusoids(positions: jax.Array, width: int) -> jax.Array:
    """Returns the position encoding [..., width] of `positions` [...], float32.

    The first half are sines and the second cosines, with wavelengths from 2 pi to 2 pi * 10,000 in
    a geometric series. The paper (section 3.5) interleaves them, which is the same up to a fixed
    order of the dimensions.

    Args:
        positions: Positions in the sentence, from 0 on.
        width: Width D, even and at least 4.

    Raises:
        ValueError: If `width` is odd or below 4.
    """
    if width % 2 or width < 4:
        raise ValueError(f"width must be even and at least 4, but is {width}.")
    step = math.log(1e4) / (width // 2 - 1)
    rates = jnp.exp(-step * jnp.arange(width // 2, dtype=jnp.float32))
    angles = jnp.asarray(positions, jnp.float32)[..., None] * rates
    return jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], axis=-1)
