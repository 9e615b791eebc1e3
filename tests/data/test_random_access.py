import collections
import random
import sys
import threading

import numpy as np
import pytest

from tnt_jax.data.indexed import fetch
from tnt_jax.data.indexed.random_access import RandomAccess, RandomAccessSource
from tnt_jax.data.layout import RankSlice
from tnt_jax.data.permutation import Permutation
from tnt_jax.job import Slot
from tnt_jax.seeding import seed_or_default, set_seed

Point = collections.namedtuple("Point", "x y")


class Squares:
    """Example i is ({"id": i, "row": [i, i]}, i*i); it remembers which were fetched, and fails at
    `bad`.
    """

    def __init__(self, length, bad=()):
        self.length, self.bad = length, set(bad)
        self.fetched = []
        self._lock = threading.Lock()

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        with self._lock:
            self.fetched.append(index)
        if index in self.bad:
            raise OSError(f"broken file {index}.jpg")
        return {"id": index, "row": np.full(2, index, np.float32)}, index * index

    def __getstate__(self):
        return {"length": self.length, "bad": self.bad}

    def __setstate__(self, state):
        self.__init__(**state)


def add_noise(example, generator):
    return example[0]["id"], generator.standard_normal(3).astype(np.float32)


def rank_slices(num_processes, ranks_per_process):
    num_ranks = num_processes * ranks_per_process
    return [
        RankSlice(num_ranks, process * ranks_per_process, ranks_per_process)
        for process in range(num_processes)
    ]


def ids_of(batch):
    ids = batch.data[0]["id"] if isinstance(batch.data[0], dict) else batch.data[0]
    return ids if batch.mask is None else ids[batch.mask > 0]


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize(
    ("num_processes", "ranks_per_process"), [(1, 1), (1, 4), (2, 1), (2, 2), (3, 1), (4, 1), (8, 1)]
)
@pytest.mark.parametrize(("length", "batch_size"), [(32, 8), (37, 8), (33, 8), (39, 9), (8, 8)])
def test_union_of_processes_is_the_global_stream(
    length, batch_size, num_processes, ranks_per_process, shuffle
):
    spec = RandomAccess(Squares(length), batch_size=batch_size, shuffle=shuffle, seed=3)
    sources = [
        RandomAccessSource(spec, rank_slice)
        for rank_slice in rank_slices(num_processes, ranks_per_process)
    ]
    whole = [ids_of(batch) for batch in RandomAccessSource(spec, RankSlice(1)).batches(epoch=1)]
    seen = np.concatenate(whole)
    assert sorted(seen.tolist()) == list(range(length))
    assert (seen.tolist() == list(range(length))) is not shuffle
    for batch, expected in zip(
        zip(*(s.batches(epoch=1) for s in sources), strict=True), whole, strict=True
    ):
        np.testing.assert_array_equal(np.concatenate([ids_of(part) for part in batch]), expected)
        assert {part.num_rows for part in batch} == {len(expected)}
        assert len({len(part.data[1]) for part in batch}) == 1
        assert len({part.mask is None for part in batch}) == 1
        for part in batch:
            np.testing.assert_array_equal(part.data[1], part.data[0]["id"] ** 2)
            assert part.data[0]["row"].shape == (len(part.data[1]), 2)
            if part.mask is not None:
                assert (part.data[0]["id"][part.mask == 0] == expected[-1]).all()


def test_each_process_fetches_only_its_own_rows():
    fetched = []
    for rank_slice in rank_slices(4, 1):
        dataset = Squares(64)
        list(
            RandomAccessSource(
                RandomAccess(dataset, batch_size=16, shuffle=True), rank_slice
            ).batches(epoch=0)
        )
        assert len(dataset.fetched) == 16
        fetched += dataset.fetched
    assert sorted(fetched) == list(range(64))


@pytest.mark.parametrize(("worker", "num_workers"), [("threads", 3), ("processes", 2)])
def test_workers_give_the_batches_of_the_caller(worker, num_workers):
    def stream(**kwargs):
        spec = RandomAccess(Squares(29), batch_size=8, shuffle=True, transform=add_noise, **kwargs)
        return [
            batch
            for rank_slice in rank_slices(2, 1)
            for batch in RandomAccessSource(spec, rank_slice).batches(epoch=2)
        ]

    for own, expected in zip(stream(worker=worker, num_workers=num_workers), stream(), strict=True):
        np.testing.assert_array_equal(own.data[0], expected.data[0])
        np.testing.assert_array_equal(own.data[1], expected.data[1])


