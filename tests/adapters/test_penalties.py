import logging

import flax.linen as nn
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from long_params import long_but_last

import tnt_jax as tnt
from tnt_jax.log import logger

RNG = np.random.default_rng(0)
X = RNG.normal(size=(40, 6)).astype(np.float32)
Y = RNG.integers(0, 3, 40)


def mean_of_squares(hidden):
    return jnp.mean(hidden**2)


class Linen(nn.Module):
    added: object = mean_of_squares
    normalizes: bool = False

    @nn.compact
    def __call__(self, x, train: bool = False):
        hidden = nn.Dropout(0.5, deterministic=not train)(nn.Dense(5)(x))
        if self.normalizes:
            hidden = nn.BatchNorm(use_running_average=not train, axis_name="data")(hidden)
        self.sow("losses", "size", self.added(hidden))
        return nn.Dense(3)(hidden)


class Loss(nnx.Variable):
    pass


class Nnx(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0)
        self.hidden, self.out = nnx.Linear(6, 5, rngs=rngs), nnx.Linear(5, 3, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        hidden = self.dropout(self.hidden(x))
        self.loss = Loss(jnp.mean(hidden**2))
        return self.out(hidden)


def fit(module, num_examples, size):
    model = tnt.Model(module, seed=1)
    model.compile(optax.sgd(0.1), tnt.losses.SparseCategoricalCrossentropy(from_logits=True))
    data = X[:num_examples], Y[:num_examples]
    history = model.fit(*data, batch_size=size, shuffle=False, verbose=0).history
    return [*history["loss"], *np.concatenate([np.ravel(x) for x in model.get_weights()])]


# Real rows of the four ranks in the last batch: 2, 2, 2, 1; 2, 2, 2, 2; 2, 2, 1, 0, and these in the
# only batch.
@pytest.mark.parametrize(
    "case",
    [
        *long_but_last((Linen, 39, 16), (Linen, 40, 8), (Linen, 37, 16)),
        *long_but_last((Nnx, 39, 16), (Nnx, 40, 8), (Nnx, 37, 16), (Nnx, 5, 5)),
    ],
)
def test_added_losses_of_padded_batches_are_those_of_one_device(use_ranks, case):
    make, *sizes = case
    found = []
    for num_ranks in (4, 1):
        use_ranks(num_ranks)
        found.append(fit(make(), *sizes))
    np.testing.assert_allclose(*found, rtol=1e-5, atol=1e-6)


def test_repeated_rows_are_told_where_rows_are_normalised_together(use_ranks, caplog, monkeypatch):
    use_ranks(4)
    monkeypatch.setattr(logger, "propagate", True)
    fit(Linen(normalizes=True), 5, 5)
    assert "it includes repeated rows" in caplog.text
    caplog.clear()
    fit(Linen(lambda hidden: jnp.zeros(()), normalizes=True), 5, 5)
    assert "repeated rows" not in caplog.text


ADDED = {
    "sum": lambda hidden: 0.1 * jnp.sum(hidden**2),
    "rows": lambda hidden: 0.1 * jnp.sum(hidden**2, axis=-1),
    "variance": lambda hidden: jnp.var(jnp.mean(hidden, axis=-1)),
}


@pytest.mark.parametrize("sizes", long_but_last((40, 8), (37, 16), (5, 5)))
@pytest.mark.parametrize("added", ADDED.values(), ids=ADDED)
def test_added_losses_that_are_no_mean_are_those_of_one_device(
    use_ranks, caplog, monkeypatch, added, sizes
):
    found = []
    for num_ranks in (4, 1):
        use_ranks(num_ranks)
        monkeypatch.setattr(logger, "propagate", True)
        with caplog.at_level(logging.INFO, "tnt_jax"):
            found.append(fit(Linen(added), *sizes))
    np.testing.assert_allclose(*found, rtol=1e-5, atol=1e-6)
    assert "adds losses that are not a mean over rows" in caplog.text


class FixedRows(nn.Module):
    @nn.compact
    def __call__(self, x):
        if len(x) not in (1, 4, 16):  # The check of rows compares 4 with their halves.
            raise ValueError("unknown number of rows")
        hidden = nn.Dense(5)(x)
        self.sow("losses", "size", 0.1 * jnp.sum(hidden**2))
        return nn.Dense(3)(hidden)


def test_added_losses_for_some_numbers_of_rows_alone_are_those_of_one_device(use_ranks):
    found = []
    for num_ranks in (4, 1):
        use_ranks(num_ranks)
        found.append(fit(FixedRows(), 16, 16))
    np.testing.assert_allclose(*found, rtol=1e-5, atol=1e-6)
