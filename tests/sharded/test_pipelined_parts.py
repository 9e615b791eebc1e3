"""A training step by 1F1B equals the step on one device: dropout, what layers get beside
activations, losses on parameters, sample weights, and rows that fill the last micro-batches.
"""

import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from stacked_models import Dropping, Stacked
from training import assert_close

import tnt_jax as tnt

ROWS = 10
TOKENS = np.random.default_rng(0).integers(0, 11, (ROWS, 7))
WEIGHTS = np.linspace(0.5, 2, ROWS).astype(np.float32)
BY_TURNS = tnt.Pipeline("layers", microbatches=3, schedule="1f1b")


class Penalized(nn.Module):
    """Adds a loss on its own embedding, as weight decay does."""

    @nn.compact
    def __call__(self, tokens, train):
        embed = nn.Embed(11, 8)
        self.sow("losses", "decay", 0.1 * jnp.sum(embed.embedding**2))
        scan = nn.scan(Plain, variable_axes={"params": 0}, split_rngs={"params": True}, length=4)
        x, _ = scan(name="layers")(embed(tokens))
        return embed.attend(x)


class Plain(nn.Module):
    @nn.compact
    def __call__(self, x):
        return x + nn.tanh(nn.Dense(8)(x)), None


KINDS = {"dropping": Dropping, "nnx": Stacked, "penalized": Penalized}


def step(use_ranks, kind, num_devices, **options):
    """Returns loss and accuracy of two steps, and the weights after them."""
    use_ranks(num_devices)
    model = tnt.Model(KINDS[kind](), seed=0, **options)
    loss = tnt.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(tnt.optimizers.SGD(0.1), loss=loss, weighted_metrics=["accuracy"])
    seen = [model.train_on_batch(TOKENS, (TOKENS + 1) % 11, WEIGHTS) for _ in range(2)]
    return seen, model.get_weights()


@pytest.mark.parametrize(
    ("kind", "mesh"),
    [
        pytest.param("dropping", {"data": 2, "stage": 2}, marks=pytest.mark.long),
        pytest.param("dropping", {"stage": 2, "fsdp": 2}, marks=pytest.mark.long),
        pytest.param("nnx", {"stage": 4}, marks=pytest.mark.long),
        pytest.param("penalized", {"data": 2, "stage": 2}, marks=pytest.mark.long),
    ],
)
def test_a_step_by_1f1b_equals_one_device(use_ranks, kind, mesh):
    expected = step(use_ranks, kind, 1)
    assert_close(step(use_ranks, kind, 4, mesh=mesh, pipeline=BY_TURNS), expected)