def test_random_transform_depends_on_seed_epoch_and_example_alone():
    def noise_of(num_processes, epoch):
        spec = RandomAccess(Squares(24), batch_size=12, shuffle=True, transform=add_noise)
        batches = [
            batch
            for rank_slice in rank_slices(num_processes, 1)
            for batch in RandomAccessSource(spec, rank_slice).batches(epoch)
        ]
        return {
            int(index): noise.tolist()
            for batch in batches
            for index, noise in zip(*batch.data, strict=True)
        }

    assert noise_of(1, 0) == noise_of(4, 0)
    assert noise_of(1, 0) != noise_of(1, 1)
    assert len({tuple(noise) for noise in noise_of(1, 0).values()}) == 24


def test_resume_on_another_number_of_processes_fetches_nothing_before_the_position():
    spec = RandomAccess(Squares(50), batch_size=10, shuffle=True)
    expected = [ids_of(batch) for batch in RandomAccessSource(spec, RankSlice(1)).batches(epoch=4)][
        3:
    ]
    dataset = Squares(50)
    resumed = [
        RandomAccessSource(RandomAccess(dataset, batch_size=10, shuffle=True), rank_slice)
        for rank_slice in rank_slices(5, 1)
    ]
    parts = zip(*(source.batches(epoch=4, start_batch=3) for source in resumed), strict=True)
    for batch, whole in zip(parts, expected, strict=True):
        np.testing.assert_array_equal(np.concatenate([ids_of(part) for part in batch]), whole)
    assert len(dataset.fetched) == 20


def test_fetching_stays_a_bounded_number_of_batches_ahead():
    dataset = Squares(1000)
    batches = RandomAccessSource(
        RandomAccess(dataset, batch_size=10, num_workers=2), RankSlice(1)
    ).batches(epoch=0)
    next(batches)
    next(batches)
    batches.close()
    assert len(dataset.fetched) <= 50


def test_failing_example_is_named():
    for worker, workers in [("threads", 0), ("threads", 2), ("processes", 1)]:
        spec = RandomAccess(Squares(16, bad=[6]), batch_size=8, num_workers=workers, worker=worker)
        with pytest.raises(OSError, match="broken file 6") as caught:
            list(RandomAccessSource(spec, RankSlice(1)).batches(epoch=0))
        assert "example 6 of Squares (epoch 0)" in caught.value.__notes__[0]


def test_skipped_examples_are_masked_and_counted(caplog):
    spec = RandomAccess(Squares(20, bad=[0, 2, 17]), batch_size=8, num_workers=2, on_error="skip")
    sources = [RandomAccessSource(spec, rank_slice) for rank_slice in rank_slices(2, 1)]
    with caplog.at_level("WARNING", logger="tnt_jax"):
        batches = [batch for source in sources for batch in source.batches(epoch=0)]
    kept = sorted(int(index) for batch in batches for index in ids_of(batch))
    assert kept == [index for index in range(20) if index not in (0, 2, 17)]
    assert sum(source.num_skipped for source in sources) == 3
    assert all(batch.mask is not None for batch in batches)
    assert (
        "Skipped example 2: OSError: broken file 2.jpg (2 skipped on this process so far)."
        in caplog.text
    )


def test_batch_without_a_good_example_is_an_error():
    spec = RandomAccess(Squares(4, bad=range(4)), batch_size=4, on_error="skip")
    with pytest.raises(
        ValueError, match=r"All 4 examples of this process in batch 0 failed; the first: example 0"
    ):
        list(RandomAccessSource(spec, RankSlice(1)).batches(epoch=0))


@pytest.mark.parametrize(
    "dataset",
    [
        [(np.float32(i), i) for i in range(10)],
        [Point(float(i), i) for i in range(10)],
        np.stack([np.arange(10.0), np.arange(10)], axis=1),
    ],
)
def test_plain_containers_are_datasets(dataset):
    batches = list(
        RandomAccessSource(RandomAccess(dataset, batch_size=4), RankSlice(1)).batches(epoch=0)
    )
    assert [batch.num_rows for batch in batches] == [4, 4, 2]
    last = batches[-1].data
    assert (
        last.tolist() if isinstance(last, np.ndarray) else [part.tolist() for part in last]
    ) in (
        [[8, 8], [9, 9]],
        [[8, 9], [8, 9]],
    )
    if isinstance(dataset[0], Point):
        assert isinstance(last, Point)
        assert (last.x.dtype, last.y.dtype) == (np.float32, np.int32)


