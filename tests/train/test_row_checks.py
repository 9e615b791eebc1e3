"""What gives results that depend on the number of devices is refused before training; what does not
is left alone.
"""

import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from long_params import long_but_last
from processes import SCRIPTS, launch

import tnt_jax as tnt
from tnt_jax.keras_compat import row_checks
from tnt_jax.log import logger

RNG = np.random.default_rng(0)
X = RNG.normal(size=(32, 6)).astype(np.float32)
Y = RNG.integers(0, 3, 32)
COMPARES, PLACE, SIZE = (
    "compares rows of a batch",
    "depend on its position in the batch",
    "depend on the number of rows",
)


class Module(nn.Module):
    """A classifier with something done to its inputs."""

    change: object
    dtype: object = jnp.float32

    @nn.compact
    def __call__(self, x, train: bool = False):
        return nn.Dense(3, dtype=self.dtype)(self.change(self, x, train))


def centred(module, x, train):
    return x - x.mean(0)


def centred_in_training(module, x, train):
    return x - x.mean(0) if train else x


def reversed_rows(module, x, train):
    return x + x[::-1]


def constant_noise(module, x, train):
    return x * jax.random.bernoulli(jax.random.key(0), 0.5, x.shape)


def constant_noise_in_training(module, x, train):
    return constant_noise(module, x, train) if train else x


def key_for_each_row(module, x, train):
    if not train:
        return x
    keys = jax.random.split(module.make_rng("dropout"), len(x))
    return x + jax.vmap(lambda key: jax.random.normal(key, x.shape[1:]))(keys)


def dropout_over_flat_rows(module, x, train):
    return nn.Dropout(0.5, deterministic=not train)(x.reshape(-1, 2)).reshape(x.shape)


def batch_norm(module, x, train):
    return nn.BatchNorm(use_running_average=not train)(x)


def batch_norm_after_centring(module, x, train):
    return batch_norm(module, x - x.mean(0), train)


def centred_beside_a_counter(module, x, train):
    calls = module.variable("counts", "calls", lambda: jnp.zeros(()))
    if train:
        calls.value += 1
    return centred_in_training(module, x, train)


def synchronised(module, x, train):
    return nn.BatchNorm(use_running_average=not train, axis_name="data")(x)


def all_rows(module, x, train):
    return x - jax.lax.pmean(x.mean(0), "data") if train else x


def dropout(module, x, train):
    return nn.Dropout(0.5, deterministic=not train)(x)


def noise(module, x, train):
    return x + jax.random.normal(module.make_rng("dropout"), x.shape) if train else x


def attention(module, x, train):
    x = nn.Dense(8)(x.reshape(len(x), 3, 2))
    attend = nn.MultiHeadDotProductAttention(2, dropout_rate=0.3, deterministic=not train)
    return attend(x, mask=nn.make_causal_mask(jnp.ones(x.shape[:2]))).reshape(len(x), -1)


def steep(module, x, train):
    return 1e6 * jnp.sin(1e3 * x) + nn.softmax(1e4 * x)


def layer_norm_of_large_numbers(module, x, train):
    return nn.LayerNorm()(1e4 + x)


def for_eight_rows(module, x, train):
    return x.reshape(8, 6) if len(x) > 1 else x


def batch_norm_and_noise(module, x, train):
    return batch_norm(module, noise(module, x, train), train)


def make(change, **fields):
    model = tnt.Model(Module(change, **fields))
    model.compile("sgd", tnt.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


@pytest.mark.parametrize("num_ranks", long_but_last(1, 4))
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (centred, COMPARES),
        (centred_in_training, COMPARES),
        (reversed_rows, COMPARES),
        (batch_norm_after_centring, COMPARES),
        (centred_beside_a_counter, COMPARES),
        (constant_noise, PLACE),
        (constant_noise_in_training, PLACE),
    ],
)
def test_a_module_whose_rows_know_each_other_is_refused_on_any_number_of_devices(
    change, message, num_ranks, use_ranks
):
    use_ranks(num_ranks)
    with pytest.raises(ValueError, match=f"'Module' .*{message}.*number"):
        make(change).fit(X, Y, batch_size=16, verbose=0)


@pytest.mark.parametrize("precision", [{}, {"dtype": jnp.bfloat16}])
@pytest.mark.parametrize(
    "change",
    [
        batch_norm,
        synchronised,
        all_rows,
        dropout,
        noise,
        key_for_each_row,
        dropout_over_flat_rows,
        attention,
        steep,
        layer_norm_of_large_numbers,
        for_eight_rows,
    ],
)
def test_a_module_with_rows_of_their_own_or_batch_statistics_is_trained(
    change, precision, use_ranks
):
    use_ranks(4)
    history = make(change, **precision).fit(X, Y, batch_size=32, verbose=0).history
    assert np.isfinite(history["loss"]).all()


