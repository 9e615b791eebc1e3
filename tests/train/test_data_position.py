"""A position in the rows of an epoch is entered by other batches of the same rows, or refused."""

import numpy as np
import pytest

import tnt_jax as tnt
from tnt_jax.data.indexed.random_access import RandomAccess, RandomAccessSource
from tnt_jax.data.layout import RankSlice
from tnt_jax.data.shards import ShardSource
from tnt_jax.data.sources import ArraySource, IterableSource
from tnt_jax.data.streams import EpochStream
from tnt_jax.data.tf.tfdata import TfData, TfDataSource
from tnt_jax.train.checkpoints.checkpoint import Position
from tnt_jax.train.checkpoints.data_position import batches_done, describe_position

ONE = RankSlice(1)


@pytest.fixture
def no_global_seed():
    """Forgets the seed that a test of another file may have given to TensorFlow, and that of this
    test after it.
    """
    import tensorflow as tf

    tf.random.set_seed(None)
    yield
    tf.random.set_seed(None)


def arrays(size, *, num_rows=96, seed=3, shuffle=True):
    return ArraySource(
        np.arange(num_rows), global_batch_size=size, rank_slice=ONE, shuffle=shuffle, seed=seed
    )


def random_access(size, *, num_rows=96, seed=3, shuffle=True):
    spec = RandomAccess(list(range(num_rows)), size, shuffle=shuffle, seed=seed)
    return RandomAccessSource(spec, ONE)


def tf_rows(*, num_rows=96, seed=3, shuffle=True):
    import tensorflow as tf

    dataset = tf.data.Dataset.range(num_rows)
    return dataset.shuffle(num_rows, seed=seed) if shuffle else dataset


def unbatched(size, **data):
    return TfDataSource(TfData(tf_rows(**data)), ONE, micro_batch_size=size)


def batched(size, **data):
    return TfDataSource(TfData(tf_rows(**data).batch(size)), ONE)


