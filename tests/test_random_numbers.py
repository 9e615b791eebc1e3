"""Random numbers are those of one device on any number of devices, whatever the shapes of the arrays
that hold them, in training and in evaluation.
"""

import os

os.environ["KERAS_BACKEND"] = "jax"

from functools import cache

import flax.linen as nn
import jax
import jax.numpy as jnp
import keras
import numpy as np
import optax
import pytest
from flax import nnx
from long_params import long_but_last

import tnt_jax as tnt

RNG = np.random.default_rng(0)
# Eight positions with four features: dimensions that are the number of rows of some ranks.
X = RNG.normal(size=(40, 8, 4)).astype(np.float32)
Y = RNG.integers(0, 3, 40)


class Classifier(nn.Module):
    """A classifier whose inputs are changed with random numbers in training."""

    change: object

    @nn.compact
    def __call__(self, x, train: bool = False):
        x = self.change(self, x) if train or self.is_initializing() else x
        return nn.Dense(3)(x.reshape(len(x), -1))


class Cell(nn.Module):
    @nn.compact
    def __call__(self, carry, x):
        carry = nn.tanh(nn.Dense(4)(carry) + nn.Dense(4)(x))
        carry = nn.Dropout(0.5, deterministic=False)(carry)
        return carry, carry


def key_of(module):
    return module.make_rng("dropout")


def dropout(module, x):
    return nn.Dropout(0.5, deterministic=False)(x)


def one_mask_for_all_rows(module, x):
    return x * jax.random.bernoulli(key_of(module), 0.5, (1, 8))[..., None]


def one_mask_for_all_rows_and_one_for_each(module, x):
    return one_mask_for_all_rows(module, dropout(module, x))


def mask_over_positions(module, x):
    return x * jax.random.bernoulli(key_of(module), 0.5, (8, 1))


def mask_over_positions_and_one_for_each_row(module, x):
    return mask_over_positions(module, dropout(module, x))


def mask_of_the_row_alone(module, x):
    return x * jax.random.bernoulli(key_of(module), 0.5, (len(x), 1, 1))


def broadcast_dropout(module, x):
    return nn.Dropout(0.5, broadcast_dims=(0,), deterministic=False)(x)


def attention_with_broadcast_dropout(module, x):
    return nn.MultiHeadDotProductAttention(2, dropout_rate=0.5, deterministic=False)(x)


def key_for_each_row(module, x):
    keys = jax.random.split(key_of(module), len(x))
    return x + jax.vmap(lambda key: jax.random.normal(key, x.shape[1:]))(keys)


def rows_merged_with_positions(module, x):
    return dropout(module, x.reshape(-1, 4)).reshape(x.shape)


def samples_before_rows(module, x):
    return x + jax.random.normal(key_of(module), (8, *x.shape)).mean(0)


def positions_before_rows(module, x):
    return jnp.swapaxes(dropout(module, jnp.swapaxes(x, 0, 1)), 0, 1)


def classes_drawn(module, x):
    return x + jax.random.categorical(key_of(module), x)[..., None]


def in_a_scan_over_positions(module, x):
    loop = nn.scan(
        Cell, variable_broadcast="params", in_axes=1, out_axes=1,
        split_rngs={"params": False, "dropout": True},
    )  # fmt: skip
    return loop()(jnp.zeros((len(x), 4)), x)[1]


def in_a_map_over_rows(module, x):
    loop = nn.vmap(
        Cell, variable_axes={"params": None}, split_rngs={"params": False, "dropout": True}
    )
    return x + loop()(jnp.zeros((len(x), 4)), x.mean(1))[1][:, None]


def in_rematerialised_code(module, x):
    return x + nn.remat(Cell)()(jnp.zeros((len(x), 4)), x.mean(1))[1][:, None]


def in_a_branch(module, x):
    key = key_of(module)
    return jax.lax.cond(
        jnp.sum(jnp.abs(x)) > 0, lambda: x + jax.random.normal(key, x.shape), lambda: x
    )


# Numbers of examples and sizes of batches: rows of a rank are 32 and 4 on one device, 16 and 2 on
# two, 8 and 1 on four, 4 and 1 on eight.
SIZES = [(9, 8), (8, 8), (40, 32), (36, 32), (32, 32), (4, 4)]
# With the sizes of the default run: one batch is nearly the same. What a change draws for all rows
# is the same where it draws for each row as well.
CHANGES = {
    dropout: (36, 32),
    one_mask_for_all_rows: None,
    one_mask_for_all_rows_and_one_for_each: (4, 4),
    mask_over_positions: None,
    mask_over_positions_and_one_for_each_row: (32, 32),
    mask_of_the_row_alone: (4, 4),
    broadcast_dropout: None,
    attention_with_broadcast_dropout: (32, 32),
    key_for_each_row: (36, 32),
    rows_merged_with_positions: (32, 32),
    samples_before_rows: (32, 32),
    positions_before_rows: (32, 32),
    classes_drawn: (4, 4),
    in_a_scan_over_positions: (32, 32),
    in_a_map_over_rows: (4, 4),
    in_rematerialised_code: (4, 4),
    in_a_branch: (32, 32),
}


