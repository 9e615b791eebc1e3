"""A language model of characters on Python's own help texts, several of them packed in each row.

    tnt-jax -n 2 -- examples/gallery/packed_language_model.py

Tokens see their own document alone, and the loss is per token: its mean counts each token of the
global batch once, however documents fall into rows and rows onto devices.
"""

from pydoc_data.topics import topics

import flax.linen as nn
import jax.numpy as jnp
import numpy as np

import tnt_jax as tnt

LENGTH = 128


def pack(texts):
    """Returns tokens, document numbers and positions `[rows, LENGTH]`; 0 is padding."""
    rows = [([], [], [])]
    for text in texts:
        for start in range(0, len(text), LENGTH):
            part = [min(ord(letter), 127) for letter in text[start : start + LENGTH]]
            if len(rows[-1][0]) + len(part) > LENGTH:
                rows.append(([], [], []))
            tokens, documents, positions = rows[-1]
            documents += [max(documents, default=0) + 1] * len(part)
            positions += range(len(part))
            tokens += part
    padded = [[column + [0] * (LENGTH - len(column)) for column in row] for row in rows]
    return np.asarray(padded, np.int32).transpose(1, 0, 2)


class LanguageModel(nn.Module):
    """Causal attention within documents; logits `[batch, LENGTH, 128]`."""

    width: int = 64
    num_blocks: int = 2

    @nn.compact
    def __call__(self, inputs):
        tokens, documents, positions = inputs
        x = nn.Embed(128, self.width)(tokens) + nn.Embed(LENGTH, self.width)(positions)
        same = nn.make_attention_mask(documents, documents, jnp.equal)
        mask = nn.combine_masks(nn.make_causal_mask(tokens), same)
        for _ in range(self.num_blocks):
            x = x + nn.MultiHeadAttention(num_heads=4)(nn.LayerNorm()(x), mask=mask)
            x = x + nn.Dense(self.width)(nn.gelu(nn.Dense(4 * self.width)(nn.LayerNorm()(x))))
        return nn.Dense(128)(nn.LayerNorm()(x))


def main(epochs=4, num_texts=24):
    """Trains, and returns the loss per character in nats."""
    tokens, documents, positions = pack([topics[name] for name in sorted(topics)[:num_texts]])
    targets = np.pad(tokens[:, 1:], ((0, 0), (0, 1)))
    following = np.pad(documents[:, 1:], ((0, 0), (0, 1)))
    # Neither padding nor the step from one document to the next is learnt.
    weight = ((documents == following) & (documents > 0)).astype(np.float32)
    loss = tnt.losses.SparseCategoricalCrossentropy(
        from_logits=True, reduction="mean_with_sample_weight"
    )
    model = tnt.Model(LanguageModel())
    model.compile(tnt.optimizers.AdamW(3e-3), loss)
    data = (tokens, documents, positions), targets, weight
    history = model.fit(data[0], data[1], sample_weight=weight, batch_size=16, epochs=epochs)
    per_character = history.history["loss"][-1]
    if tnt.is_master_rank():
        print(f"{weight.mean():.0%} of the places count, {per_character:.2f} nats a character")
    return per_character


if __name__ == "__main__":
    main()
