"""What data is, by its type: arrays, a batch of arrays, or a stream."""

from collections import namedtuple

import jax.numpy as jnp
import numpy as np
import pytest

from tnt_jax.data.arguments import is_arrays, is_taken_apart, is_tf_dataset

A = np.zeros((4, 2))
Pair = namedtuple("Pair", "x y")


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (A, True),
        (jnp.zeros(3), True),
        ([1, 2.5], True),
        ([A, A], True),
        ((A, [A, A]), True),
        ({"a": A, "b": {"c": A}}, True),
        (Pair(A, A), True),
        ([], False),
        ({}, False),
        ([(A, A), (A, A)], False),  # A stream of batches.
        ([{"a": A}], False),
        (iter([A]), False),
        ("text", False),
        (None, False),
    ],
)
def test_arrays_are_told_from_streams(data, expected):
    assert is_arrays(data) == expected


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (((A, A), None, None), True),
        (([A, A, A], None, None), True),
        (((A, {"a": A}), None, None), True),
        (((A, A), A, None), False),
        (((A, A), None, A), False),
        (((A,), None, None), False),
        (((A, A, A, A), None, None), False),
        (([1, 2], None, None), False),  # One array of two numbers.
        ((({"a": A}, {"a": A}), None, None), False),
        ((A, None, None), False),
    ],
)
def test_a_tuple_may_be_inputs_and_targets(given, expected):
    assert is_taken_apart(*given) == expected


def test_a_pipeline_of_tensorflow_is_known_without_importing_it():
    made = type("DatasetV2", (), {"__module__": "tensorflow.python.data.ops"})
    assert is_tf_dataset(type("Mapped", (made,), {})())
    assert not is_tf_dataset(type("DatasetV2", (), {"__module__": "other"})())
