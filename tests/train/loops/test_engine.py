"""The host side of a distributed step: how far it runs ahead, and what it compiles."""

import jax
import numpy as np
import pytest
from own_loops import average, descend
from reference_trainer import make_data

import tnt_jax as tnt

X, Y, _ = make_data(28)
BATCHES = 7


@pytest.fixture
def one_rank(use_ranks):
    use_ranks(1)


def make_step():
    """Returns a step, and the list to which each tracing of it adds an entry."""
    traced = []

    @tnt.distributed_step
    def step(params, batch):
        traced.append(batch)
        loss, grads = tnt.value_and_grad(lambda p: average(p, batch))(params)
        return descend(params, grads), {"loss": loss}

    return step, traced


def params():
    return {"kernel": np.zeros((X.shape[1], int(Y.max()) + 1), np.float32)}


def dataset():
    return tnt.distribute(X, Y, batch_size=len(X) // BATCHES, shuffle=False)


def test_the_host_is_never_far_ahead_of_the_devices(one_rank, monkeypatch):
    step, _ = make_step()
    state, waited = params(), []
    monkeypatch.setattr(jax, "block_until_ready", lambda x: waited.append(int(x)))
    for batch in dataset():
        state, _ = step(state, batch)
    # Of 7 steps, 4 may run: the host has waited for the first 3, by the number of the next one.
    assert waited == [1, 2, 3]


def test_steps_are_compiled_once_for_all_epochs(one_rank):
    step, traced = make_step()
    data, state = dataset(), params()
    for batch in data:
        state, _ = step(state, batch)
    num_traces = len(traced)
    for batch in data:
        state, _ = step(state, batch)
    assert len(traced) == num_traces
