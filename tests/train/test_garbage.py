"""Python's collector of garbage in cycles is off while a model is traced, and on again after it."""

import gc
from collections.abc import Callable

import flax.linen as nn
import numpy as np
import pytest

import tnt_jax as tnt

X, Y = np.zeros((16, 3), "f4"), np.zeros((16, 1), "f4")


class Watched(nn.Module):
    """Tells, whenever it is traced, whether the collector is on."""

    tell: Callable

    @nn.compact
    def __call__(self, x):
        self.tell(gc.isenabled())
        return nn.Dense(1)(x)


@pytest.fixture(autouse=True)
def collector():
    yield
    gc.enable()


def test_the_collector_is_off_while_the_model_is_traced():
    seen = []
    model = tnt.Model(Watched(seen.append))
    model.compile("sgd", loss="mse")
    model.fit(X, Y, batch_size=8, verbose=0)
    assert len(seen) > 1
    assert not any(seen)
    assert gc.isenabled()


def test_the_collector_is_on_after_a_refusal():
    model = tnt.Model(nn.Dense(1))
    model.compile("sgd", loss="mse")
    with pytest.raises(ValueError, match="text"):
        model.fit(np.array([["a", "b", "c"]] * 16), Y, batch_size=8, verbose=0)
    assert gc.isenabled()


def test_a_collector_that_the_user_turned_off_stays_off():
    gc.disable()
    model = tnt.Model(nn.Dense(1))
    model.compile("sgd", loss="mse")
    model.fit(X, Y, batch_size=8, verbose=0)
    assert not gc.isenabled()
