"""Fragments, their turns, and messages, against NumPy."""

import jax
import numpy as np
import pytest

from tnt_jax.train.local.fragments import (
    message_bytes,
    packed,
    plan_fragments,
    sent_after,
    unpacked,
)

RNG = np.random.default_rng(0)
SHAPES = [(3, 5), (), (0, 4), (7,)]


@pytest.mark.parametrize(
    ("nbytes", "fragments", "expected"),
    [
        ([8], 1, [[0]]),
        ([4, 4, 4, 4], 2, [[0, 1], [2, 3]]),
        ([100, 4, 4, 4], 2, [[0], [1, 2, 3]]),
        ([4, 4, 4, 100], 3, [[0, 1], [2], [3]]),
        ([0, 0, 0], 3, [[0], [1], [2]]),
    ],
)
def test_consecutive_arrays_are_cut_by_their_bytes(nbytes, fragments, expected):
    assert plan_fragments(nbytes, fragments) == expected


def test_more_fragments_than_arrays_are_refused():
    with pytest.raises(ValueError, match=r"fragments \(3\) must be at most .* 2"):
        plan_fragments([4, 4], 3)


@pytest.mark.parametrize(("every", "fragments"), [(1, 1), (4, 1), (4, 4), (7, 3), (50, 4)])
def test_each_fragment_is_sent_once_in_a_round_and_no_two_together(every, fragments):
    rounds = [
        [sent_after(step, every=every, fragments=fragments) for step in range(first, first + every)]
        for first in (1, 1 + 3 * every)
    ]
    for sent in rounds:
        assert sorted(number for each in sent for number in each) == list(range(fragments))
        assert max(map(len, sent)) == 1
        assert sent[-1] == [fragments - 1]


@pytest.mark.parametrize("compress", ["none", "int8", "float4"])
def test_a_message_holds_what_was_sent(compress):
    arrays = [RNG.normal(size=shape).astype(np.float32) for shape in SHAPES]
    message = np.asarray(jax.jit(lambda x: packed(17, x, compress))(arrays))
    assert message.dtype == np.uint8
    assert len(message) == message_bytes(SHAPES, compress)
    rows, found = jax.jit(lambda x: unpacked(x, SHAPES, compress))(message)
    assert float(rows) == 17
    for array, other in zip(arrays, found, strict=True):
        largest = np.max(np.abs(array), initial=0)
        if compress == "none":
            np.testing.assert_array_equal(other, array)
        elif compress == "int8":
            np.testing.assert_allclose(other, array, atol=largest / 254 + 1e-7, rtol=0)
        else:
            powers = largest * np.array([0, *(2.0**power for power in range(-6, 1))], np.float32)
            levels = np.concatenate([-powers, powers])
            nearest = np.argmin(np.abs(np.ravel(array)[:, None] - levels), axis=1)
            np.testing.assert_allclose(np.ravel(other), levels[nearest], rtol=1e-6)


@pytest.mark.parametrize("compress", ["int8", "float4"])
def test_zeros_are_sent_as_zeros_in_few_bits(compress):
    message = packed(1, [np.zeros(5, np.float32)], compress)
    np.testing.assert_array_equal(unpacked(message, [(5,)], compress)[1][0], np.zeros(5))


def test_float4_takes_half_a_byte_for_an_element():
    assert message_bytes([(1000,)], "float4") == 4 + 4 + 500
