"""Epochs, positions and sizes of tf.data pipelines, and shards of processes."""

import numpy as np
import pytest

tf = pytest.importorskip("tensorflow", reason="needs TensorFlow")

from tfdata_checks import (  # noqa: E402
    Dataset,
    assert_union_is,
    counted,
    numpy_batches,
    pairs,
    sources,
)

from tnt_jax.data.layout import (  # noqa: E402
    RankSlice,
    ReadOptions,
)
from tnt_jax.data.tf.tfdata import tf_source  # noqa: E402

AUTOTUNE = tf.data.AUTOTUNE


@pytest.mark.parametrize("make", [
    lambda: Dataset.range(30).shuffle(30, seed=5).batch(8),
    pytest.param(
        lambda: Dataset.range(30).shuffle(30, seed=5).repeat(2).batch(8), marks=pytest.mark.long
    ),
    lambda: Dataset.range(30).shuffle(30, seed=5, reshuffle_each_iteration=False).batch(8),
    lambda: Dataset.range(30).map(abs).cache().shuffle(30, seed=5).batch(8),
])  # fmt: skip
def test_epochs_are_those_of_tensorflow_in_any_order(make):
    serial = make()
    epochs = [numpy_batches(serial) for _ in range(4)]
    for visited in ([0, 1, 2, 3], [2], [3, 1, 1, 0]):
        parts = sources(make(), 3)
        for epoch in visited:
            assert_union_is(parts, epochs[epoch], epoch=epoch)
    assert_union_is(sources(make(), 2), epochs[2][2:], epoch=2, start_batch=2)


def test_iterated_dataset_starts_at_its_first_order():
    dataset = Dataset.range(30).shuffle(30, seed=5).batch(8)
    expected = numpy_batches(dataset)
    list(dataset)
    assert_union_is(sources(dataset, 2), expected)


def test_infinite_dataset():
    parts = sources(Dataset.range(10).repeat().batch(8), 2)
    assert parts[0].num_batches is None
    assert parts[0].num_examples is None
    streams = [source.batches(0) for source in parts]
    for step in range(9):
        rows = np.concatenate([next(stream).data for stream in streams])
        np.testing.assert_array_equal(rows, np.arange(step * 8, step * 8 + 8) % 10)


def test_cardinality_is_read_not_counted():
    calls = {}
    dataset = Dataset.range(20).map(counted(calls, "read")).filter(lambda i: i % 2 == 0).batch(4)
    assert [source.num_batches for source in sources(dataset, 2)] == [None, None]
    assert calls == {}
    assert sources(Dataset.range(21).map(abs).batch(4), 2)[0].num_examples == 21
    assert sources(Dataset.range(21).batch(4, drop_remainder=True), 2)[0].num_examples == 20


@pytest.mark.parametrize("num_processes", [1, 2, 3])
def test_unbatched_dataset_with_micro_batch(num_processes):
    parts = sources(pairs(20), num_processes, micro_batch_size=3)
    assert parts[0].global_batch_size == 3 * num_processes
    assert_union_is(parts, numpy_batches(pairs(20).batch(3 * num_processes)))


def test_micro_batch_of_a_batched_dataset_must_agree():
    assert sources(pairs(20).batch(6), 2, micro_batch_size=3)[0].global_batch_size == 6
    with pytest.raises(
        ValueError,
        match=r"tnt_micro_batch_size \(4\) \* ranks \(2\) must equal the dataset's batch size "
        r"\(6\)",
    ):
        sources(pairs(20).batch(6), 2, micro_batch_size=4)


@pytest.mark.parametrize(
    "dataset",
    [
        lambda: pairs(20),
        lambda: pairs(20).batch(4).unbatch(),
        lambda: pairs(20).batch(4).flat_map(lambda i, x: Dataset.from_tensor_slices((i, x))),
    ],
)
def test_unbatched_dataset_needs_a_size(dataset):
    with pytest.raises(ValueError, match="not batched and no tnt_micro_batch_size"):
        sources(dataset(), 2)


def test_batch_smaller_than_ranks_is_refused():
    with pytest.raises(
        ValueError, match=r"global batch size \(3\) must be at least the number of ranks \(4\)"
    ):
        sources(pairs(20).batch(3), 4)


def test_components_that_no_device_holds_are_refused():
    with pytest.raises(TypeError, match="component 1 is text"):
        sources(Dataset.from_tensor_slices((np.arange(4), ["a", "b", "c", "d"])).batch(2), 2)
    with pytest.raises(TypeError, match="component 0 is a RaggedTensorSpec"):
        sources(Dataset.range(4).map(tf.range).ragged_batch(2), 2)


