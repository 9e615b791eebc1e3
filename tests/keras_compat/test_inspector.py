"""What a model shows of itself: its arrays in every form, its layers, logs and programs."""

import re

import flax.linen as nn
import jax
import numpy as np
import pytest
from flax.traverse_util import flatten_dict

import tnt_jax as tnt

X = np.random.default_rng(0).normal(size=(8, 4)).astype(np.float32)
Y = np.arange(8) % 3


class Net(nn.Module):
    @nn.compact
    def __call__(self, x, train):
        x = nn.BatchNorm(use_running_average=not train)(nn.Dense(5)(x))
        return nn.Dense(3)(x)


VARIABLES = Net().init(jax.random.key(0), X[:1], train=False)


@pytest.fixture(scope="module")
def model():
    tnt.shutdown()
    tnt.init(devices=range(2))
    model = tnt.Model(Net(), variables=VARIABLES, frozen=["Dense_0"])
    model.compile(
        "sgd", loss=tnt.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"]
    )
    model.build((None, 4))
    yield model
    tnt.shutdown()


def test_trained_arrays_by_path_are_those_of_flax(model):
    expected = {
        path: x
        for path, x in flatten_dict(VARIABLES["params"], sep="/").items()
        if not path.startswith("Dense_0")
    }
    shown = model.weights_by_path()
    assert set(shown) == set(expected)
    assert all(np.array_equal(shown[path], expected[path]) for path in expected)
    assert model.count_params() == sum(x.size for x in jax.tree.leaves(VARIABLES))


def test_layers_hold_the_trained_weights_below_their_names(model):
    assert {layer.name: len(layer.weights) for layer in model.layers} == {
        "BatchNorm_0": 2, "Dense_1": 2,
    }  # fmt: skip
    layer = model.get_layer("Dense_1")
    assert [weight.path for weight in layer.weights] == ["Dense_1/bias", "Dense_1/kernel"]
    assert [weight.name for weight in layer.weights] == ["Dense_1/bias", "Dense_1/kernel"]
    assert np.array_equal(layer.get_weights()[1], VARIABLES["params"]["Dense_1"]["kernel"])
    layer.get_weights()[1][:] = 7
    layer.weights[1][:] = 7
    assert not np.any(model.weights_by_path()["Dense_1/kernel"] == 7), "They are copies."


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ({}, "name or an index, but got name=None and index=None"),
        ({"name": "Dense_1", "index": 0}, "name or an index"),
        ({"name": "Dense_9"}, "no layer 'Dense_9': .*BatchNorm_0, Dense_1"),
        ({"index": 2}, "no layer number 2"),
    ],
)
def test_layers_that_do_not_exist_are_refused_with_those_that_do(model, words, message):
    assert model.get_layer(index=-1).name == "Dense_1"
    with pytest.raises(ValueError, match=message):
        model.get_layer(**words)


def test_frozen_arrays_and_statistics_are_not_trainable(model):
    names = {variable.path for variable in model.trainable_weights}
    assert names == {"BatchNorm_0/bias", "BatchNorm_0/scale", "Dense_1/bias", "Dense_1/kernel"}
    assert len(model.weights) == len(names) + len(model.non_trainable_weights) == 8


def test_a_model_without_variables_says_so():
    fresh = tnt.Model(Net())
    assert fresh.layers == []
    with pytest.raises(RuntimeError, match="build"):
        fresh.summary()
    with pytest.raises(ValueError, match=r"none \(build the model\)"):
        fresh.get_layer("Dense_0")
    with pytest.raises(RuntimeError, match="call fit first"):
        fresh.plot_history("curves.png")


def test_the_summary_counts_every_value(model, capsys):
    model.summary()
    out = capsys.readouterr().out
    assert "Dense_1/kernel" in out
    trained, state = (int(text) for text in re.findall(r"(\d+) values", out))
    assert (trained, trained + state) == (10 + 18, model.count_params())


def test_programs_show_the_sum_over_ranks_before_and_after_the_compiler(model):
    planned = model.lowered_text(X, Y, 8)
    compiled = model.lowered_text(X, Y, 8, optimized=True)
    assert "stablehlo.all_reduce" in planned
    assert "HloModule" in compiled
    assert "all-reduce" in compiled
    assert model.describe_collectives(X, Y, 8).planned
    assert model.metrics_names == ["loss", "accuracy"]
    assert [metric.name for metric in model.metrics] == ["accuracy"]
