import numpy as np
import pytest
from long_params import long_but_last

from tnt_jax.data.dispatch import as_source
from tnt_jax.data.indexed.pydataset import PyDatasetSource
from tnt_jax.data.indexed.random_access import RandomAccess, RandomAccessSource
from tnt_jax.data.layout import RankSlice, ReadOptions
from tnt_jax.data.streams import EpochStream

keras = pytest.importorskip("keras", reason="needs Keras")


class Batches(keras.utils.PyDataset):
    """Batch i holds rows 4*i to 4*i + 3; the last one is smaller."""

    def __init__(self, length=5, bad=None, **kwargs):
        super().__init__(**kwargs)
        self.length, self.bad, self.epochs = length, bad, []

    @property
    def num_batches(self):
        return self.length

    def __getitem__(self, index):
        if index == self.bad:
            raise OSError("broken")
        rows = np.arange(
            4 * index, 4 * index + (3 if self.length and index == self.length - 1 else 4)
        )
        return rows, rows * 2.0

    def on_epoch_begin(self):
        self.epochs.append("begin")

    def on_epoch_end(self):
        self.epochs.append("end")


class Squares:
    """Rows that are read one by one."""

    def __init__(self, num_rows):
        self._num_rows = num_rows

    def __len__(self):
        return self._num_rows

    def __getitem__(self, index):
        return np.full(2, index, np.float32), index**2


def rows_of(batches):
    return [
        batch.data[0] if batch.mask is None else batch.data[0][batch.mask > 0] for batch in batches
    ]


@pytest.mark.parametrize(
    "kwargs",
    long_but_last({"workers": 1, "use_multiprocessing": True}, {}, {"workers": 3}),
)
@pytest.mark.parametrize("shuffle", [pytest.param(False, marks=pytest.mark.long), True])
def test_union_of_processes_is_the_dataset(kwargs, shuffle):
    sources = [
        PyDatasetSource(Batches(**kwargs), ReadOptions(RankSlice(2, process), shuffle=shuffle))
        for process in range(2)
    ]
    for epoch in range(2):
        first, second = ([*source.batches(epoch)] for source in sources)
        whole = [np.concatenate(pair) for pair in zip(rows_of(first), rows_of(second), strict=True)]
        assert sorted(row for rows in whole for row in rows) == list(range(19))
        assert ([rows[0] for rows in whole] == [0, 4, 8, 12, 16]) is not shuffle
    assert sources[0].num_batches == 5
    assert sources[0].global_batch_size in (3, 4)
    assert sources[0]._dataset.epochs == ["begin", "end"] * 2


def test_infinite_dataset_goes_on():
    batches = PyDatasetSource(Batches(None), ReadOptions(RankSlice(2, 1))).batches(0, start_batch=3)
    assert [next(batches).data[0].tolist() for _ in range(3)] == [[14, 15], [18, 19], [22, 23]]


def test_failing_batch_is_named():
    with pytest.raises(OSError, match="broken") as caught:
        list(PyDatasetSource(Batches(bad=2, workers=2), ReadOptions(RankSlice(1))).batches(0))
    assert caught.value.__notes__ == ["This happened in batch 2 of Batches."]


def test_fit_recognises_what_it_is_given():
    rank_slice = RankSlice(2)
    assert isinstance(as_source(Batches(), None, None, ReadOptions(rank_slice)), PyDatasetSource)
    source = as_source(
        Squares(100),
        None,
        None,
        ReadOptions(rank_slice, micro_batch_size=8, shuffle=True),
    )
    assert isinstance(source, RandomAccessSource)
    assert (source.global_batch_size, source.num_batches) == (16, 7)
    source = as_source(
        RandomAccess(Squares(100), batch_size=10),
        None,
        None,
        ReadOptions(rank_slice),
    )
    assert source.global_batch_size == 10
    with pytest.raises(ValueError, match="Random-access datasets are split over all processes"):
        as_source(Squares(4), None, None, ReadOptions(rank_slice, distribute=False))


def test_a_pass_that_steps_per_epoch_read_whole_ends_its_epoch():
    dataset = Batches()
    stream = EpochStream(PyDatasetSource(dataset, ReadOptions(RankSlice(1))), steps_per_epoch=5)
    assert [len(list(stream.epoch(epoch))) for epoch in range(3)] == [5, 5, 5]
    assert dataset.epochs == ["begin", "end"] * 3


class Growing(Batches):
    """Whose batches hold the number of epochs that have ended."""

    def __getitem__(self, index):
        return np.full(4, self.epochs.count("end"))


def test_worker_processes_see_what_the_end_of_an_epoch_changed():
    dataset = Growing(2, use_multiprocessing=True)
    source = PyDatasetSource(dataset, ReadOptions(RankSlice(1)))
    passes = [[int(batch.data[0]) for batch in source.batches(epoch)] for epoch in range(2)]
    assert passes == [[0, 0], [1, 1]]
