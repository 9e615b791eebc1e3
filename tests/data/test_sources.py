from collections import namedtuple

import numpy as np
import pytest

from tnt_jax.data.dispatch import as_source
from tnt_jax.data.elements import as_batch, unpack
from tnt_jax.data.layout import RankSlice, ReadOptions, describe_sizes
from tnt_jax.data.sources import ArraySource, IterableSource, common_length
from tnt_jax.data.streams import EpochStream


def global_batches(make, num_ranks, split, epoch=0):
    """Puts together what processes with `split` ranks each feed; returns the real rows of every
    global batch.
    """
    starts = np.cumsum([0, *split[:-1]])
    streams = [
        list(make(RankSlice(num_ranks, int(a), n)).batches(epoch))
        for a, n in zip(starts, split, strict=True)
    ]
    batches = []
    for parts in zip(*streams, strict=True):
        rows = np.concatenate([part.data for part in parts])
        masks = [part.mask for part in parts]
        assert len({part.num_rows for part in parts}) == 1
        if masks[0] is not None:
            rows = rows[np.concatenate(masks) > 0]
        assert len(rows) == parts[0].num_rows
        batches.append(rows.tolist())
    return batches


@pytest.mark.parametrize(("num_examples", "size"), [(32, 8), (29, 9), (17, 8), (5, 8)])
@pytest.mark.parametrize(
    ("num_ranks", "split"), [(1, [1]), (4, [4]), (4, [1, 1, 1, 1]), (6, [3, 2, 1])]
)
def test_processes_feed_every_batch_exactly_once(num_examples, size, num_ranks, split):
    data = np.arange(num_examples)
    expected = [data[i : i + size].tolist() for i in range(0, num_examples, size)]
    assert (
        global_batches(
            lambda rank_slice: ArraySource(data, global_batch_size=size, rank_slice=rank_slice),
            num_ranks,
            split,
        )
        == expected
    )
    if num_examples >= num_ranks:
        listed = [data[i : i + size] for i in range(0, num_examples, size)]
        assert (
            global_batches(
                lambda rank_slice: IterableSource(listed, rank_slice=rank_slice), num_ranks, split
            )
            == expected
        )


def test_the_order_of_an_epoch_follows_from_seed_and_epoch_alone():
    def order(num_ranks, split, epoch, seed=1):
        data = np.arange(31)

        def make(rank_slice):
            return ArraySource(
                data, global_batch_size=7, rank_slice=rank_slice, shuffle=True, seed=seed
            )

        return [row for batch in global_batches(make, num_ranks, split, epoch) for row in batch]

    first = order(1, [1], 0)
    assert sorted(first) == list(range(31))
    assert first != list(range(31))
    assert order(4, [2, 2], 0) == first
    assert order(1, [1], 1) != first
    assert order(1, [1], 0, seed=2) != first


def test_a_source_starts_at_any_batch():
    data = np.arange(20)
    for make in (
        lambda: ArraySource(data, global_batch_size=6, rank_slice=RankSlice(2, 0, 2), shuffle=True),
        lambda: IterableSource(np.split(data, 4), rank_slice=RankSlice(2, 0, 2)),
    ):
        whole = [batch.data.tolist() for batch in make().batches(3)]
        assert [batch.data.tolist() for batch in make().batches(3, 2)] == whole[2:]


def test_a_generator_is_read_on_from_epoch_to_epoch():
    source = IterableSource((np.full(4, i) for i in range(5)), rank_slice=RankSlice(2, 0, 2))
    stream = EpochStream(source, steps_per_epoch=2)
    values = [[int(batch.data[0]) for batch in stream.epoch(epoch)] for epoch in range(2)]
    assert values == [[0, 1], [2, 3]]


@pytest.mark.parametrize("shuffle", [False, True])
def test_rows_that_are_dropped_are_none_of_an_epoch(shuffle):
    source = ArraySource(
        np.arange(11), global_batch_size=4, rank_slice=RankSlice(4, 0, 4),
        shuffle=shuffle, drop_remainder=True,
    )  # fmt: skip
    batches = list(source.batches(0))
    assert source.num_examples == sum(batch.num_rows for batch in batches) == 8
    assert "2 steps per epoch, 0 padded rows" in describe_sizes(RankSlice(4, 0, 4), source)
    # Each epoch drops others of all rows.
    seen = {int(x) for epoch in range(20) for batch in source.batches(epoch) for x in batch.data}
    assert seen == set(range(11 if shuffle else 8))


def test_steps_per_epoch_continues_passes_over_the_data(caplog):
    source = ArraySource(np.arange(12), global_batch_size=3, rank_slice=RankSlice(1))
    stream = EpochStream(source, steps_per_epoch=3)
    assert stream.num_steps == 3
    firsts = [[int(batch.data[0]) for batch in stream.epoch(epoch)] for epoch in range(3)]
    assert firsts == [
        [0, 3, 6],
        [9],
        [0, 3, 6],
    ]  # As Keras does: the pass ends the second epoch early.


