"""Before training it is found out whether rows depend on one another, which decides over the step;
results are those of one device in any case.
"""

import runpy
import sys

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from processes import SCRIPTS, launch

import tnt_jax as tnt
from tnt_jax.keras_compat.compiling import row_checks
from tnt_jax.log import logger
from tnt_jax.train.steps.data_parallel import DataParallelSteps
from tnt_jax.train.steps.global_step import GlobalSteps

RNG = np.random.default_rng(0)
X = RNG.normal(size=(32, 6)).astype(np.float32)
Y = RNG.integers(0, 3, 32)
COMPARES, PLACE, SIZE = (
    "compares rows of a batch",
    "depend on its position in the batch",
    "depend on the number of rows",
)


@pytest.fixture(autouse=True)
def told(monkeypatch):
    monkeypatch.setenv("TNT_LOG_LEVEL", "INFO")


def reasons(capsys):
    lines = capsys.readouterr().err.splitlines()
    said = [line.removeprefix("[tnt_jax] INFO: ") for line in lines]
    return [line for line in said if "divides each step" in line]


def assert_alike(found):
    first, *others = found
    for other in others:
        np.testing.assert_allclose(other, first, rtol=1e-5, atol=1e-6)


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


def batch_norm_after_centring_in_training(module, x, train):
    return batch_norm(module, centred_in_training(module, x, train), train)


def centred_by_slices(module, x, train):
    """What the trace does not tell."""
    return x - sum(x[row : row + 1] for row in range(len(x))) / len(x)


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


def history_of(module, use_ranks, num_ranks, **options):
    use_ranks(num_ranks)
    model = make(module, **options)
    history = model.fit(X, Y, batch_size=16, epochs=2, shuffle=False, verbose=0).history["loss"]
    return [*history, *np.ravel(model.variables["params"]["Dense_0"]["kernel"])]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (centred, COMPARES),
        (centred_in_training, COMPARES),
        (centred_by_slices, COMPARES),
        (reversed_rows, COMPARES),
        (batch_norm_after_centring, COMPARES),
        (batch_norm_after_centring_in_training, COMPARES),
        (centred_beside_a_counter, COMPARES),
        (constant_noise, PLACE),
        (constant_noise_in_training, PLACE),
    ],
)
def test_a_module_whose_rows_know_each_other_is_trained_as_on_one_device(
    change, message, use_ranks, capsys
):
    assert_alike([history_of(change, use_ranks, num_ranks) for num_ranks in (1, 4)])
    (reason,) = reasons(capsys)
    assert reason.startswith("The model 'Module' ")
    assert message in reason


OF_OWN_ROWS = [
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
]


def chosen_step(model):
    """Chooses the step for batches of 32 rows, and does not compile it."""
    model.lowered_text(X, Y, batch_size=32)
    return type(model._core.trainer.steps)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("change", OF_OWN_ROWS)
def test_a_module_with_rows_of_their_own_or_batch_statistics_keeps_the_fused_step(
    change, dtype, four_ranks, capsys
):
    assert chosen_step(make(change, dtype=dtype)) is DataParallelSteps
    assert not reasons(capsys)


def test_half_precision_does_not_hide_a_comparison(four_ranks, capsys):
    assert chosen_step(make(centred, dtype=jnp.bfloat16)) is GlobalSteps
    assert len(reasons(capsys)) == 1


