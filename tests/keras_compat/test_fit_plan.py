"""The plan of `fit`: the epochs after which it validates, what it holds out, and what it weighs."""

from functools import partial

import numpy as np
import pytest

from tnt_jax.data.sources import HostBatch
from tnt_jax.keras_compat.fit.data_intake import (
    DataArguments,
    FitArguments,
    Plan,
    carry_out_split,
    class_weighting,
    to_batch,
)


def arguments(**changes):
    given = {
        "class_weight": None, "initial_epoch": 0, "epochs": 6, "steps_per_epoch": None,
        "validation_split": 0.0, "validation_data": None, "validation_steps": None,
        "validation_batch_size": None, "validation_micro_batch_size": None, "validation_freq": 1,
        "distribute_validation": True, "checkpoint_directory": None,
    }  # fmt: skip
    return FitArguments(**given | changes)


def plan(validation="a source", weighting=None, **changes):
    unpack = partial(to_batch, weighting=weighting)
    return Plan(None, None, unpack, validation, arguments(**changes))


# As Keras documents `validation_freq`: every so many epochs, or after those listed, from 1.
@pytest.mark.parametrize(
    ("frequency", "epochs"),
    [(1, [1, 2, 3, 4, 5, 6]), (2, [2, 4, 6]), (7, []), ([1, 2, 5], [1, 2, 5]), ([], [])],
)
def test_validation_follows_the_epochs_that_keras_documents(frequency, epochs):
    due = plan(validation_freq=frequency)
    assert [epoch + 1 for epoch in range(6) if due.validates_after(epoch)] == epochs


def test_a_frequency_below_one_is_refused():
    with pytest.raises(ValueError, match=r"validation_freq must be 1 or more, .* but is 0"):
        plan(validation_freq=0)


def test_nothing_is_validated_without_data():
    assert not any(plan(validation=None).validates_after(epoch) for epoch in range(6))


def test_the_last_rows_are_held_out_with_their_weights():
    x, y, weight = np.arange(10), np.arange(10) * 2, np.arange(10) * 3
    data = DataArguments(x, y, weight, batch_size=4, shuffle=True)
    training, changed = carry_out_split(data, arguments(validation_split=0.3))
    assert [list(part) for part in (training.x, training.y, training.sample_weight)] == [
        list(part[:7]) for part in (x, y, weight)
    ]
    assert [list(part) for part in changed.validation_data] == [
        list(part[7:]) for part in (x, y, weight)
    ]
    assert (training.batch_size, training.shuffle, changed.epochs) == (4, True, 6)


def test_without_a_split_nothing_changes():
    data = DataArguments(np.arange(4))
    assert carry_out_split(data, arguments()) == (data, arguments())


def test_validation_data_takes_the_place_of_the_split():
    given = DataArguments(np.arange(4)), arguments(validation_split=0.5, validation_data="other")
    assert carry_out_split(*given) == given


def test_class_weights_reach_the_step_with_the_mask():
    item = HostBatch((np.zeros((3, 2)), np.array([0, 1, 0])), np.array([1, 1, 0]), num_rows=2)
    batch = plan(weighting=lambda targets, weight: 1.0 + targets).unpack(item)
    assert list(batch.weight) == [1, 2, 1]
    assert list(batch.mask) == [1, 1, 0]
    assert plan().unpack(item).weight is None


# As `class_weight_to_sample_weights` of Keras 3.15, and for labels of several places.
@pytest.mark.parametrize(
    ("targets", "expected"),
    [
        ([[0.95], [0.05], [0.6]], [3, 1, 3]),
        ([1, -1, 7], [3, 1, 1]),
        ([[1, 0], [0, 1], [0.4, 0.6]], [1, 3, 3]),
        ([[[0], [1]], [[1], [1]], [[0], [0]]], [[1, 3], [3, 3], [1, 1]]),
    ],
)
def test_class_weights_are_those_of_the_nearest_label(targets, expected):
    weigh = class_weighting({0: 1.0, 1: 3.0})
    found = weigh(np.array(targets), None)
    np.testing.assert_array_equal(found, expected)
    factors = np.array([1.0, 2.0, 4.0])
    for given in (factors, factors[:, None]):
        product = weigh(np.array(targets), given)
        assert product.size == found.size
        np.testing.assert_array_equal(
            product.reshape(3, -1), found.reshape(3, -1) * factors[:, None]
        )
