"""Two training steps of the tutorials' models give the same numbers on one rank and on four,
dropout and penalties included.
"""

import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tnt_jax as tnt
from tnt_jax import models

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
from translation_training import LabelSmoothedCrossentropy

RNG = np.random.default_rng(0)
LOGITS_LOSS = tnt.losses.SparseCategoricalCrossentropy(from_logits=True)


def image_data(num_rows):
    return RNG.normal(size=(num_rows, 8, 8, 3)).astype(np.float32), RNG.integers(
        0, 3, num_rows
    ).astype(np.int32)


def token_data(num_rows):
    tokens = RNG.integers(2, 11, (2, num_rows, 6)).astype(np.int32)
    lengths = RNG.integers(1, 7, (2, num_rows, 1))
    tokens[np.arange(6) >= lengths] = 0
    return (tokens[0], tokens[1]), tokens[1]


def train(num_ranks, module, loss, data, size):
    tnt.shutdown()
    tnt.init(devices=range(num_ranks))
    model = tnt.Model(module)
    # SGD shows a wrong scale of the gradients, which Adam hides.
    model.compile(tnt.optimizers.SGD(0.05), loss=loss)
    history = model.fit(*data, batch_size=size, shuffle=False, verbose=0).history
    found = jax.tree.map(np.asarray, model.variables)
    tnt.shutdown()
    return history["loss"], found


CASES = {
    "resnet20-family": (
        models.CifarResNet(depth=8, num_classes=3, bn_axis_name="data", kernel_l2=1e-3),
        LOGITS_LOSS,
        image_data(15),
        8,
    ),
    "cnn": (models.CNN(num_classes=3, dropout=0.5), LOGITS_LOSS, image_data(15), 8),
    "text classifier": (
        models.TextClassifier(vocab_size=11, num_outputs=3, dropout=0.3),
        LOGITS_LOSS,
        (token_data(15)[1], RNG.integers(0, 3, 15).astype(np.int32)),
        8,
    ),
    "transformer": (
        models.Transformer(
            vocab_size=11, width=8, num_heads=2, filter_dim=12, num_layers=1, dropout=0.3
        ),
        LabelSmoothedCrossentropy(0.1),
        token_data(15),
        8,
    ),
}


@pytest.mark.long  # tests/test_parity.py and tests/sharded train models like these by default.
@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_four_ranks_train_as_one(name):
    module, loss, data, size = CASES[name]
    expected_loss, expected = train(1, module, loss, data, size)
    found_loss, found = train(4, module, loss, data, size)
    np.testing.assert_allclose(found_loss, expected_loss, rtol=2e-5)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=2e-5), found, expected
    )
    fresh = jax.tree.map(np.asarray, module.init(jax.random.key(0), *_one_row(data), train=False))
    moved = jax.tree.map(lambda a, b: np.max(np.abs(a - b)), found["params"], fresh["params"])
    assert max(jax.tree.leaves(moved)) > 1e-3


def _one_row(data):
    inputs = data[0] if isinstance(data[0], tuple) else (data[0],)
    return [jnp.zeros((1, *array.shape[1:]), array.dtype) for array in inputs]
