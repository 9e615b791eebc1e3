"""Small models with stacked layers."""

from flax import linen as nn
from flax import nnx


class Layer(nn.Module):
    """Takes positions as a constant of the loop, and drops."""

    @nn.compact
    def __call__(self, x, scale, train):
        y = nn.Dropout(0.4, deterministic=not train)(nn.Dense(8)(x) * scale)
        return x + nn.tanh(y), None


class Dropping(nn.Module):
    @nn.compact
    def __call__(self, tokens, train):
        embed = nn.Embed(11, 8)
        x = nn.Dropout(0.2, deterministic=not train)(embed(tokens))
        stack = nn.scan(
            Layer,
            variable_axes={"params": 0},
            split_rngs={"params": True, "dropout": True},
            in_axes=(nn.broadcast, nn.broadcast),
            length=4,
        )
        # What each layer gets beside activations belongs to the rows of the micro-batch.
        x, _ = stack(name="layers")(x, (tokens % 3 + 1.0)[..., None], train)
        return embed.attend(x)


class Stacked(nnx.Module):
    def __init__(self):
        @nnx.vmap(in_axes=0, out_axes=0)
        def make(rngs):
            return nnx.Linear(8, 8, rngs=rngs)

        self.embed = nnx.Embed(11, 8, rngs=nnx.Rngs(0))
        self.layers = make(nnx.Rngs(1).fork(split=4))

    def __call__(self, tokens):
        @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        def run(x, layer):
            return x + nnx.tanh(layer(x))

        return self.embed.attend(run(self.embed(tokens), self.layers))
