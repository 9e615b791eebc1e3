import time
import tracemalloc

import numpy as np
import pytest

from tnt_jax.data import permutation
from tnt_jax.data.permutation import Permutation


@pytest.mark.parametrize(
    "n",
    [*range(1, 70), 255, 256, 257, 1000, 65_535, 65_536, 65_537, 66_049, 100_003, 262_144, 300_001],
)
def test_every_size_is_a_bijection(n):
    order = Permutation(n, seed=7, epoch=2)(np.arange(n))
    assert order.dtype == np.int64
    np.testing.assert_array_equal(np.sort(order), np.arange(n))


def test_network_is_a_bijection_for_small_sizes_too(monkeypatch):
    monkeypatch.setattr(permutation, "_TABLE_SIZE", 0)
    for n in range(1, 300):
        np.testing.assert_array_equal(
            np.sort(Permutation(n, seed=n, epoch=1)(np.arange(n))), np.arange(n)
        )


def test_order_is_the_same_in_pieces_and_depends_on_seed_and_epoch():
    n = 200_000
    whole = Permutation(n, seed=1, epoch=0)(np.arange(n))
    np.testing.assert_array_equal(
        Permutation(n, seed=1, epoch=0)([[5, 199_999], [77, 0]]), whole[[[5, 199_999], [77, 0]]]
    )
    for seed, epoch in [(2, 0), (1, 1), (-1, 0), (0, 1), (1 << 70, 0)]:
        agreement = np.mean(Permutation(n, seed=seed, epoch=epoch)(np.arange(n)) == whole)
        assert agreement < 1e-3


def test_published_order_does_not_change():
    # Resuming a run under another release needs the order of the run's start: these numbers are a
    # promise.
    assert Permutation(10, seed=42, epoch=0)(np.arange(10)).tolist() == [
        6,
        4,
        8,
        9,
        0,
        3,
        2,
        5,
        1,
        7,
    ]
    assert Permutation(10**9, seed=42, epoch=3)(np.arange(4)).tolist() == [
        841606738,
        949160688,
        155402363,
        705090188,
    ]


@pytest.mark.parametrize("n", [1000, 100_000])
def test_places_and_neighbours_look_uniform(n):
    bins = 10
    counts = np.zeros((bins, bins))
    steps = []
    for seed in range(40):
        order = Permutation(n, seed=seed)(np.arange(n))
        np.add.at(counts, (np.arange(n) * bins // n, order * bins // n), 1)
        steps.append(np.mean(np.abs(np.diff(order))) / n)
    expected = 40 * n / bins**2
    chi_square = np.sum((counts - expected) ** 2 / expected)
    assert chi_square < 140  # 81 degrees of freedom: mean 81, standard deviation 12.7.
    assert np.mean(steps) == pytest.approx(1 / 3, abs=0.005)  # Mean distance of two uniform points.


def test_billion_examples_take_constant_memory():
    tracemalloc.start()
    begin = time.perf_counter()
    order = Permutation(10**9, seed=42)
    indices = order(np.arange(10**9 - 1024, 10**9))
    seconds = time.perf_counter() - begin
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(set(indices.tolist())) == 1024
    assert indices.min() >= 0
    assert indices.max() < 10**9
    assert peak < 2_000_000
    assert seconds < 1


def test_positions_outside_are_refused():
    with pytest.raises(IndexError, match="from 0 to 9, but go from 0 to 10"):
        Permutation(10, seed=0)([0, 10])
    with pytest.raises(ValueError, match="n is 0"):
        Permutation(0, seed=0)