class Centred(nnx.Module):
    def __init__(self, rngs):
        self.linear = nnx.Linear(6, 3, rngs=rngs)
        self.norm = nnx.BatchNorm(6, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.centres = True

    def __call__(self, x):
        x = x - x.mean(0) if self.centres else x
        return self.linear(self.dropout(self.norm(x)))


@pytest.mark.parametrize(
    ("change", "num_programs"), [(batch_norm_and_noise, 0), (dropout, 0), (centred_by_slices, 1)]
)
def test_a_program_is_compiled_for_the_check_only_where_the_trace_does_not_tell(
    change, num_programs, two_ranks, monkeypatch
):
    run, programs = row_checks._Program.run, []

    def noted(program, *arguments):
        values = run(program, *arguments)
        programs.append(program)
        return values

    monkeypatch.setattr(row_checks._Program, "run", noted)
    chosen_step(make(change))
    assert sum(len(program._programs) for program in set(programs)) == num_programs


@pytest.mark.parametrize("centres", [True, False])
def test_an_nnx_module_that_compares_rows_is_found(centres, two_ranks, capsys):
    module = Centred(nnx.Rngs(0))
    module.centres = centres
    model = tnt.Model(module)
    model.compile("sgd", tnt.losses.SparseCategoricalCrossentropy(from_logits=True))
    assert chosen_step(model) is (GlobalSteps if centres else DataParallelSteps)
    assert bool(reasons(capsys)) == centres


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


def results_of(objective, use_ranks, num_ranks):
    use_ranks(num_ranks)
    model = tnt.Model(nn.Dense(3), seed=1)
    model.compile("sgd", objective=objective)
    history = model.fit(X, batch_size=16, epochs=2, verbose=0).history
    return [*np.ravel(list(history.values())), *np.ravel(model.variables["params"]["kernel"])]


@pytest.mark.parametrize(
    ("objective", "message"),
    [
        (contrastive, COMPARES),
        (metric_that_compares, COMPARES),
        (constant_key, PLACE),
        (divided, SIZE),
    ],
)
def test_an_objective_whose_rows_know_each_other_is_trained_as_on_one_device(
    objective, message, use_ranks, capsys
):
    assert_alike([results_of(objective, use_ranks, num_ranks) for num_ranks in (1, 4)])
    (reason,) = reasons(capsys)
    assert reason.startswith("The objective ")
    assert message in reason


@pytest.mark.parametrize("objective", [contrastive_over_all_ranks, fair])
def test_an_objective_that_gathers_rows_or_draws_by_row_gives_the_same_on_four_devices(
    objective, use_ranks, capsys
):
    assert_alike([results_of(objective, use_ranks, num_ranks) for num_ranks in (1, 4)])
    assert not reasons(capsys)


def mean_over_the_batch(targets, outputs):
    return jnp.mean((outputs - outputs.mean(0)) ** 2, -1) + 0 * targets


def divided_by_the_batch(targets, outputs):
    return jnp.sum(outputs**2, -1) / len(outputs)


@pytest.mark.parametrize(
    ("loss", "message"), [(mean_over_the_batch, COMPARES), (divided_by_the_batch, SIZE)]
)
def test_a_loss_whose_rows_know_each_other_is_trained_as_on_one_device(
    loss, message, use_ranks, capsys
):
    found = []
    for num_ranks in (1, 4):
        use_ranks(num_ranks)
        model = tnt.Model(nn.Dense(3), seed=1)
        model.compile("sgd", loss)
        history = model.fit(X, Y, batch_size=16, epochs=2, verbose=0).history["loss"]
        found.append([*history, *np.ravel(model.variables["params"]["kernel"])])
    assert_alike(found)
    (reason,) = reasons(capsys)
    assert reason.startswith(f"Loss {loss.__name__!r} ")
    assert message in reason


@pytest.mark.slow
@pytest.mark.multiprocess
def test_processes_choose_alike_where_the_rows_of_one_alone_show_the_comparison(
    use_ranks, tmp_path, monkeypatch
):
    use_ranks(1)
    monkeypatch.setattr(sys, "argv", ["compare_rows.py", str(tmp_path)])
    runpy.run_path(str(SCRIPTS / "compare_rows.py"))
    result = launch(2, SCRIPTS / "compare_rows.py", tmp_path)
    assert result.returncode == 0, result.stderr
    assert_alike([np.loadtxt(tmp_path / name) for name in ("0 of 1", "0 of 2", "1 of 2")])
    assert "compares rows of a batch" in result.stderr


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
    told = (
        r"from 0 to 10 of the inputs['tokens'] are looked up in an embedding of 10 entries"
        in caplog.text
    )
    assert told == (largest == 10)