def test_torch_dataset_is_a_dataset():
    torch = pytest.importorskip("torch", reason="needs PyTorch")
    pairs = torch.utils.data.TensorDataset(torch.arange(12).reshape(6, 2), torch.arange(6))
    (first, second) = RandomAccessSource(
        RandomAccess(pairs, batch_size=4), RankSlice(2, 1)
    ).batches(epoch=0)
    np.testing.assert_array_equal(first.data[0], [[4, 5], [6, 7]])
    np.testing.assert_array_equal(second.data[1], [5])


def test_one_call_fetches_many_where_the_dataset_offers_it():
    class Source(Squares):
        def __getitems__(self, indices):
            return [(index, index) for index in indices]

    (batch,) = RandomAccessSource(RandomAccess(Source(3), batch_size=3), RankSlice(1)).batches(
        epoch=0
    )
    np.testing.assert_array_equal(batch.data[0], [0, 1, 2])


def test_examples_of_different_shapes_are_explained():
    with pytest.raises(
        ValueError, match=r"same structure and shapes, but there are \(2,\) and \(3,\)"
    ):
        list(
            RandomAccessSource(
                RandomAccess([[1, 2], [1, 2, 3]], batch_size=2), RankSlice(1)
            ).batches(epoch=0)
        )


def test_wrong_arguments_are_refused():
    with pytest.raises(TypeError, match="generator has no __len__"):
        RandomAccess(i for i in range(3))  # pyright: ignore[reportArgumentType]
    with pytest.raises(
        ValueError, match="worker must be one of 'threads', 'processes', but is 'thread'"
    ):
        RandomAccess([1], worker="thread")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="num_workers must be at least 0"):
        RandomAccess([1], num_workers=-1)
    with pytest.raises(ValueError, match=r"tnt_micro_batch_size \(3\) \* ranks \(2\)"):
        RandomAccessSource(RandomAccess([1] * 9, batch_size=8), RankSlice(2), micro_batch_size=3)
    assert (
        RandomAccessSource(
            RandomAccess([1] * 9), RankSlice(2), micro_batch_size=3
        ).global_batch_size
        == 6
    )


def test_distribution_is_logged(caplog):
    with caplog.at_level("INFO", logger="tnt_jax"):
        RandomAccessSource(
            RandomAccess(Squares(21), batch_size=8, shuffle=True, seed=5), RankSlice(4, 0, 2)
        )
    assert (
        "global batch 8, 2 rows on each of 4 ranks, 3 steps per epoch, 3 padded rows in the last "
        "batch, order from seed 5." in caplog.text
    )


def test_generators_of_neighbours_are_independent():
    draws = {
        fetch.example_generator(1, epoch, index).random()
        for epoch in range(5)
        for index in range(200)
    }
    assert len(draws) == 1000


@pytest.mark.parametrize(("chosen", "seed"), [(None, 42), (7, 7)])
def test_the_order_without_a_seed_is_that_of_set_seed(caplog, monkeypatch, chosen, seed):
    monkeypatch.setattr("tnt_jax.seeding._seed", Slot(lambda: chosen))
    with caplog.at_level("INFO", logger="tnt_jax"):
        source, expected = (
            RandomAccessSource(
                RandomAccess(Squares(21), batch_size=8, shuffle=True, seed=given), RankSlice(1)
            )
            for given in (None, seed)
        )
    assert caplog.text.count(f"order from seed {seed}.") == 2
    for batch, wanted in zip(source.batches(1), expected.batches(1), strict=True):
        np.testing.assert_equal(batch.data, wanted.data)


def test_a_seed_may_be_an_integer_of_numpy(monkeypatch):
    plain, of_numpy = (
        RandomAccess(Squares(9), batch_size=9, transform=add_noise, shuffle=True, seed=seed)
        for seed in (-3, np.int64(-3))
    )
    (one,), (other,) = (
        RandomAccessSource(spec, RankSlice(1)).batches(0) for spec in (plain, of_numpy)
    )
    np.testing.assert_equal(one.data, other.data)
    order = Permutation(9, seed=np.int64(-3))(range(9))
    np.testing.assert_array_equal(order, Permutation(9, seed=-3)(range(9)))
    # What `set_seed` does with other libraries stays out of this process.
    for name in ("keras", "tensorflow"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setattr("tnt_jax.seeding._seed", Slot(lambda: None))
    set_seed(np.int64(3))
    assert random.random() == random.Random(3).random()
    assert type(seed_or_default(None)) is int
    with pytest.raises(TypeError, match="cannot be interpreted as an integer"):
        set_seed(3.0)
