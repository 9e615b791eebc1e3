"""Arrays come back from shared memory as they were, and nothing writes over those in use."""

import gc
import os
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from tnt_jax.data.indexed import fetch
from tnt_jax.data.indexed.fetch import Fetcher, Recipe

pytestmark = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="needs Linux")


def numbers(*shape):
    return np.arange(np.prod(shape), dtype="f4").reshape(shape)


def test_values_come_back_as_they_were():
    block = fetch.Block()
    # Each larger than the one before, then a small one; not all of them in the memory's order.
    for value in (
        {"x": numbers(3), "empty": numbers(0, 4), "text": np.array(["a", "bc"])},
        (numbers(1000, 70).T, numbers(9, 9)[::2, ::3], 5),
        [np.array(["object", None], object), numbers(2)],
    ):
        written = fetch.write(block.path, value)
        assert isinstance(written, fetch.Written)
        for copy in (False, True):
            np.testing.assert_equal(block.read(written, copy=copy), value)


def test_an_array_may_need_several_writes(monkeypatch):
    write_all = os.pwrite  # Linux writes 2 GB at most.
    monkeypatch.setattr(os, "pwrite", lambda file, raw, at: write_all(file, raw[:10], at))
    block = fetch.Block()
    written = fetch.write(block.path, numbers(7, 9))
    np.testing.assert_array_equal(block.read(written, copy=True), numbers(7, 9))


def test_copies_and_they_alone_outlive_the_next_value():
    block = fetch.Block()
    first, second = numbers(1000), numbers(1000) + 1
    written = fetch.write(block.path, first)
    shared, own = block.read(written, copy=False), block.read(written, copy=True)
    fetch.write(block.path, second)
    np.testing.assert_array_equal(shared, second)
    np.testing.assert_array_equal(own, first)
    own += 1


@pytest.mark.parametrize("path", ["", "/proc/self/fd/100000", "/proc/1/no/such"])
def test_where_there_is_no_memory_to_share_the_value_itself_is_sent(path):
    value = {"x": numbers(3)}
    assert fetch.write(path, value) is value
    assert fetch.Block().read(value, copy=False) is value


def test_values_without_arrays_need_no_memory():
    assert fetch.write(fetch.Block().path, "skipped") == "skipped"


def test_memory_goes_with_its_block():
    block = fetch.Block()
    path = block.path
    array = block.read(fetch.write(path, numbers(50)), copy=False)
    del block
    gc.collect()
    np.testing.assert_array_equal(array, numbers(50))
    assert not os.path.exists(path)


class Rows:
    def __len__(self):
        return 40

    def __getitem__(self, index):
        return np.full(5, index, np.float32), index


@pytest.fixture
def fetcher(monkeypatch):
    """Makes fetchers whose workers of processes are threads of this one."""

    def start(self):
        # As in a worker, which has one recipe.
        fetch._set_recipe(self._recipe)
        return ThreadPoolExecutor(self.num_workers)

    monkeypatch.setattr(fetch, "_recipe_of_worker", None)
    monkeypatch.setattr(Fetcher, "_start", start)
    recipe = Recipe(Rows(), None, 0, "raise")
    return lambda num_workers: Fetcher(recipe, num_workers=num_workers, worker="processes")


def index_batches():
    return iter(np.random.default_rng(0).permutation(40).reshape(8, 5))


@pytest.mark.parametrize("num_workers", [1, 2, 3])
def test_no_batch_is_written_over_while_it_is_in_use(fetcher, num_workers):
    fetch_rows = fetcher(num_workers)
    for _ in range(2):
        found = [chunk.data for chunk in fetch_rows.batches(0, index_batches())]
        for (x, y), indices in zip(found, index_batches(), strict=True):
            np.testing.assert_array_equal(y, indices)
            np.testing.assert_array_equal(x, np.repeat(indices[:, None], 5, axis=1))
    # Two batches ahead, and the one that is handed over.
    assert len(fetch_rows._free) <= 3 * num_workers


def test_an_abandoned_pass_leaves_its_memory_to_the_next(fetcher):
    fetch_rows = fetcher(2)
    for _ in range(5):
        batches = fetch_rows.batches(0, index_batches())
        next(batches)
        batches.close()
    fetch_rows._pool.shutdown(wait=True)
    assert 2 <= len(fetch_rows._free) <= 12
    assert len({block.path for block in fetch_rows._free}) == len(fetch_rows._free)
