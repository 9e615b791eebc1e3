"""Which steps count as finite; what becomes of the others is tested in `tests/faults`."""

from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import tnt_jax as tnt
from tnt_jax.train.finite import CHECKED, can_be_summed, is_finite_step, take_or_leave
from tnt_jax.train.state import create_state

GRADS = {"w": jnp.ones(3)}
STATS = {"mean": jnp.array([1.0, jnp.nan]), "count": jnp.int32(3)}


def state_of(optimizer):
    return create_state({"w": jnp.ones(3)}, STATS, optimizer, seed=0)


PLAIN = state_of(optax.sgd(0.1))


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({}, True),
        ({"loss": jnp.nan}, False),
        ({"grads": {"w": jnp.array([1, jnp.inf, 1])}}, False),
        ({"grads": None}, True),
        ({"found": jnp.asarray(False)}, False),
        ({"model_state": {**STATS, "mean": jnp.array([jnp.inf, 1.0])}}, False),
        # What was not finite before the step may stay so.
        ({"model_state": {**STATS, "mean": jnp.array([2.0, jnp.inf])}}, True),
    ],
)
def test_loss_gradients_and_model_state_must_be_finite(change, expected):
    given = {"loss": 1.0, "grads": GRADS, "model_state": STATS, "found": True} | change
    loss, grads, model_state = (given.pop(name) for name in ("loss", "grads", "model_state"))
    assert bool(is_finite_step(PLAIN, model_state, jnp.float32(loss), grads, **given)) == expected


def test_a_scale_that_adapts_itself_may_meet_infinite_gradients(use_ranks):
    use_ranks(1)
    import flax.linen as nn

    model = tnt.Model(nn.Dense(1))
    inner = tnt.optimizers.SGD(0.1)
    model.compile(tnt.optimizers.LossScaleOptimizer(inner), loss="mse")
    model.build(np.ones((2, 3), np.float32))
    state = replace(model.state, model_state=STATS)
    infinite = {"w": jnp.array([1, jnp.inf, 1])}
    assert is_finite_step(state, STATS, jnp.float32(1), infinite)
    assert not is_finite_step(state, STATS, jnp.float32(jnp.nan), infinite)
    assert can_be_summed(state, infinite, 2)


def test_a_sum_over_ranks_must_be_finite_as_well():
    large = {"w": jnp.full(3, 3e38, jnp.float32)}
    assert can_be_summed(PLAIN, large, 1)
    assert not can_be_summed(PLAIN, large, 2)


@pytest.mark.parametrize(
    ("on_nan", "is_finite", "taken", "counts"),
    [
        ("skip", True, True, [0, 4, 5]),
        ("skip", False, False, [3, 4, 6]),
        # Until the host has decided, no further step is taken.
        ("raise", True, False, [3, 4, 6]),
    ],
)
def test_steps_that_were_left_are_counted_in_a_row_and_in_all(on_nan, is_finite, taken, counts):
    sums = {CHECKED: jnp.array([2.0, 9.0, 5.0]), "loss": jnp.float32(1)}
    after = replace(PLAIN, step=PLAIN.step + 1)
    state, sums = take_or_leave(
        on_nan, lambda: jnp.asarray(is_finite), (PLAIN, sums), lambda: (after, {"loss": jnp.float32(7)}),
        loss=jnp.float32(4), platform="cpu",
    )  # fmt: skip
    assert sums[CHECKED].tolist() == counts
    assert int(state.step) == taken
    assert float(sums["loss"]) == (7 if taken else 1)
