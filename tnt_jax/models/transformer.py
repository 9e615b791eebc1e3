"""The Transformer for translation, as the tutorial trains it.

Vaswani et al. 2017, arXiv:1706.03762.

    model = Transformer(**PARAM_SETS["big"], vocab_size=33708, dtype=jnp.bfloat16)
    variables = model.init(key, sources, targets, train=False)
    logits = model.apply(variables, sources, targets, train=False)

Token 0 is padding, always at the end of a sentence. `Translator` in `translation.py` decodes with
the same variables.

Shape legend: B batch, S sources, T targets, L positions in the cache, K beams, D width, V
vocabulary, N heads, H width of a head.
"""

import math
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn

from tnt_jax.models.attention import Attention, Implementation
from tnt_jax.models.transformer_layers import DecoderLayer, EncoderLayer, FeedForward, LayerCache

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
        layer = {
            "norm": norm,
            "attention": attention,
            "feed_forward": feed_forward,
            "dropout": self.dropout,
        }
        init = nn.initializers.normal(self.width**-0.5)
        self.embedding = self.param("embedding", init, (self.vocab_size, self.width))
        self.encoder = [EncoderLayer(**layer) for _ in range(self.num_layers)]
        self.decoder = [DecoderLayer(**layer) for _ in range(self.num_layers)]
        self.encoder_norm = norm()
        self.decoder_norm = norm()
        self.drop = nn.Dropout(self.dropout)

    def __call__(self, sources: jax.Array, targets: jax.Array, *, train: bool) -> jax.Array:
        """Returns the logits of each target token, given the sources and the targets before it.

        Args:
            sources: Token ids [B, S], padded with 0 at the end.
            targets: Token ids [B, T], padded with 0 at the end; this method shifts them right.
            train: Whether dropout is on (it needs a `dropout` key then).

        Returns:
            Logits [B, T, V], float32.
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
        """Encodes token ids [B, S] and projects them for every decoder layer.

        Call it once per translation.
        """
        memory_BSD = self.encode(sources, train=False)
        return Memory(
            [layer.project_memory(memory_BSD) for layer in self.decoder], real_lengths(sources)
        )

    def empty_cache(self, batch_size: int, *, num_beams: int, num_places: int) -> list[LayerCache]:
        """Returns zeros [B, K, L, N, H] for the keys and values of each decoder layer."""
        shape = (batch_size, num_beams, num_places, self.num_heads, self.width // self.num_heads)
        return [
            (jnp.zeros(shape, self.dtype), jnp.zeros(shape, self.dtype))
            for _ in range(self.num_layers)
        ]

    def decode_step(
        self, tokens_BK: jax.Array, cache: list[LayerCache], memory: Memory, *, position: jax.Array
    ) -> tuple[jax.Array, list[LayerCache]]:
        """Returns the logits of the token at `position` of every beam, and the updated cache.

        Args:
            tokens_BK: Token before `position` in every beam; 0 at the start.
            cache: Keys and values of earlier positions.
            memory: Encoded sources.
            position: Position of the token in the target, a scalar from 0 on.

        Returns:
            Logits [B, K, V], float32, and the cache.
        """
        x_BKD = self._add_positions(self._embed(tokens_BK), position)
        filled = []
        for layer, layer_cache, layer_memory in zip(
            self.decoder, cache, memory.layers, strict=True
        ):
            x_BKD, layer_cache = layer.step(
                x_BKD, layer_cache, layer_memory, position=position, lengths_B=memory.lengths_B
            )
            filled.append(layer_cache)
        return self._logits(self.decoder_norm(x_BKD)), filled

    def _embed(self, tokens: jax.Array) -> jax.Array:
        # Section 3.4: the embedding times sqrt(D). The embedding of padding, which also starts a
        # target, is zero.
        x = self.embedding[tokens] * (tokens != PAD_ID)[..., None] * math.sqrt(self.width)
        return x.astype(self.dtype)

    def _add_positions(self, x: jax.Array, positions: jax.Array) -> jax.Array:
        return x + sinusoids(positions, self.width).astype(self.dtype)

    def _logits(self, x: jax.Array) -> jax.Array:
        return jnp.einsum(
            "...D,VD->...V",
            x,
            self.embedding.astype(self.dtype),
            preferred_element_type=jnp.float32,
        )


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
    angles = jnp.asarray(positions, jnp.float32)[..., None] * jnp.exp(
        -step * jnp.arange(width // 2, dtype=jnp.float32)
    )
    return jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], axis=-1)
