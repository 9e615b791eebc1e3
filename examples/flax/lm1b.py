"""Flax's language model (Linen) on all devices, here on the bytes of English sentences.

    python examples/flax/lm1b.py --data DATA
    tnt-jax -n 2 -- examples/flax/lm1b.py --data DATA

After examples/lm1b of Flax (Copyright The Flax Authors, Apache-2.0,
https://github.com/google/flax): a decoder, loss, schedule and optimizer, smaller, without packed
examples and sampling. The lines marked with `tnt` are changed, or stand in place of its steps and
loops.
"""

import argparse
from typing import Any

import flax.linen as nn
import jax.numpy as jnp
import optax
from flax import struct
from real_data import VOCAB_SIZE, add_arguments, english_sentences

import tnt_jax as tnt


@struct.dataclass
class TransformerConfig:
    """Sizes of the decoder, and whether dropout is off."""

    vocab_size: int = VOCAB_SIZE
    emb_dim: int = 64
    num_heads: int = 4
    num_layers: int = 2
    mlp_dim: int = 256
    max_len: int = 48
    dropout_rate: float = 0.1
    deterministic: bool = False
    dtype: Any = jnp.float32


def kernel_init(*axes):
    """Returns an initializer whose kernels carry the names of their dimensions."""
    return nn.with_logical_partitioning(nn.initializers.xavier_uniform(), axes)


class DecoderBlock(nn.Module):
    """Masked attention and a feed-forward block, each after a LayerNorm and beside a shortcut;
    `[batch, length, emb_dim]`.
    """

    config: TransformerConfig

    @nn.compact
    def __call__(self, inputs, decoder_mask):
        config = self.config
        drop = nn.Dropout(config.dropout_rate, deterministic=config.deterministic)
        x = nn.MultiHeadDotProductAttention(
            config.num_heads, use_bias=False, broadcast_dropout=False,
            dropout_rate=config.dropout_rate,
            kernel_init=kernel_init("embed", "kv"), deterministic=config.deterministic,
        )(nn.LayerNorm()(inputs), mask=decoder_mask)  # fmt: skip
        x = inputs + drop(x)
        y = nn.relu(
            nn.Dense(config.mlp_dim, kernel_init=kernel_init("embed", "mlp"))(nn.LayerNorm()(x))
        )
        return x + drop(nn.Dense(config.emb_dim, kernel_init=kernel_init("mlp", "embed"))(drop(y)))


class TransformerLM(nn.Module):
    """From tokens `[batch, length]` to logits of the same tokens, each from those before it,
    `[batch, length, vocab_size]`.
    """

    config: TransformerConfig

    @nn.compact
    def __call__(self, inputs, train=False):  # tnt
        config = self.config.replace(deterministic=not train)  # tnt
        mask = nn.combine_masks(
            nn.make_attention_mask(inputs > 0, inputs > 0), nn.make_causal_mask(inputs)
        )
        embed = nn.Embed(
            config.vocab_size, config.emb_dim, embedding_init=nn.initializers.normal(1.0)
        )
        y = embed(jnp.pad(inputs, ((0, 0), (1, 0)))[:, :-1])
        y += self.param(
            "pos_embedding", nn.initializers.normal(0.02), (1, config.max_len, config.emb_dim)
        )[:, : y.shape[1]]
        y = nn.Dropout(config.dropout_rate, deterministic=config.deterministic)(y)
        for layer in range(config.num_layers):
            y = DecoderBlock(config, name=f"encoderdecoderblock_{layer}")(y, mask)
        return nn.Dense(
            config.vocab_size, kernel_init=kernel_init("embed", "vocab"), name="logitdense"
        )(nn.LayerNorm()(y))


def create_learning_rate_schedule(learning_rate, warmup_steps):
    """Returns a linear rise over `warmup_steps`, and a fall with the inverse square root of the
    step after it.
    """
    rise = optax.linear_schedule(0.0, learning_rate, warmup_steps)
    return optax.join_schedules(
        [rise, lambda step: learning_rate * (warmup_steps / (step + warmup_steps)) ** 0.5],
        [warmup_steps],
    )


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_arguments(parser)
    args = parser.parse_args(argv)
    config = TransformerConfig()
    tokens = english_sentences(args.data, config.max_len, args.examples)
    weights = (tokens > 0).astype("float32")
    optimizer = optax.adamw(
        create_learning_rate_schedule(0.0016, 100), b1=0.9, b2=0.98, eps=1e-9, weight_decay=0.1
    )

    model = tnt.Model(TransformerLM(config))  # tnt
    # The sum over all tokens that are no padding, divided by their number, over all ranks together.
    loss = tnt.losses.SparseCategoricalCrossentropy(
        from_logits=True, reduction="mean_with_sample_weight"
    )  # tnt
    model.compile(optimizer, loss, weighted_metrics=["accuracy"])  # tnt
    model.fit(tokens, tokens, sample_weight=weights, batch_size=64, epochs=args.epochs)  # tnt
    return model


if __name__ == "__main__":
    main()
