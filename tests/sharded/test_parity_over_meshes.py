"""The table of kinds of models and meshes: training that goes on on another mesh equals training on
one device. Each test has history, weights and predictions of two meshes and of a checkpoint.
"""

import math

import numpy as np
import pytest
from processes import SCRIPTS
from training import assert_close

import tnt_jax as tnt

pytestmark = [
    pytest.mark.long,  # Some twenty programs; one of each is in the files beside.
    pytest.mark.parametrize("what_moves", ["parameters", "rows"], indirect=True),
]

TURNS = [
    ({"fsdp": 1}, {"fsdp": 2}),
    ({"fsdp": 2}, {"data": 2, "fsdp": 2}),
    ({"data": 2, "fsdp": 2}, {"data": 2, "fsdp": 4}),
    ({"fsdp": 8}, {"fsdp": 4}),
    ({"data": 2, "fsdp": 4}, None),
]


def train(kind, mesh, epochs, directory="-"):
    """Returns history, weights and predictions."""
    from train_sharded import train as train_kind

    tnt.shutdown()
    tnt.init(devices=range(math.prod((mesh or {}).values())))
    model, history, predicted = train_kind(kind, mesh, epochs, directory)
    return {k: np.array(v) for k, v in history.items()}, model.get_weights(), predicted


@pytest.fixture(scope="module")
def on_one_device():
    """Returns a function that trains a kind once."""
    known = {}

    def result(kind):
        if kind not in known:
            known[kind] = train(kind, None, 2)
        return known[kind]

    yield result
    tnt.shutdown()


@pytest.fixture(autouse=True)
def scripts_on_path(monkeypatch):
    monkeypatch.syspath_prepend(SCRIPTS)


@pytest.mark.parametrize("kind", ["mlp", "resnet", "transformer", "nnx", "keras"])
@pytest.mark.parametrize(("mesh", "then"), TURNS, ids=str)
def test_training_goes_on_on_another_mesh_as_on_one_device(
    on_one_device, tmp_path, kind, mesh, then
):
    expected = on_one_device(kind)
    history, *_ = train(kind, mesh, 1, tmp_path)
    assert_close(history, {name: values[:1] for name, values in expected[0].items()})
    assert_close(train(kind, then, 2, tmp_path), expected)
