"""Convolutions on CPUs: which library computes them in programs that train, evaluate and
predict.
"""

from types import SimpleNamespace

import flax.linen as nn
import jax
import numpy as np
import pytest

import tnt_jax as tnt
from tnt_jax import _jax
from tnt_jax.train.contracts import Batch

# XLA gives convolutions of more than 16 channels to YNNPACK.
X, Y = (
    np.random.default_rng(0).normal(size=(8, 6, 6, 32)).astype(np.float32),
    np.zeros((8, 32), np.float32),
)


class Net(nn.Module):
    @nn.compact
    def __call__(self, x, train=False):
        x = nn.Conv(32, (3, 3))(nn.relu(nn.Conv(32, (3, 3))(x)))
        return nn.Dense(32)(x.reshape(len(x), -1))


def ynn_convolutions(compiled):
    """Counts convolutions in fusions of YNNPACK, whose computations stand in front of the program's
    entry.
    """
    text = compiled.as_text()
    called = {
        line.split("calls=%")[1].split(",")[0]
        for line in text.splitlines()
        if "__ynn_fusion" in line
    }
    blocks = (block for block in text.split("\n\n") if block.startswith("%"))
    return sum(
        block.count(" convolution(") for block in blocks if block[1:].split(" ")[0] in called
    )


@pytest.fixture
def trainer():
    tnt.shutdown()
    tnt.init(devices=range(1))
    model = tnt.Model(Net(), seed=0)
    model.compile("sgd", loss="mse")
    model.fit(X, Y, batch_size=8, verbose=0)
    yield model._trainer
    tnt.shutdown()


def test_no_program_leaves_its_convolutions_to_ynnpack(trainer):
    plain = jax.jit(Net().apply).lower({"params": trainer.state.params}, X).compile()
    predict = trainer.predict_step.lower(
        trainer.state.params, trainer.state.model_state, X, np.uint32(0)
    ).compile()
    # The XLA of JAX 0.10.0 leaves none to it.
    assert ynn_convolutions(plain) > 0 or jax.__version_info__ < (0, 10, 2)
    assert (
        ynn_convolutions(predict)
        == ynn_convolutions(trainer.lower_train_step(Batch(X, Y)).compile())
        == 0
    )


def test_results_of_both_libraries_agree(trainer):
    plain = jax.jit(Net().apply)({"params": trainer.state.params}, X)
    ours = trainer.predict_step(trainer.state.params, trainer.state.model_state, X, np.uint32(0))
    np.testing.assert_allclose(ours, plain, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("platform", "is_chosen"), [("cpu", True), ("gpu", False)])
def test_options_are_for_cpus(platform, is_chosen):
    devices = [SimpleNamespace(platform=platform)] * 2
    assert bool(_jax.convolution_options(SimpleNamespace(devices=np.array(devices)))) == is_chosen  # pyright: ignore[reportArgumentType]