def test_cache_files_of_processes_are_apart(tmp_path):
    rows = Dataset.range(20).map(abs).cache(str(tmp_path / "cache"))
    for _ in range(2):
        assert_union_is(sources(rows.batch(8), 2), np.split(np.arange(20), [8, 16]))
    assert {path.name.split(".")[1] for path in tmp_path.iterdir()} == {
        "ranks-0-to-0-of-2-by-8",
        "ranks-1-to-1-of-2-by-8",
    }
    # Rows of other windows have files of their own.
    assert_union_is(sources(rows.batch(10), 2), np.split(np.arange(20), 2))
    assert_union_is(sources(rows.batch(8, drop_remainder=True), 2), np.split(np.arange(16), 2))


def test_lookup_tables_and_captured_variables_work():
    table = tf.lookup.StaticHashTable(
        tf.lookup.KeyValueTensorInitializer(tf.range(10, dtype=tf.int64), tf.range(10, 20)), -1
    )
    offset = tf.Variable(100)
    parts = sources(Dataset.range(20).map(lambda i: table.lookup(i % 10) + offset).batch(8), 2)
    assert parts[0].distribution.after == ("map(lambda)", "batch")
    whole = np.arange(20) % 10 + 110
    assert_union_is(
        parts,
        [whole[:8].astype(np.int32), whole[8:16].astype(np.int32), whole[16:].astype(np.int32)],
    )


def test_error_in_the_pipeline_is_raised_on_the_process_that_meets_it():
    def fail(i):
        tf.debugging.assert_less(i, tf.constant(12, tf.int64), f"record {i} is broken")
        return i

    first, second = sources(Dataset.range(16).map(fail).batch(8), 2)
    assert len(list(first.batches(0))) == 2
    with pytest.raises(tf.errors.InvalidArgumentError, match="is broken"):
        list(second.batches(0))


def test_shard_of_a_process_is_batched_for_its_ranks(caplog):
    read_options = ReadOptions(RankSlice(2, 0, 2), micro_batch_size=3, distribute=False)
    with caplog.at_level("INFO", logger="tnt_jax"):
        source = tf_source(Dataset.range(8), read_options)
    source.compare([source.note])
    assert source.num_batches == 2
    first, last = source.batches(0)
    np.testing.assert_array_equal(first.data, np.arange(6))
    np.testing.assert_array_equal(last.mask, [1, 1, 0, 0, 0, 0])
    assert "every process feeds its own shard" in caplog.text
    unknown = tf_source(
        Dataset.range(8).filter(lambda i: i != 2).batch(6),
        ReadOptions(RankSlice(2, 0, 2), distribute=False),
    )
    assert unknown.num_batches is None
    assert [batch.num_rows for batch in unknown.batches(0)] == [6, 1]
    with pytest.raises(
        ValueError, match=r"Batch each process's shard with tnt_micro_batch_size \* 2"
    ):
        tf_source(Dataset.range(8), ReadOptions(RankSlice(2, 0, 2), distribute=False))


@pytest.mark.parametrize("make", [
    lambda: Dataset.range(22).shuffle(22, seed=5).repeat(2).batch(4),
    lambda: Dataset.range(22).shuffle(22, seed=5).cache().batch(4),
    lambda: Dataset.range(8).shuffle(8, seed=5).concatenate(Dataset.range(14).shuffle(14, seed=7)).batch(4),
])  # fmt: skip
@pytest.mark.parametrize("epoch", [1, 3])
def test_a_pass_of_which_one_batch_was_read_changes_no_later_one(make, epoch):
    serial = make()
    expected = [numpy_batches(serial) for _ in range(epoch + 1)][-1]
    parts = sources(make(), 2)
    for part in parts:
        next(part.batches(0))
    assert_union_is(parts, expected, epoch=epoch)


@pytest.mark.parametrize("split", ["auto", "after"])
def test_processes_cache_what_runs_for_all_rows_in_files_of_their_own(split, tmp_path):
    rows = Dataset.range(20).cache(str(tmp_path / "cache"))
    for _ in range(2):
        parts = sources(rows.shuffle(20, seed=5).batch(8), 2, split=split)
        assert_union_is(parts, numpy_batches(Dataset.range(20).shuffle(20, seed=5).batch(8)))
    assert {path.name.split(".")[1] for path in tmp_path.iterdir()} == {
        "ranks-0-to-0-of-2-whole",
        "ranks-1-to-1-of-2-whole",
    }