def train(num_ranks, change, num_examples, size):
    tnt.shutdown()
    tnt.init(devices=range(num_ranks))
    model = tnt.Model(Classifier(change), seed=1)
    model.compile(optax.sgd(0.1), tnt.losses.SparseCategoricalCrossentropy(from_logits=True))
    data = X[:num_examples], Y[:num_examples]
    history = model.fit(*data, batch_size=size, verbose=0, shuffle=False).history
    return [
        *history["loss"],
        *np.concatenate([np.ravel(x) for x in jax.tree.leaves(model.variables)]),
    ]


@cache
def on_one_device(*case):
    return train(1, *case)


@pytest.mark.parametrize("num_ranks", long_but_last(2, 8, 4))
@pytest.mark.parametrize(
    ("change", "sizes"),
    [
        pytest.param(change, sizes, marks=[] if sizes == default else pytest.mark.long)
        for change, default in CHANGES.items()
        for sizes in SIZES
    ],
)
def test_training_draws_the_numbers_of_one_device(use_ranks, change, sizes, num_ranks):
    found, expected = train(num_ranks, change, *sizes), on_one_device(change, *sizes)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("sizes", long_but_last((4, 4), (36, 32)))
def test_numbers_of_equal_shape_are_drawn_over_the_whole_batch(
    use_ranks, sizes, monkeypatch, capsys
):
    monkeypatch.setenv("TNT_LOG_LEVEL", "INFO")

    def change(module, x):
        return broadcast_dropout(module, dropout(module, x))

    np.testing.assert_allclose(
        train(4, change, *sizes), train(1, change, *sizes), rtol=1e-4, atol=1e-5
    )
    said = capsys.readouterr().err
    assert "with 1 row(s) on a device" in said
    assert "divides each step over the whole global batch" in said


class Sampler(nn.Module):
    """Samples its hidden state, and takes the same noise for all rows, in evaluation, too."""

    @nn.compact
    def __call__(self, x, train: bool = False):
        x = nn.Dropout(0.5, deterministic=not train)(x.reshape(len(x), -1))
        x = nn.Dense(8)(x)
        x = x + jax.random.normal(self.make_rng("sample"), x.shape)
        return nn.Dense(3)(x + jax.random.normal(self.make_rng("all"), (8,)))


class NnxSampler(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0)
        self.hidden, self.out = nnx.Linear(32, 8, rngs=rngs), nnx.Linear(8, 3, rngs=rngs)
        self.dropout, self.rngs = nnx.Dropout(0.5, rngs=rngs), rngs

    def __call__(self, x):
        x = self.hidden(self.dropout(x.reshape(len(x), -1)))
        x = x + jax.random.normal(self.rngs.noise(), x.shape)
        return self.out(x + jax.random.normal(self.rngs.noise(), (8,)))


class KerasNoise(keras.layers.Layer):
    def __init__(self, **options):
        super().__init__(**options)
        self.seed_generator = keras.random.SeedGenerator(3)

    def call(self, x):
        x = x + keras.random.normal(keras.ops.shape(x), seed=self.seed_generator)
        return x + keras.random.normal((8,), seed=self.seed_generator)


def keras_sampler():
    keras.utils.set_random_seed(0)
    layers = keras.layers
    return keras.Sequential(
        [keras.Input((8, 4)), layers.Flatten(), layers.Dense(8), KerasNoise(), layers.Dense(3)]
    )


@pytest.mark.parametrize("make", long_but_last(keras_sampler, NnxSampler, Sampler))
@pytest.mark.parametrize(
    "options", [{}, pytest.param({"reproducible": True}, marks=pytest.mark.long)]
)
def test_evaluation_draws_the_same_for_a_row_of_the_data(use_ranks, make, options):
    found = []
    for num_ranks, size, steps in [(1, 40, 1), (4, 9, 1), (8, 16, 2)]:
        use_ranks(num_ranks)
        model = tnt.Model(make(), seed=num_ranks, **options)
        steps = {} if options else {"steps_per_execution": steps}
        loss = tnt.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(optax.sgd(0.0), loss, **steps)
        model.build(X[:1])
        if make is Sampler:
            model.set_weights([np.full_like(x, 0.1) for x in model.get_weights()])
        predicted = model.predict(X, batch_size=size, verbose=0)
        found.append([model.evaluate(X, Y, batch_size=size, verbose=0), *predicted.ravel()])
        np.testing.assert_array_equal(predicted, model.predict(X, batch_size=size, verbose=0))
    for other in found[1:]:
        np.testing.assert_allclose(other, found[0], rtol=1e-4, atol=1e-4)
    # Rows that are alike get numbers of their own.
    alike = model.predict(np.repeat(X[:1], 40, axis=0), batch_size=16, verbose=0)
    assert len(np.unique(alike[:, 0])) == 40


def test_a_model_that_samples_is_trained_and_its_validation_repeats(use_ranks):
    use_ranks(4)
    model = tnt.Model(Sampler())
    model.compile(optax.sgd(0.0), tnt.losses.SparseCategoricalCrossentropy(from_logits=True))
    history = model.fit(X, Y, batch_size=8, epochs=2, validation_data=(X, Y), verbose=0).history
    assert history["loss"][0] != history["loss"][1]
    assert history["val_loss"][0] == history["val_loss"][1]
