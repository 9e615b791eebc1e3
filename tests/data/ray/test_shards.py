"""Shards that Ray has cut, of any length: every row once, and no process waits in vain."""

from types import SimpleNamespace

import numpy as np
import pytest
from ray_rows import dataset_of, in_processes, rank_slices

from tnt_jax.data.dispatch import as_source
from tnt_jax.data.layout import ReadOptions
from tnt_jax.data.ray import source as ray_source
from tnt_jax.data.ray.source import shard_source
from tnt_jax.data.ray.spec import RayData


def read(split, size, *, local_ranks=1, epochs=1):
    """Returns the epochs of each process: for each batch its targets without padding."""
    slices = rank_slices(len(split), local_ranks)

    def make(process, board):
        spec = RayData(split[process], batch_size=size)
        return shard_source(spec, slices[process], len(split), board=board)

    def work(source):
        return [[real_targets(batch) for batch in source.batches(e)] for e in range(epochs)]

    return in_processes(make, len(split), work)


def real_targets(batch):
    return batch.data[1][slice(None) if batch.mask is None else batch.mask > 0].tolist()


@pytest.mark.parametrize("local_ranks", [1, pytest.param(2, marks=pytest.mark.long)])
def test_every_row_of_unequal_shards_counts_once_in_each_epoch(ray_data, local_ranks):
    # One shard has two rows, the other eleven.
    split = dataset_of(ray_data, 13, sizes=(11, 1, 1)).streaming_split(2)
    found = read(split, 4, local_ranks=local_ranks, epochs=2)
    for epoch in range(2):
        numbers = [len(process[epoch]) for process in found]
        assert numbers[0] == numbers[1]
        rows = [row for process in found for batch in process[epoch] for row in batch]
        assert sorted(rows) == list(range(13))
        assert max(len(batch) for process in found for batch in process[epoch]) == 2


def test_a_shard_without_rows_is_an_error_on_every_process(ray_data):
    for error in read(dataset_of(ray_data, 8, sizes=(8,)).streaming_split(2), 4):
        assert "dataset of process 1 is empty" in str(error)


def test_the_order_repeats_if_ray_keeps_it(ray_data):
    dataset = dataset_of(ray_data, 24, num_blocks=6)
    assert "preserve_order = True" in reason(dataset.streaming_split(1)[0])
    dataset = dataset_of(ray_data, 24, num_blocks=6)
    dataset.context.execution_options.preserve_order = True
    split = dataset.streaming_split(2)
    assert reason(split[0]) == ""
    assert read(split, 4) == read(split, 4)


def reason(shard):
    """Returns why the order of a shard does not repeat."""
    spec = RayData(shard, batch_size=4)
    return shard_source(
        spec, rank_slices(1)[0], num_processes=shard_count(shard)
    ).row_order.unrepeatable


def shard_count(shard):
    return shard.world_size() if hasattr(shard, "world_size") else 1


class DataIterator:
    """What `ray.train.get_dataset_shard` returns, as far as it is asked before the first batch."""

    __module__ = "ray.data.iterator"

    def world_size(self):
        return 1

    def get_context(self):
        return SimpleNamespace(execution_options=SimpleNamespace(preserve_order=True))


@pytest.mark.usefixtures("two_ranks")
def test_shards_of_ray_train_are_said_to_leave_out_rows(monkeypatch, caplog):
    reason(DataIterator())
    assert "leaves out" not in caplog.text
    monkeypatch.setattr(ray_source, "role", lambda: "worker")
    reason(DataIterator())
    reason(DataIterator())
    assert caplog.text.count("leaves out what remains of an epoch") == 1
    assert "datasets_to_split=[]" in caplog.text


def test_what_cannot_be_exact_is_refused(ray_data):
    shard = dataset_of(ray_data, 8).streaming_split(2)[0]
    two = rank_slices(2)[0]
    with pytest.raises(ValueError, match="split for 2 processes, but the job has 3"):
        shard_source(RayData(shard, batch_size=6), rank_slices(3)[0], 3)
    with pytest.raises(ValueError, match="batch size 5 is no multiple of the 2 ranks"):
        shard_source(RayData(shard, batch_size=5), two, 2)
    with pytest.raises(ValueError, match="drop_remainder=True is for a whole dataset"):
        shard_source(RayData(shard, batch_size=4, drop_remainder=True), two, 2)
    with pytest.raises(ValueError, match="global batch size of a Ray dataset is unknown"):
        as_source(shard, None, None, ReadOptions(two))
    with pytest.raises(ValueError, match="batch size of 4 was passed with a RayData that has batc"):
        as_source(RayData(shard, batch_size=2), None, None, ReadOptions(two, batch_size=4))
    with pytest.raises(ValueError, match="y was passed with a StreamSplitDataIterator"):
        as_source(shard, np.zeros(8), None, ReadOptions(two, batch_size=4))
