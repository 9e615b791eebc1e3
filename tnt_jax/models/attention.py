"""Multi-head attention on the fastest kernel of the backend.

Vaswani et al. 2017, arXiv:1706.03762, section 3.2.

Shape legend: B batch, T queries, S keys and values, D width of the model, N heads, H width of a
head.
"""

from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import linen as nn

Implementation = Literal["cudnn", "xla"]


class Attention(nn.Module):
    """Projects to `num_heads` heads, attends, and projects back, without biases.

    Attributes:
        num_heads: Heads N; must divide `width`.
        width: Width D of the result.
        dropout: Fraction of attention weights dropped in training, from 0 to 1. Above 0, training
            uses the plain formula, which has weights to drop; all else uses `implementation`.
        dtype: Dtype of the computation.
        implementation: Kernel of `jax.nn.dot_product_attention`; None chooses by
            `fastest_implementation`.
    """

    num_heads: int
    width: int
    dropout: float = 0.0
    dtype: Any = jnp.float32
    implementation: Implementation | None = None

    def setup(self) -> None:
        """Builds the layers; Flax calls it."""
        if self.width % self.num_heads:
            raise ValueError(
                f"the width ({self.width}) must be a multiple of num_heads ({self.num_heads})."
            )
        heads = (self.num_heads, self.width // self.num_heads)
        dense = partial(
            nn.DenseGeneral,
            use_bias=False,
            kernel_init=nn.initializers.xavier_uniform(),
            dtype=self.dtype,
        )
        self.query, self.key, self.value = dense(heads), dense(heads), dense(heads)
        self.output = dense(self.width, axis=(-2, -1))
        self.weight_dropout = nn.Dropout(self.dropout)

    def __call__(
        self,
        x_BTD: jax.Array,
        memory_BSD: jax.Array,
        *,
        lengths_B: jax.Array | None,
        causal: bool = False,
        train: bool,
    ) -> jax.Array:
        """Returns the attention of each position of `x_BTD` to those of `memory_BSD`.

        Of each memory the first `lengths_B` positions are real, int32, at least 1; None if all are.
        If `causal`, position t attends only to positions up to t. In training dropout is on.
        """
        key_BSNH, value_BSNH = self.project(memory_BSD)
        query_BTNH = self.query(x_BTD)
        if train and self.dropout > 0:
            weight_BNTS = attention_weights(
                query_BTNH, key_BSNH, lengths_B=lengths_B, causal=causal
            )
            weight_BNTS = self.weight_dropout(weight_BNTS, deterministic=False)
            x_BTNH = jnp.einsum("BNTS,BSNH->BTNH", weight_BNTS, value_BSNH)
        else:
            x_BTNH = jax.nn.dot_product_attention(
                query_BTNH,
                key_BSNH,
                value_BSNH,
                is_causal=causal,
                key_value_seq_lengths=lengths_B,
                implementation=self.implementation or fastest_implementation(query_BTNH),
            )
        return self.output(x_BTNH)

    def project(self, memory_BSD: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns the keys and values [B, S, N, H] of `memory_BSD`, to be stored for `attend`."""
        return self.key(memory_BSD), self.value(memory_BSD)

    def attend(
        self, x_BTD: jax.Array, key_BSNH: jax.Array, value_BSNH: jax.Array, *, lengths_B: jax.Array
    ) -> jax.Array:
        """Returns the attention of `x_BTD` to stored keys and values.

        The first `lengths_B` of them are real. This is for decoding, where T is 1 or the number of
        beams: no kernel is faster than the plain formula there.
        """
        x_BTNH = jax.nn.dot_product_attention(
            self.query(x_BTD),
            key_BSNH,
            value_BSNH,
            key_value_seq_lengths=lengths_B,
            implementation="xla",
        )
        return self.output(x_BTNH)


def attention_weights(
    query_BTNH: jax.Array, key_BSNH: jax.Array, *, lengths_B: jax.Array | None, causal: bool
) -> jax.Array:
    """Returns softmax(query key^T / sqrt(H)) [B, N, T, S], computed in float32, in their dtype.

    Keys from `lengths_B` on, and with `causal` those after the query, get the weight zero.
    """
    logits_BNTS = query_BTNH.shape[-1] ** -0.5 * jnp.einsum(
        "BTNH,BSNH->BNTS", query_BTNH, key_BSNH, preferred_element_type=jnp.float32
    )
    num_queries, num_keys = logits_BNTS.shape[-2:]
    visible = jnp.ones((1, 1, num_queries, num_keys), bool)
    if causal:
        visible = jnp.tril(visible)
    if lengths_B is not None:
        visible = visible & (jnp.arange(num_keys) < lengths_B[:, None, None, None])
    logits_BNTS = jnp.where(visible, logits_BNTS, jnp.finfo(jnp.float32).min)
    return jax.nn.softmax(logits_BNTS).astype(query_BTNH.dtype)


def fastest_implementation(query_BTNH: jax.Array) -> Implementation:
    """Returns the kernel for queries like `query_BTNH`: cuDNN's flash attention or XLA's.

    cuDNN supports 16-bit floats, head widths that are multiples of 8 up to 128, and NVIDIA GPUs
    from Ampere (8.0) on.
    """
    device = jax.devices()[0]
    head_width = query_BTNH.shape[-1]
    is_half = query_BTNH.dtype in (jnp.bfloat16, jnp.float16)
    fits = is_half and head_width % 8 == 0 and head_width <= 128
    is_nvidia = device.platform == "gpu" and "cuda" in device.client.platform_version
    return "cudnn" if fits and is_nvidia and float(device.compute_capability) >= 8.0 else "xla"
