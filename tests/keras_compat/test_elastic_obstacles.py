"""What keeps training from going on with other processes in an elastic job."""

import flax.linen as nn
import numpy as np
import pytest

import tnt_jax as tnt

X = np.random.default_rng(0).normal(size=(16, 3)).astype(np.float32)


class Linear(nn.Module):
    """Sums of the inputs."""

    @nn.compact
    def __call__(self, x, train=False):
        return nn.Dense(1)(x)


@pytest.fixture(autouse=True)
def no_job():
    """Ends the job that other tests have begun, and the one of the test."""
    tnt.shutdown()
    yield
    tnt.shutdown()


def compiled(accumulation=None, on_nan=None, **options):
    model = tnt.Model(Linear(), **options)
    optimizer = tnt.optimizers.SGD(0.1, gradient_accumulation_steps=accumulation)
    model.compile(optimizer, loss="mse", on_nan=on_nan)
    model.build((None, 3))
    return model


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, None),
        ({"reproducible": True}, None),
        ({"shard_optimizer_state": True}, "the optimizer's state is sharded"),
        ({"gradient_compression": "bfloat16"}, "what compression leaves out is sharded"),
        ({"accumulation": 2}, "accumulated gradients are sharded"),
        ({"on_nan": "skip"}, "on_nan looks back at steps on the devices"),
        ({"sync": tnt.LocalSteps(groups="process")}, None),
        (
            {"sync": tnt.LocalSteps(groups=[[0]])},
            "a group that trains by itself may lose a part of its ranks",
        ),
    ],
    ids=str,
)
def test_what_other_processes_would_lack_is_named(options, expected):
    assert compiled(**options)._core.why_not_elastic() == expected


def test_another_model_is_an_obstacle_until_it_is_forgotten():
    first, second = compiled(), compiled()
    expected = "the arrays of another model would be lost"
    assert first._core.why_not_elastic() == second._core.why_not_elastic() == expected
    second.itself = second
    del second
    assert first._core.why_not_elastic() is None


def test_a_view_of_the_model_is_an_obstacle():
    model = compiled()
    view = model.view(Linear())
    assert model._core.why_not_elastic() == "the arrays of another model would be lost"
    del view
    assert model._core.why_not_elastic() is None