class Centred(nnx.Module):
    def __init__(self, rngs):
        self.linear = nnx.Linear(6, 3, rngs=rngs)
        self.norm = nnx.BatchNorm(6, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.centres = True

    def __call__(self, x):
        x = x - x.mean(0) if self.centres else x
        return self.linear(self.dropout(self.norm(x)))


def draws_numbers(traced):
    return "random_bits" in str(traced.jaxpr)


@pytest.mark.parametrize(("change", "train"), [(batch_norm_and_noise, False), (dropout, True)])
def test_one_program_is_compiled_for_the_check(change, train, use_ranks, monkeypatch):
    use_ranks(1)
    compile_it, compiled = row_checks._compiled, []

    def noted(traced):
        compiled.append(traced)
        return compile_it(traced)

    monkeypatch.setattr(row_checks, "_compiled", noted)
    make(change).fit(X, Y, batch_size=16, verbose=0)
    # Batch statistics are those of evaluation; random numbers are drawn in training alone.
    assert [draws_numbers(traced) for traced in compiled] == [train]


@pytest.mark.parametrize(
    ("change", "traced"), [(batch_norm, [False]), (synchronised, [False]), (dropout, [True])]
)
def test_the_step_tells_whether_there_are_statistics(change, traced, use_ranks, monkeypatch):
    use_ranks(2)
    program, found = row_checks._program, []

    def noted(*args, train):
        found.append(train)
        return program(*args, train=train)

    monkeypatch.setattr(row_checks, "_program", noted)
    make(change).fit(X, Y, batch_size=16, verbose=0)
    assert found == traced


def test_an_nnx_module_that_compares_rows_is_refused_and_one_with_statistics_is_not(use_ranks):
    use_ranks(2)
    loss = tnt.losses.SparseCategoricalCrossentropy(from_logits=True)
    module = Centred(nnx.Rngs(0))
    model = tnt.Model(module)
    model.compile("sgd", loss)
    with pytest.raises(ValueError, match=COMPARES):
        model.fit(X, Y, verbose=0)
    module.centres = False
    model = tnt.Model(module)
    model.compile("sgd", loss)
    model.fit(X, Y, verbose=0)


def logits_of(params, batch):
    return batch.inputs @ params["kernel"] + params["bias"]


def contrastive(params, batch, rngs):
    z = logits_of(params, batch)
    return -jnp.diag(nn.log_softmax(z @ z.T))


def contrastive_over_all_ranks(params, batch, rngs):
    z = logits_of(params, batch)
    every = jax.lax.all_gather(z, "data", axis=0, tiled=True)
    first = jax.lax.axis_index("data") * len(z)
    return -jnp.take_along_axis(
        nn.log_softmax(z @ every.T), first + jnp.arange(len(z))[:, None], axis=1
    )[:, 0]


def divided(params, batch, rngs):
    return jnp.sum(logits_of(params, batch) ** 2, -1) / len(batch.inputs)


def metric_that_compares(params, batch, rngs):
    z = logits_of(params, batch)
    return jnp.sum(z**2, -1), {"spread": jnp.sum((z - z.mean(0)) ** 2, -1)}


def constant_key(params, batch, rngs):
    return jnp.sum(logits_of(params, batch), -1) * jax.random.uniform(
        jax.random.key(1), (len(batch.inputs),)
    )


def fair(params, batch, rngs, apply):
    z = apply(params, batch.inputs)
    noise = jax.random.normal(rngs["dropout"], z.shape) if rngs else 0.0
    return jnp.sum((z + noise) ** 2, -1), {"mean": z.mean(-1)}


@pytest.mark.parametrize("num_ranks", long_but_last(1, 4))
@pytest.mark.parametrize(
    ("objective", "message"),
    [
        (contrastive, COMPARES),
        (metric_that_compares, COMPARES),
        (constant_key, PLACE),
        (divided, SIZE),
    ],
)
def test_an_objective_whose_rows_know_each_other_is_refused_on_any_number_of_devices(
    objective, message, num_ranks, use_ranks
):
    use_ranks(num_ranks)
    model = tnt.Model(nn.Dense(3))
    model.compile("sgd", objective=objective)
    with pytest.raises(ValueError, match=f"The objective .*{message}"):
        model.fit(X, batch_size=16, verbose=0)


@pytest.mark.parametrize("objective", [contrastive_over_all_ranks, fair])
def test_an_objective_that_gathers_rows_or_draws_by_row_gives_the_same_on_four_devices(
    objective, use_ranks
):
    found = []
    for num_ranks in (1, 4):
        use_ranks(num_ranks)
        model = tnt.Model(nn.Dense(3), seed=1)
        model.compile("sgd", objective=objective)
        history = model.fit(X, batch_size=16, epochs=2, verbose=0).history["loss"]
        found.append([*history, *np.ravel(model.variables["params"]["kernel"])])
    np.testing.assert_allclose(found[0], found[1], rtol=1e-5, atol=1e-6)


@pytest.mark.slow
@pytest.mark.multiprocess
def test_every_process_raises_when_the_rows_of_one_show_the_fault(tmp_path):
    result = launch(2, SCRIPTS / "compare_rows.py", tmp_path)
    told = [(tmp_path / str(process)).read_text() for process in range(2)]
    assert re.match(
        rf"RuntimeError: Process 1 failed: ValueError: The model 'Centred' {COMPARES}", told[0]
    ), result.stderr
    assert re.match(rf"ValueError: The model 'Centred' {COMPARES}", told[1])


class LinenTokens(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(3)(nn.Embed(10, 4)(x["tokens"].astype(jnp.int16)).mean(1))


class NnxTokens(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0)
        self.embed, self.out = nnx.Embed(10, 4, rngs=rngs), nnx.Linear(4, 3, rngs=rngs)

    def __call__(self, x):
        return self.out(self.embed(x["tokens"]).mean(1))


@pytest.mark.parametrize("make", [LinenTokens, NnxTokens])
@pytest.mark.parametrize("largest", [9, 10])
def test_ids_that_an_embedding_lacks_are_told(use_ranks, caplog, monkeypatch, make, largest):
    use_ranks(2)
    monkeypatch.setattr(logger, "propagate", True)
    x = np.zeros((16, 5), int)
    x[3, 2] = largest
    model = tnt.Model(make())
    model.compile("sgd", tnt.losses.SparseCategoricalCrossentropy(from_logits=True))
    [loss] = model.fit({"tokens": x}, x[:, 0], batch_size=8, verbose=0).history["loss"]
    assert np.isnan(loss) == (largest == 10)
    told = r"from 0 to 10 of the inputs['tokens'] in an embedding of 10 entries" in caplog.text
    assert told == (largest == 10)
