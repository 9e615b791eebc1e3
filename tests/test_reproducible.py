"""The same bits on any number of devices: weights, optimizer state, history, evaluation and predictions."""

import hashlib

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import tnt_jax as tnt
from tnt_jax.models.transformer import Transformer


class Mlp(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(3)(nn.relu(nn.Dense(16)(x.reshape(x.shape[0], -1))))


class ConvNet(nn.Module):
    """A convolution, a batch normalisation and a dropout."""

    @nn.compact
    def __call__(self, x, train):
        x = nn.relu(nn.BatchNorm(use_running_average=not train)(nn.Conv(4, (3, 3))(x)))
        x = nn.Dropout(0.3, deterministic=not train)(x.reshape(x.shape[0], -1))
        return nn.Dense(3)(x)


class Translator(nn.Module):
    @nn.compact
    def __call__(self, tokens, train):
        model = Transformer(vocab_size=20, width=8, num_heads=2, filter_dim=16, num_layers=1, dropout=0.1)
        return model(tokens, tokens, train=train)


class SynchronizedNet(nn.Module):
    @nn.compact
    def __call__(self, x, train):
        x = nn.BatchNorm(use_running_average=not train, axis_name="data")(x.reshape(x.shape[0], -1))
        return nn.Dense(3)(x)


def images(rows, seed=0):
    generator = np.random.default_rng(seed)
    return generator.normal(size=(rows, 5, 5, 2)).astype(np.float32), generator.integers(0, 3, rows)


def sentences(rows):
    tokens = np.random.default_rng(0).integers(1, 20, (rows, 6)).astype(np.int32)
    return tokens, tokens


@pytest.fixture
def on_devices():
    """Gives a function that makes the first n devices the job's."""
    before = tnt.init()

    def choose(number):
        tnt.shutdown()
        return tnt.init(devices=range(number))

    yield choose
    tnt.shutdown()
    tnt.init(devices=before.local_ranks)


def compiled(module, optimizer, **options):
    model = tnt.Model(module, reproducible=True, seed=3, **options)
    loss = tnt.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer=optimizer, loss=loss, metrics=["accuracy"])
    return model


def train(module, optimizer, data, *, sample_weight=None, batch_size, epochs=2, **options):
    """Returns digests of all that a run produces."""
    model = compiled(module, optimizer, **options)
    history = model.fit(*data, sample_weight=sample_weight, batch_size=batch_size, epochs=epochs, verbose=0).history
    state = model._trainer.state
    return {
        "params": digest(state.params),
        "model_state": digest(state.model_state),
        "opt_state": digest(state.opt_state),
        "history": history,
        "evaluate": model.evaluate(*data, batch_size=batch_size, verbose=0),
        "predict": digest(model.predict(data[0], batch_size=batch_size, verbose=0)),
    }


def digest(tree):
    return [hashlib.md5(np.asarray(leaf).tobytes()).hexdigest() for leaf in jax.tree.leaves(tree)]


def weights_of(rows):
    return np.random.default_rng(1).uniform(0.5, 2, rows).astype(np.float32)


CASES = {
    # 30 and 13 rows do not divide by 8: every batch is padded, the last one of each epoch more.
    "mlp, momentum, padded": (Mlp(), optax.sgd(0.1, momentum=0.9), images(43), {"batch_size": 30, "virtual_ranks": 8}, (1, 8)),
    "mlp, weighted": (
        Mlp(), optax.adam(0.01), images(32), {"batch_size": 16, "virtual_ranks": 4, "sample_weight": weights_of(32)}, (1, 4),
    ),
    "conv net, batch norm, dropout, adam": (ConvNet(), optax.adam(0.01), images(22), {"batch_size": 11, "virtual_ranks": 4}, (1, 4)),
    "transformer, dropout": (Translator(), optax.adam(0.01), sentences(16), {"batch_size": 8, "virtual_ranks": 2}, (1, 2)),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_any_number_of_devices_gives_the_same_bits(name, on_devices):
    module, optimizer, data, options, counts = CASES[name]
    results = []
    for count in counts:
        on_devices(count)
        results.append(train(module, optimizer, data, **options))
    for count, result in zip(counts[1:], results[1:], strict=True):
        assert result == results[0], f"{count} devices differ from {counts[0]}"


def test_training_equals_the_fast_steps_up_to_rounding(on_devices):
    on_devices(4)
    options = {"batch_size": 10, "epochs": 2, "verbose": 0, "shuffle": False}
    weights = []
    for reproducible in (True, False):
        model = tnt.Model(ConvNetWithoutState(), reproducible=reproducible, virtual_ranks=4, seed=3)
        model.compile(optimizer=optax.sgd(0.1), loss=tnt.losses.SparseCategoricalCrossentropy(from_logits=True))
        model.fit(*images(23), **options)
        weights.append(model.variables["params"])
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), *weights)


class ConvNetWithoutState(nn.Module):
    @nn.compact
    def __call__(self, x, train):
        x = nn.Dropout(0.3, deterministic=not train)(nn.relu(nn.Conv(4, (3, 3))(x)))
        return nn.Dense(3)(x.reshape(x.shape[0], -1))


def test_a_run_resumed_on_other_devices_ends_with_the_same_bits(on_devices, tmp_path):
    def fit(model, epochs, initial_epoch=0):
        model.fit(*images(20), batch_size=8, epochs=epochs, initial_epoch=initial_epoch, verbose=0)

    def state(model):
        return digest((model._trainer.state.params, model._trainer.state.opt_state))

    on_devices(1)
    whole = compiled(Mlp(), optax.adam(0.01), virtual_ranks=4)
    fit(whole, 2)
    on_devices(4)
    first = compiled(Mlp(), optax.adam(0.01), virtual_ranks=4)
    fit(first, 1)
    saved = jax.tree.map(lambda x: x if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else np.array(x), first._trainer.state)
    assert state(first) != state(whole)
    on_devices(2)
    second = compiled(Mlp(), optax.adam(0.01), virtual_ranks=4)
    fit(second, 0)
    second._trainer.set_state(saved)
    fit(second, 2, initial_epoch=1)
    assert state(second) == state(whole)


def test_a_model_that_looks_at_other_ranks_is_refused(on_devices):
    on_devices(2)
    model = compiled(SynchronizedNet(), optax.sgd(0.1), virtual_ranks=2)
    with pytest.raises(ValueError, match="Leave out axis_name"):
        model.fit(*images(8), batch_size=8, verbose=0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"virtual_ranks": 6}, "must be a power of two"),
        ({"gradient_compression": "bfloat16"}, "gradient_compression='bfloat16' changes how gradients are summed"),
        ({"shard_optimizer_state": True}, "shard_optimizer_state=True changes"),
    ],
)
def test_options_that_cannot_be_kept_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        tnt.Model(Mlp(), reproducible=True, **options)


def test_a_number_of_devices_that_does_not_fit_is_refused(on_devices):
    on_devices(3)
    model = compiled(Mlp(), optax.sgd(0.1), virtual_ranks=4)
    with pytest.raises(ValueError, match="runs on 1, 2, 4 device"):
        model.fit(*images(8), batch_size=8, verbose=0)
