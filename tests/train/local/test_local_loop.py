"""Custom loops with outer updates, and `fit` of each kind of model with what users add to it."""

import numpy as np
import optax
import pytest
from local_runs import train_plainly
from processes import SCRIPTS, launch

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow]

KINDS = ["linen", "nnx", "keras"]


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    folder = tmp_path_factory.mktemp("found")
    result = launch(2, SCRIPTS / "loop_local.py", folder, KERAS_BACKEND="jax")
    assert result.returncode == 0, result.stdout + result.stderr
    return [dict(np.load(file)) for file in sorted(folder.glob("*.npz"))]


def test_a_custom_loop_equals_a_plain_one(found):
    expected = train_plainly(
        rows=43,
        size=9,
        num_groups=2,
        every=4,
        outer=optax.sgd(0.7, momentum=0.9, nesterov=True),
        fragments=[[0, 1], [2, 3]],
        delay=1,
        compress="int8",
    )
    flat = np.concatenate([np.ravel(leaf) for leaf in expected])
    for each in found:
        np.testing.assert_allclose(each["loop"], flat, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_all_groups_end_with_the_same_model(found, kind):
    first, second = found
    for name in (name for name in first if name.startswith(kind)):
        np.testing.assert_array_equal(first[name], second[name], err_msg=name)
    losses = first[f"{kind} loss"]
    assert np.isfinite(losses).all()
    assert losses[-1] < losses[0] + 0.01


@pytest.mark.parametrize("kind", KINDS)
def test_schedules_count_the_steps_of_a_group(found, kind):
    rates = found[0][f"{kind} rates"][:, 0]
    epochs = 1 + np.arange(len(rates))
    np.testing.assert_allclose(rates, 0.1 * 0.5 ** (5 * epochs / 4), rtol=1e-6)


def test_one_process_that_stops_training_ends_all_after_the_same_step(found):
    first, second = found
    for name in "stopped at", "stopped with":
        np.testing.assert_array_equal(first[name], second[name])
    assert 4 <= first["stopped at"] <= 4 + 5 + 2 + 5
