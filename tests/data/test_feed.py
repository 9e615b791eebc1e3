import threading
import time
from concurrent.futures import ThreadPoolExecutor

import jax
import numpy as np
import pytest

from tnt_jax import _jax
from tnt_jax.data.feed import Feed, make_put
from tnt_jax.data.layout import RankSlice
from tnt_jax.data.sources import IterableSource


@pytest.mark.parametrize("threaded", [True, False])
def test_items_come_prepared_and_in_order(threaded):
    with Feed(iter(range(20)), lambda item: item * 2, threaded=threaded) as feed:
        assert list(feed) == [2 * item for item in range(20)]


@pytest.mark.parametrize("threaded", [True, False])
@pytest.mark.parametrize("where", ["items", "prepare"])
def test_an_exception_reaches_the_caller_in_place_of_the_item(threaded, where):
    def items():
        yield 1
        if where == "items":
            raise OSError("disk is gone")
        yield 2

    def prepare(item):
        if item == 2:
            raise OSError("disk is gone")
        return item

    received = []
    with (
        pytest.raises(OSError, match="disk is gone"),
        Feed(items(), prepare, threaded=threaded) as feed,
    ):
        received += feed
    assert received == [] or received == [1]


def test_the_thread_reads_ahead_but_not_far():
    prepared = []
    with Feed(iter(range(100)), prepared.append, threaded=True) as feed:
        next(iter(feed))
        deadline = time.monotonic() + 5
        while len(prepared) < 3 and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(0.1)
        assert 2 <= len(prepared) <= 4


def test_leaving_early_stops_the_thread():
    before = threading.enumerate()
    with Feed(iter(range(10**9)), lambda item: item, threaded=True) as feed:
        next(iter(feed))
        own = [thread for thread in threading.enumerate() if thread not in before]
    assert [thread.name for thread in own] == ["tnt_jax-feed"]
    own[0].join(timeout=5)
    assert not own[0].is_alive()


def test_rows_lie_in_order_on_the_ranks():
    mesh = _jax.make_data_mesh(jax.devices()[:4])
    on_device = make_put(mesh)({"a": np.arange(8), "b": None})
    shards = sorted(on_device["a"].addressable_shards, key=lambda shard: shard.device.id)
    assert [shard.data.tolist() for shard in shards] == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert on_device["b"] is None


def test_a_generator_is_read_on_after_the_batch_that_a_left_reader_waits_for():
    is_waiting, may_go_on = threading.Event(), threading.Event()

    def rows():
        yield np.full(2, 0)
        is_waiting.set()
        assert may_go_on.wait(60)
        yield np.full(2, 1)
        yield np.full(2, 2)

    generator = rows()
    first, second = (IterableSource(generator, rank_slice=RankSlice(1)) for _ in range(2))
    with Feed(first.batches(0), lambda item: item) as feed:
        next(iter(feed))
        assert is_waiting.wait(60)
    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(next, second.batches(0))
        with pytest.raises(TimeoutError):
            reading.result(0.2)
        may_go_on.set()
        assert reading.result(60).data.tolist() == [2, 2]
