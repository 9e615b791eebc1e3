"""A decoder-only Transformer for language models, with the layers of Llama.

Touvron et al. 2023, arXiv:2307.09288, section 2.2, and Grattafiori et al. 2024, arXiv:2407.21783,
table 3: normalization before each sublayer by the root mean square (Zhang and Sennrich 2019,
arXiv:1910.07467), rotary positions (Su et al. 2021, arXiv:2104.09864), grouped-query attention
(Ainslie et al. 2023, arXiv:2305.13245) and SwiGLU (Shazeer 2020, arXiv:2002.05202), without biases
and dropout.

    model = Decoder(**DECODER_SIZES["8b"], dtype=jnp.bfloat16)
    variables = model.init(key, tokens)
    logits = model.apply(variables, tokens)

The layers are equal and run as one `nn.scan`: their parameters are stacked, `[layers, ...]`, under
the name `layers`, so that the program does not grow with their number.

Shape legend: B batch, T tokens, D width, F width of the inner layer, V vocabulary, N query heads,
K key and value heads, H width of a head.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from tnt_jax.models.attention import Implementation, fastest_implementation

_FIELDS = ("vocab_size", "width", "num_layers", "num_heads", "num_key_heads", "filter_dim")
# 8b: Grattafiori et al. 2024, table 3; 7b: Touvron et al. 2023 (arXiv:2302.13971), table 2, with
# the inner width of the published weights; 1.1b: Zhang et al. 2024, arXiv:2401.02385, table 1. tiny
# is for experiments.
_SIZES = {
    "tiny": (256, 32, 4, 4, 2, 64),
    "1.1b": (32000, 2048, 22, 32, 4, 5632),
    "7b": (32000, 4096, 32, 32, 32, 11008),
    "8b": (128256, 4096, 32, 32, 8, 14336),
}
DECODER_SIZES: dict[str, dict[str, Any]] = {
    name: dict(zip(_FIELDS, sizes, strict=True)) for name, sizes in _SIZES.items()
}
DECODER_SIZES["8b"]["max_wavelength"] = 5e5

_NORMAL = nn.initializers.normal(0.02)


class Decoder(nn.Module):
    """Embedding, equal layers of causal self-attention and SwiGLU, and a matrix of logits.

    Attributes:
        vocab_size: Number of token ids V.
        width: Width D.
        num_layers: Number of layers.
        num_heads: Query heads N; must divide the width.
        num_key_heads: Heads K of keys and values; must divide `num_heads`.
        filter_dim: Width F of the inner layer.
        max_wavelength: Base of the wavelengths of the rotary positions (theta in the papers).
        dtype: Dtype of the computation; parameters and logits are float32.
        implementation: Attention kernel, "cudnn" or "xla"; None for the fastest one on the device.
    """

    vocab_size: int = 32000
    width: int = 512
    num_layers: int = 8
    num_heads: int = 8
    num_key_heads: int = 8
    filter_dim: int = 1408
    max_wavelength: float = 1e4
    dtype: Any = jnp.float32
    implementation: Implementation | None = None

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Returns the logits [B, T, V], float32, of the token after each token id [B, T]."""
        embed = nn.Embed(
            self.vocab_size, self.width, dtype=self.dtype, embedding_init=_NORMAL, name="embedding"
        )
        stack = nn.scan(
            DecoderBlock,
            variable_axes={"params": 0},
            split_rngs={"params": True},
            length=self.num_layers,
        )
        attention = partial(
            GroupedAttention,
            self.num_heads,
            self.num_key_heads,
            self.max_wavelength,
            self.dtype,
            self.implementation,
        )
        layers = stack(attention, self.filter_dim, self.dtype, name="layers")
        x_BTD, _ = layers(embed(tokens))
        x_BTD = nn.RMSNorm(epsilon=1e-5, dtype=self.dtype, name="norm")(x_BTD)
        kernel_DV = self.param("head", _NORMAL, (self.width, self.vocab_size))
        kernel_DV = kernel_DV.astype(self.dtype)
        return jnp.einsum("BTD,DV->BTV", x_BTD, kernel_DV, preferred_element_type=jnp.float32)