def lists(size, *, num_rows=96, seed=3, shuffle=True):
    del seed, shuffle
    return IterableSource(np.split(np.arange(num_rows), num_rows // size), rank_slice=ONE)


def entered(source, noted, *, epoch=1, batch=3, is_accumulating=False, **stream):
    """Returns the batches of `source` that a noted position has behind it."""
    return batches_done(
        Position(epoch, batch),
        noted,
        EpochStream(source, **stream),
        0,
        is_accumulating=is_accumulating,
    )


def noted(source, rows, **stream):
    stream = EpochStream(source, **stream)
    stream.peek(0)
    return describe_position(stream, 0, rows)


def rows_of(source, epoch, batch):
    return [int(row) for item in source.batches(epoch, batch) for row in item.data]


@pytest.mark.parametrize("make", [arrays, random_access, unbatched])
@pytest.mark.parametrize(("before", "after"), [(8, 12), (12, 8), (8, 24), (24, 4), (8, 96)])
@pytest.mark.parametrize("shuffle", [True, False])
def test_other_batches_go_on_at_the_same_row(make, before, after, shuffle):
    whole = rows_of(make(before, shuffle=shuffle), 1, 0)
    for batch in range(96 // before + 1):
        rows = batch * before
        if rows % after and rows != 96:
            continue
        source = make(after, shuffle=shuffle)
        start = entered(source, noted(make(before, shuffle=shuffle), rows), batch=batch)
        assert rows_of(source, 1, start) == whole[rows:]


@pytest.mark.parametrize("make", [arrays, random_access, unbatched])
def test_an_epoch_that_is_done_needs_no_multiple_of_the_new_batch(make):
    assert entered(make(16, num_rows=100), noted(make(10, num_rows=100), 100), batch=10) == 7
    with pytest.raises(ValueError, match="90 is no multiple of 16"):
        entered(make(16, num_rows=100), noted(make(10, num_rows=100), 90), batch=9)


@pytest.mark.parametrize("make", [arrays, random_access, unbatched])
def test_a_row_within_a_new_batch_is_refused_with_both_sizes(make):
    text = (
        r"done 24 rows of epoch 2 in global batches of 8 rows.*has 16 rows, and 24 is no multiple"
    )
    with pytest.raises(ValueError, match=text):
        entered(make(16), noted(make(8), 24))


@pytest.mark.parametrize("make", [batched, lists])
def test_data_that_is_batched_already_keeps_its_batches_within_an_epoch(make):
    source = make(12)
    next(source.batches(0))
    with pytest.raises(ValueError, match=r"of 8 rows.*has 12 rows.*order of this data depends"):
        entered(source, noted(make(8), 24))


@pytest.mark.parametrize("make", [arrays, random_access, unbatched, batched, lists])
def test_every_batch_size_may_begin_an_epoch(make):
    assert entered(make(12), noted(make(8), 0), batch=0) == 0


@pytest.mark.parametrize("make", [arrays, random_access, unbatched, batched])
@pytest.mark.parametrize("rows", [0, 24])
def test_another_seed_is_refused_with_both(make, rows):
    with pytest.raises(
        ValueError, match=r"by the seed .*3, but the seed is .*5\. Use the same seed"
    ):
        entered(make(8, seed=5), noted(make(8), rows), batch=rows // 8)


@pytest.mark.parametrize("make", [arrays, random_access, unbatched, batched])
def test_the_seed_is_free_where_nothing_is_shuffled(make):
    assert entered(make(8, seed=5, shuffle=False), noted(make(8, shuffle=False), 24)) == 3


def test_a_shuffle_without_a_seed_has_that_of_set_seed(use_ranks, no_global_seed):
    saved = noted(batched(8, seed=None), 24)
    assert entered(batched(8, seed=None), saved) == 3
    tnt.set_seed(7)
    with pytest.raises(ValueError, match="by the seed 42, but the seed is 7"):
        entered(batched(8, seed=None), saved)


@pytest.mark.parametrize("make", [arrays, random_access, batched, lists])
@pytest.mark.parametrize("after", [8, 4])
def test_other_data_is_refused_within_an_epoch_alone(make, after):
    saved = noted(make(8), 24)
    source = make(after, num_rows=80)
    next(source.batches(0))
    with pytest.raises(
        ValueError, match=r"within epoch 2 of data with another|depends on its batch"
    ):
        entered(source, saved)
    assert entered(make(after, num_rows=80), noted(make(8), 0), batch=0) == 0


def test_epochs_of_other_steps_are_refused():
    with pytest.raises(
        ValueError, match=r"had steps_per_epoch=5, initial_epoch=0, but .* has steps_"
    ):
        entered(arrays(8), noted(arrays(8), 24, steps_per_epoch=5), steps_per_epoch=6)
    with pytest.raises(ValueError, match=r"had steps_per_epoch=5, .*, but .* no steps_per_epoch"):
        entered(arrays(8), noted(arrays(8), 24, steps_per_epoch=5))
    with pytest.raises(ValueError, match=r"of 8 rows, but .* 4 rows, and with steps_per_epoch"):
        entered(arrays(4), noted(arrays(8), 0, steps_per_epoch=5), batch=0, steps_per_epoch=5)


def test_passes_over_several_epochs_keep_their_data():
    # An epoch of 5 steps begins within a pass.
    with pytest.raises(ValueError, match="of data with another batches of an epoch: 12, and 10"):
        entered(
            arrays(8, num_rows=80), noted(arrays(8), 0, steps_per_epoch=5), batch=0,
            steps_per_epoch=5,
        )  # fmt: skip


def test_accumulated_gradients_keep_their_batches():
    with pytest.raises(
        ValueError, match=r"of 8 rows, but .* 12 rows, and gradients .* accumulated"
    ):
        entered(arrays(12), noted(arrays(8), 24), is_accumulating=True)


def test_an_unseeded_loader_is_warned_of(caplog):
    saved = noted(lists(8), 24)
    source = IterableSource(np.split(np.arange(96)[::-1], 12), rank_slice=ONE)
    stream = EpochStream(source)
    stream.peek(0)
    assert batches_done(Position(1, 3), saved, stream, 0, is_accumulating=False) == 3
    assert "The first batch of the data is another one than before" in caplog.text


def test_shards_of_other_processes_are_refused():
    source = ShardSource([np.arange(8)] * 12, rank_slice=ONE)
    saved = noted(source, 24)
    saved["parts"]["number of shards"] = 2
    with pytest.raises(ValueError, match="another number of shards: 2, and 1 now"):
        entered(source, saved)