def test_a_peeked_batch_is_not_lost():
    stream = EpochStream(IterableSource(iter([np.zeros(2), np.ones(2)]), rank_slice=RankSlice(1)))
    assert stream.peek(0).data.tolist() == [0, 0]
    assert stream.peek(0).data.tolist() == [0, 0]
    assert [batch.data[0] for batch in stream.epoch(0)] == [0, 1]


def test_an_empty_stream_is_refused():
    with pytest.raises(ValueError, match="gave no batch"):
        EpochStream(IterableSource([], rank_slice=RankSlice(1))).peek(0)


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ((np.zeros(4), np.zeros(5)), r"\[0\]: 4, \[1\]: 5"),
        ({"a": np.zeros((3, 2)), "b": np.float32(1)}, r"\['a'\]: 3, \['b'\]: a scalar"),
        ((None, None), "no array at all"),
        ([np.zeros(4)] * 9 + [np.zeros(5)] * 9, r"got \[0\]: 4, \[9\]: 5\.$"),
    ],
)
def test_arrays_of_different_lengths_are_refused(arrays, message):
    with pytest.raises(ValueError, match=message):
        common_length(arrays)


READ_OPTIONS = ReadOptions(RankSlice(4, 0, 4))


@pytest.mark.parametrize(
    ("x", "y", "read_options", "error", "message"),
    [
        (None, None, READ_OPTIONS, ValueError, "x is missing"),
        (np.zeros((8, 2)), np.zeros(7), READ_OPTIONS, ValueError, "same number of rows"),
        (np.zeros((0, 2)), np.zeros(0), READ_OPTIONS, ValueError, "dataset is empty"),
        (
            [(np.zeros(4), np.zeros(4))],
            np.zeros(4),
            READ_OPTIONS,
            ValueError,
            "y was passed with a list",
        ),
        (
            [(np.zeros(4), np.zeros(4))],
            None,
            ReadOptions(RankSlice(4, 0, 4), batch_size=4),
            ValueError,
            "batch_size=4 was passed with a list",
        ),
        (3, None, READ_OPTIONS, TypeError, "but is builtins.int"),
        (
            np.zeros((8, 2)),
            None,
            ReadOptions(RankSlice(4), distribute=False),
            ValueError,
            "Arrays are split over all processes",
        ),
        (
            np.zeros((8, 2)),
            None,
            ReadOptions(RankSlice(4), batch_size=3),
            ValueError,
            r"\(3\) must be at least the number of ranks \(4\)",
        ),
    ],
)
def test_unusable_data_is_refused(x, y, read_options, error, message):
    with pytest.raises(error, match=message):
        as_source(x, y, None, read_options)


def test_small_batches_of_an_iterable_are_refused():
    source = as_source([(np.zeros(3), np.zeros(3))], None, None, READ_OPTIONS)
    with pytest.raises(ValueError, match=r"\(3\) must be at least the number of ranks \(4\)"):
        next(source.batches(0))


def test_arrays_get_keras_batch_size_by_default():
    assert as_source(np.zeros((100, 2)), None, None, READ_OPTIONS).global_batch_size == 32
    assert (
        as_source(
            np.zeros((100, 2)), None, None, ReadOptions(RankSlice(4), micro_batch_size=3)
        ).global_batch_size
        == 12
    )


def test_elements_are_unpacked_as_in_keras():
    assert unpack("x") == ("x", None, None)
    assert unpack(("x",)) == ("x", None, None)
    assert unpack(("x", "y")) == ("x", "y", None)
    assert unpack(("x", "y", "w")) == ("x", "y", "w")
    with pytest.raises(ValueError, match="tuple of 4"):
        unpack((1, 2, 3, 4))


def test_a_dataset_known_to_be_infinite_needs_steps():
    tf = pytest.importorskip("tensorflow")
    endless = as_source(
        tf.data.Dataset.range(8).batch(4).repeat(), None, None, ReadOptions(RankSlice(1))
    )
    with pytest.raises(ValueError, match=r"infinite.*steps_per_epoch"):
        EpochStream(endless).require_end()
    assert EpochStream(endless).require_end(steps=2).num_steps is None
    assert len(list(EpochStream(endless, steps_per_epoch=3).require_end().epoch(0))) == 3


def test_arrays_may_lie_in_a_named_tuple():
    pair = namedtuple("Pair", ["left", "right"])
    source = as_source(pair(np.arange(8), [1] * 8), np.arange(8), None, READ_OPTIONS)
    inputs, targets, _ = next(source.batches(0)).data
    assert type(inputs) is pair
    np.testing.assert_array_equal(inputs.left, targets)
    assert inputs.right.tolist() == [1] * len(targets)


def test_lists_of_numpy_numbers_are_arrays():
    numbers = np.arange(8, dtype=np.int32)
    source = as_source(np.zeros((8, 2)), list(numbers), None, READ_OPTIONS)
    targets = next(source.batches(0)).data[1]
    assert targets.dtype == np.int32
    assert as_batch([list(numbers), list(numbers)])[1].tolist() == numbers.tolist()