class DecoderBlock(nn.Module):
    """Causal self-attention and a feed-forward layer, each added to its input."""

    attention: Callable[..., nn.Module]
    filter_dim: int
    dtype: Any

    @nn.compact
    def __call__(self, x_BTD: jax.Array) -> tuple[jax.Array, None]:
        """Maps [B, T, D] to [B, T, D], as `nn.scan` requires with a second result."""
        attend = self.attention(name="attention")
        filter_ = GatedFeedForward(self.filter_dim, self.dtype, name="feed_forward")
        norm = {"epsilon": 1e-5, "dtype": self.dtype}
        x_BTD = x_BTD + attend(nn.RMSNorm(**norm, name="attention_norm")(x_BTD))
        return x_BTD + filter_(nn.RMSNorm(**norm, name="feed_forward_norm")(x_BTD)), None


class GroupedAttention(nn.Module):
    """Causal self-attention in which N / K query heads share a head of keys and values."""

    num_heads: int
    num_key_heads: int
    max_wavelength: float
    dtype: Any
    implementation: Implementation | None

    @nn.compact
    def __call__(self, x_BTD: jax.Array) -> jax.Array:
        """Maps [B, T, D] to [B, T, D]; position t attends to positions up to t."""
        width = x_BTD.shape[-1]
        self._check(width)
        head_width = width // self.num_heads

        def project(num_heads: int, name: str) -> jax.Array:
            return _dense((num_heads, head_width), self.dtype, name)(x_BTD)

        query_BTNH = project(self.num_heads, "query")
        key_BTKH = project(self.num_key_heads, "key")
        value_BTKH = project(self.num_key_heads, "value")
        positions_T = jnp.arange(x_BTD.shape[1])
        x_BTNH = jax.nn.dot_product_attention(
            rotate(query_BTNH, positions_T, max_wavelength=self.max_wavelength),
            rotate(key_BTKH, positions_T, max_wavelength=self.max_wavelength),
            value_BTKH,
            is_causal=True,
            implementation=self.implementation or fastest_implementation(query_BTNH),
        )
        return _dense(width, self.dtype, "output", axis=(-2, -1))(x_BTNH)

    def _check(self, width: int) -> None:
        if width % self.num_heads or (width // self.num_heads) % 2:
            raise ValueError(
                f"the width ({width}) must be a multiple of num_heads ({self.num_heads}) with an "
                "even quotient, because rotary positions turn pairs of values."
            )
        if self.num_heads % self.num_key_heads:
            raise ValueError(
                f"num_heads ({self.num_heads}) must be a multiple of num_key_heads "
                f"({self.num_key_heads})."
            )


class GatedFeedForward(nn.Module):
    """Maps x to (silu(x gate) * (x up)) down: SwiGLU (Shazeer 2020, equation 6)."""

    filter_dim: int
    dtype: Any

    @nn.compact
    def __call__(self, x_BTD: jax.Array) -> jax.Array:
        """Maps [B, T, D] to [B, T, D]."""
        gate_BTF = _dense(self.filter_dim, self.dtype, "gate")(x_BTD)
        up_BTF = _dense(self.filter_dim, self.dtype, "up")(x_BTD)
        return _dense(x_BTD.shape[-1], self.dtype, "down")(nn.silu(gate_BTF) * up_BTF)


def rotate(x_BTNH: jax.Array, positions_T: jax.Array, *, max_wavelength: float) -> jax.Array:
    """Returns `x_BTNH` with each pair of values turned by an angle that grows with the position.

    Value i and value i + H/2 make a pair, which turns by `position * max_wavelength ** (-2 i / H)`
    (Su et al. 2021, section 3.4.2, which pairs neighbors; the order of the dimensions is free).
    """
    half = x_BTNH.shape[-1] // 2
    rates = max_wavelength ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angles_TH = positions_T.astype(jnp.float32)[:, None] * rates
    cos, sin = jnp.cos(angles_TH)[:, None], jnp.sin(angles_TH)[:, None]
    first, second = jnp.split(x_BTNH.astype(jnp.float32), 2, axis=-1)
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return turned.astype(x_BTNH.dtype)


def _dense(features: Any, dtype: Any, name: str, *, axis: Any = -1) -> nn.DenseGeneral:
    return nn.DenseGeneral(
        features, axis=axis, use_bias=False, kernel_init=_NORMAL, dtype=dtype, name=name
    )
