"""Each form of a step is taken where no faster one fits, with the result of one pass."""

from functools import cache

import jax
import keras
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx
from training import assert_close, crossentropy

import tnt_jax as tnt
from tnt_jax.train import memory_choice

# What the blocks keep of a row is larger than the parameters.
ROWS, STEPS, WIDTH, INNER, DEPTH = 15, 64, 32, 128, 4


class Block(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(WIDTH)(nn.gelu(nn.Dense(INNER)(x)))


class OfLinen(nn.Module):
    @nn.compact
    def __call__(self, x, train=False):
        for _ in range(DEPTH):
            x = Block()(x)
        return nn.Dense(5)(x.mean(1))


class BlockOfNnx(nnx.Module):
    def __init__(self, rngs):
        self.inner = nnx.Linear(WIDTH, INNER, rngs=rngs)
        self.outer = nnx.Linear(INNER, WIDTH, rngs=rngs)

    def __call__(self, x):
        return self.outer(nnx.gelu(self.inner(x)))


class OfNnx(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0)
        self.layers = nnx.List([BlockOfNnx(rngs) for _ in range(DEPTH)])
        self.last = nnx.Linear(WIDTH, 5, rngs=rngs)

    def __call__(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.last(x.mean(1))


def of_keras():
    keras.utils.set_random_seed(0)
    blocks = [
        keras.Sequential(
            [keras.layers.Dense(INNER, "silu"), keras.layers.Dense(WIDTH)], name=f"block_{i}"
        )
        for i in range(DEPTH)
    ]
    pooling, last = keras.layers.GlobalAveragePooling1D(), keras.layers.Dense(5)
    return keras.Sequential([keras.layers.Input((STEPS, WIDTH)), *blocks, pooling, last])


class WithoutBlocks(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0)
        self.block = BlockOfNnx(rngs)
        self.last = nnx.Linear(WIDTH, 5, rngs=rngs)

    def __call__(self, x):
        return self.last(self.block(x).mean(1))


class NormalizedBlock(nn.Module):
    @nn.compact
    def __call__(self, x, train):
        x = nn.BatchNorm(not train, axis_name="data")(nn.Dense(INNER)(x))
        return nn.Dense(WIDTH)(nn.gelu(x))


class Normalized(nn.Module):
    @nn.compact
    def __call__(self, x, train=False):
        for _ in range(DEPTH):
            x = NormalizedBlock()(x, train)
        return nn.Dense(5)(x.mean(1))


MODULES = {
    "linen": OfLinen,
    "nnx": OfNnx,
    "keras": of_keras,
    "without blocks": WithoutBlocks,
    "BatchNorm": Normalized,
}


def train(kind, micro):
    """Returns a model after two epochs of a batch that four ranks cannot share equally."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(ROWS, STEPS, WIDTH)).astype(np.float32)
    model = tnt.Model(MODULES[kind](), seed=3)
    model.compile(tnt.optimizers.SGD(0.1, momentum=0.9), loss=crossentropy())
    model.fit(
        x, np.arange(len(x)) % 5, batch_size=ROWS, epochs=2, verbose=0, tnt_micro_batch_size=micro
    )
    return model


@cache
def in_one_pass(kind):
    tnt.shutdown()
    tnt.init(devices=[0])
    return jax.device_get(train(kind, None).get_weights())


@cache
def needs(kind):
    """Returns each form of the step on four ranks, and the least that it needs."""
    found = {}

    def choose(asked, ways, limit, **options):
        for way in ways:
            try:
                memory = way.program(None if way.why_whole() else 1).compile()
            except ValueError:
                continue  # It has no blocks.
            found[way.name] = memory.most_bytes(0) + way.beside
        raise ValueError("All were looked at")

    tnt.shutdown()
    tnt.init(devices=range(4))
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(memory_choice, "choose", choose)
        with pytest.raises(ValueError, match="All were looked at"):
            train(kind, "auto")
    return found


REMAT = "remat='full'"
# With `fsdp 2`, gathered parameters take more than what is sharded saves, here.
FORMS = ["", REMAT, f"shard_optimizer_state, {REMAT}", f"fsdp 4, {REMAT}"]


@pytest.mark.parametrize(
    "kind",
    [
        "linen",
        pytest.param("nnx", marks=pytest.mark.long),
        pytest.param("keras", marks=pytest.mark.long),
    ],
)
@pytest.mark.parametrize("form", FORMS)
def test_each_form_is_taken_where_no_faster_one_fits(use_ranks, monkeypatch, kind, form):
    expected, least = in_one_pass(kind), needs(kind)
    assert list(least) == [*FORMS[:3], f"data 2, fsdp 2, {REMAT}", FORMS[3]]
    monkeypatch.setenv("TNT_DEVICE_MEMORY", f"{least[form]}B")
    use_ranks(4)
    model = train(kind, "auto")
    choice = model._core.memory_choice
    assert choice.way == list(least).index(form)
    # An elastic job goes on in place as long as every process holds the whole state.
    obstacles = {
        FORMS[2]: "the optimizer's state is sharded",
        FORMS[3]: "the variables are sharded",
    }
    assert model._core.why_not_elastic() == obstacles.get(form)
    assert_close(model.get_weights(), expected)


@pytest.mark.parametrize("form", [REMAT, pytest.param(FORMS[2], marks=pytest.mark.long)])
def test_statistics_of_a_batch_are_computed_in_one_pass_of_each_form(use_ranks, monkeypatch, form):
    """BatchNorm over `data` alone is refused where rows are split over `fsdp` as well."""
    expected, least = in_one_pass("BatchNorm"), needs("BatchNorm")
    assert list(least) == FORMS[:3]
    monkeypatch.setenv("TNT_DEVICE_MEMORY", f"{least[form]}B")
    use_ranks(4)
    model = train("BatchNorm", "auto")
    choice = model._core.memory_choice
    assert choice.way == FORMS.index(form)
    assert choice.rows_at_once is None
    assert "communicates with other ranks" in choice.note
    assert_close(model.get_weights(), expected)


@pytest.mark.parametrize(
    "form", [pytest.param("shard_optimizer_state", marks=pytest.mark.long), "fsdp 4"]
)
def test_a_model_without_blocks_is_sharded_all_the_same(use_ranks, monkeypatch, form):
    expected, least = in_one_pass("without blocks"), needs("without blocks")
    assert list(least) == ["", "shard_optimizer_state", "data 2, fsdp 2", "fsdp 4"]
    monkeypatch.setenv("TNT_DEVICE_MEMORY", f"{least[form]}B")
    use_ranks(4)
    model = train("without blocks", "auto")
    choice = model._core.memory_choice
    assert choice.way == ["", REMAT, *list(least)[1:]].index(form)
    assert "remat='full' is impossible: " in str(choice)
    assert_close(model.get_weights(), expected)
