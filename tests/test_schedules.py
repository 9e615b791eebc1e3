"""Schedules: Keras's values at every step."""

import jax
import numpy as np
import pytest

from tnt_jax.keras_compat import optimizers, schedules

CASES = [
    ("ExponentialDecay", (0.1, 30, 0.5), {}),
    ("ExponentialDecay", (0.1, 30, 0.5), {"staircase": True}),
    ("InverseTimeDecay", (0.1, 7, 0.5), {}),
    ("InverseTimeDecay", (0.1, 7, 0.5), {"staircase": True}),
    ("PolynomialDecay", (0.1, 40), {}),
    ("PolynomialDecay", (0.1, 40, 0.01), {"power": 2.0}),
    ("PolynomialDecay", (0.1, 40, 0.01), {"power": 0.5, "cycle": True}),
    ("PiecewiseConstantDecay", ([10, 20, 50], [1.0, 0.5, 0.1, 0.01]), {}),
    ("PiecewiseConstantDecay", ([10], [1.0, 0.5]), {}),
    ("CosineDecay", (0.1, 60), {}),
    ("CosineDecay", (0.1, 60), {"alpha": 0.2}),
    ("CosineDecay", (0.0, 60), {"warmup_target": 0.5, "warmup_steps": 10, "alpha": 0.1}),
    ("CosineDecayRestarts", (0.1, 10), {}),
    ("CosineDecayRestarts", (0.1, 10, 1.0), {"m_mul": 0.5, "alpha": 0.1}),
    ("CosineDecayRestarts", (0.1, 10, 1.5), {"m_mul": 0.9}),
]


@pytest.mark.parametrize(("name", "args", "settings"), CASES)
def test_every_step_equals_keras(name, args, settings):
    keras = pytest.importorskip("keras")
    theirs = getattr(keras.optimizers.schedules, name)(*args, **settings)
    ours = getattr(schedules, name)(*args, **settings)
    # Restarts fall on rounding errors of a logarithm; steps are compared where no period begins.
    steps = np.arange(100) if not name.endswith("Restarts") else np.arange(1, 100) * 1.0 + 0.37
    expected = jax.jit(jax.vmap(theirs))(steps)
    np.testing.assert_allclose(jax.jit(jax.vmap(ours))(steps), expected, rtol=1e-5, atol=1e-7)
    np.testing.assert_allclose([float(ours(step)) for step in steps[:3]], expected[:3], rtol=1e-5, atol=1e-7)


def test_a_restart_begins_at_the_largest_rate():
    schedule = schedules.CosineDecayRestarts(0.1, 10, 2.0, m_mul=0.5)
    np.testing.assert_allclose(
        [float(schedule(step)) for step in (0, 5, 10, 20, 30, 70)], [0.1, 0.05, 0.05, 0.025, 0.025, 0.0125]
    )


def test_constant():
    assert float(schedules.Constant(0.25)(7)) == 0.25


def test_a_schedule_drives_an_optimizer():
    transformation = optimizers.SGD(schedules.PiecewiseConstantDecay([0], [1.0, 0.5])).transformation()
    params = np.ones(1, "float32")
    first, state = transformation.update(params, transformation.init(params), params)
    second, _ = transformation.update(params, state, params)
    assert (float(first[0]), float(second[0])) == (-1.0, -0.5)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: schedules.ExponentialDecay(0.1, 0, 0.5), "decay_steps must be positive, got 0"),
        (lambda: schedules.CosineDecayRestarts(0.1, -1), "first_decay_steps must be positive, got -1"),
        (lambda: schedules.PiecewiseConstantDecay([1, 2], [0.1]), "one more than boundaries, got 1 values for 2 boundaries"),
        (lambda: schedules.PiecewiseConstantDecay([2, 1], [0.1, 0.2, 0.3]), "boundaries must increase"),
    ],
)
def test_settings_that_make_no_sense_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()
