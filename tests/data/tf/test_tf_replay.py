"""Every operation of a tf.data pipeline can be rebuilt by the installed TensorFlow, and what cannot
be taken apart still trains.
"""

import numpy as np
import pytest

tf = pytest.importorskip("tensorflow", reason="needs TensorFlow")

from tfdata_checks import Dataset, assert_same, assert_union_is, numpy_batches, sources  # noqa: E402

import tnt_jax as tnt  # noqa: E402
from tnt_jax.data.layout import RankSlice  # noqa: E402
from tnt_jax.data.tf import replay as tf_replay  # noqa: E402

OPTIONS = tf.data.Options()
AFTER_A_SHUFFLE = {
    "_TakeDataset": lambda d: d.take(11),
    "_SkipDataset": lambda d: d.skip(3),
    "_RepeatDataset": lambda d: d.repeat(2),
    "_ShardDataset": lambda d: d.shard(2, 1),
    "_ShuffleDataset": lambda d: d.shuffle(5, seed=2),
    "_AssertCardinalityDataset": lambda d: d.apply(tf.data.experimental.assert_cardinality(20)),
    "_RandomDataset": lambda d: Dataset.zip(d, Dataset.random(seed=3)).map(lambda i, r: i + r % 7),
    "_PrefetchDataset": lambda d: d.prefetch(2),
    "CacheDataset": lambda d: d.cache(),
    "_OptionsDataset": lambda d: d.with_options(OPTIONS),
    "_MapDataset": lambda d: d.map(lambda i: i * 2),
    "_ParallelMapDataset": lambda d: d.map(lambda i: i * 2, num_parallel_calls=2),
    "_FilterDataset": lambda d: d.filter(lambda i: i % 3 != 1),
    "_TakeWhileDataset": lambda d: d.take_while(lambda i: i != 13),
    "_FlatMapDataset": lambda d: d.flat_map(lambda i: Dataset.range(i, i + 2)),
    "_InterleaveDataset": lambda d: d.interleave(lambda i: Dataset.range(i, i + 2), 3, 1),
    "_ParallelInterleaveDataset": lambda d: d.interleave(
        lambda i: Dataset.range(i, i + 2), 3, 1, num_parallel_calls=2
    ),
    "_ScanDataset": lambda d: d.scan(np.int64(0), lambda s, i: (s + i, s)),
    "_GroupByWindowDataset": lambda d: d.group_by_window(
        lambda i: i % 2, lambda _, w: w.batch(3), window_size=3
    ).unbatch(),
    "_UnbatchDataset": lambda d: d.batch(3).unbatch(),
    "_RebatchDataset": lambda d: d.batch(3).rebatch(4).unbatch(),
    "_RestructuredDataset": lambda d: (
        d.map(lambda i: tf.strings.as_string(i)).batch(2).unbatch().map(tf.strings.to_number)
    ),
    "_IgnoreErrorsDataset": lambda d: d.map(
        lambda i: tf.debugging.check_numerics(4.0 / tf.cast(i % 5, tf.float32), "")
    ).ignore_errors(),
    "_UniqueDataset": lambda d: d.map(lambda i: i // 2).unique(),
    "_WindowDataset": lambda d: d.window(3, 2).flat_map(lambda w: w.batch(3)),
    "_BatchDataset": lambda d: d.batch(3, drop_remainder=True),
    "_ParallelBatchDataset": lambda d: d.batch(3, num_parallel_calls=2),
    "_PaddedBatchDataset": lambda d: d.map(lambda i: tf.fill([i % 4], i)).padded_batch(
        3, [5], np.int64(-1)
    ),
    "_ZipDataset": lambda d: Dataset.zip(d, Dataset.range(50)),
    "_ConcatenateDataset": lambda d: d.concatenate(Dataset.range(3)),
}


def kinds(dataset):
    return {type(dataset).__name__}.union(*map(kinds, dataset._inputs()))


@pytest.mark.parametrize("kind", tf_replay._REPLAYS)
def test_an_operation_after_a_shuffle_gives_what_tensorflow_gives(kind):
    # A shuffle is always made anew, and with it everything that stands after it.
    make = lambda: AFTER_A_SHUFFLE[kind](Dataset.range(20).shuffle(8, seed=1))  # noqa: E731
    repairs = tf_replay.Repairs(RankSlice(1))
    rebuilt = repairs.repaired(make())
    assert kind in kinds(make())
    assert not any("is not known" in note for note in repairs.notes)
    assert_same(list(rebuilt.as_numpy_iterator()), list(make().as_numpy_iterator()))


@pytest.mark.parametrize("num_processes", [1, 2, 3])
@pytest.mark.parametrize("where", ["before the shuffle", "after it", "after the batch"])
def test_options_anywhere_change_nothing(where, num_processes):
    def make():
        data = Dataset.range(20)
        data = data.with_options(OPTIONS) if where == "before the shuffle" else data
        data = data.shuffle(8, seed=4)
        data = data.with_options(OPTIONS).map(lambda i: i * 2) if where == "after it" else data
        return data.batch(6).with_options(OPTIONS) if where == "after the batch" else data.batch(6)

    assert_union_is(sources(make(), num_processes), numpy_batches(make()))


@pytest.mark.parametrize(
    ("stage", "name"), [("shuffle", "_buffer_size"), ("batch", "_batch_size"), ("shuffle", "_seed")]
)
@pytest.mark.parametrize("num_processes", [1, 2])
def test_a_version_of_tensorflow_without_a_private_attribute_still_trains(
    stage, name, num_processes, caplog
):
    shuffled = Dataset.range(20).shuffle(8, seed=4, reshuffle_each_iteration=False)
    batched = shuffled.batch(8)
    tnt.shutdown()
    delattr(shuffled if stage == "shuffle" else batched, name)
    with caplog.at_level("WARNING", logger="tnt_jax"):
        assert_union_is(sources(batched, num_processes), numpy_batches(batched))
    assert "this version of TensorFlow" in caplog.text
    with pytest.raises(
        ValueError, match="split='before' is impossible: this version of TensorFlow"
    ):
        sources(batched, num_processes, split="before")


@pytest.mark.parametrize("num_processes", [1, 2, 4])
def test_from_tensors_of_a_batch_is_a_batch(num_processes):
    data = Dataset.from_tensors((np.arange(12.0).reshape(6, 2), np.arange(6)))
    for dataset in (data, data.map(lambda x, y: (x * 2, y)), data.repeat(3).shuffle(2, seed=1)):
        parts = sources(dataset, num_processes)
        assert parts[0].global_batch_size == 6
        assert_union_is(parts, numpy_batches(dataset))
    assert sources(data, 1)[0].num_examples == 6


def test_from_tensors_of_one_example_is_not_a_batch():
    with pytest.raises(ValueError, match="not batched"):
        sources(Dataset.from_tensors((np.zeros((28, 28)), 3)), 1)
    assert (
        sources(Dataset.from_tensors((np.zeros((28, 28)), 3)).repeat(8), 1, micro_batch_size=4)[
            0
        ].num_examples
        == 8
    )


class Unknown(tf.data.Dataset):
    """An operation of a later TensorFlow."""

    def __new__(cls, source):
        made = source.take(100)
        made.__class__ = type("_UnknownDataset", (type(made),), {})
        return made


def test_an_unseeded_shuffle_before_an_unknown_operation_is_warned_of(caplog):
    tnt.shutdown()
    with caplog.at_level("WARNING", logger="tnt_jax"):
        sources(Unknown(Dataset.range(20).shuffle(5)).batch(8), 1)
        sources(Unknown(Dataset.range(20).shuffle(5, seed=1)).batch(8), 2)
        assert not caplog.records
        sources(Unknown(Dataset.range(20).shuffle(5)).batch(8), 2)
    assert "A shuffle without a seed stands before unknown, which is not known" in caplog.text


def decode(i):
    return tf.numpy_function(lambda value: value * 2, [i], tf.int64)


def decode_eagerly(i):
    return tf.py_function(lambda value: value * 2, [i], tf.int64)


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda: Dataset.range(20).map(decode, 2).shuffle(5, seed=1).batch(8), "map(decode)"),
        (lambda: Dataset.range(20).map(decode_eagerly).batch(8).prefetch(1), "map(decode_eagerly)"),
        (lambda: Dataset.range(20).batch(8).map(decode), "map(decode)"),
    ],
)
def test_python_code_that_runs_for_all_rows_is_warned_of_once(make, name, caplog):
    tnt.shutdown()
    with caplog.at_level("WARNING", logger="tnt_jax"):
        sources(make(), 2)
        assert [record.message.partition(" for all rows")[0] for record in caplog.records] == [
            f"Every process runs {name}"
        ]
        assert 'TfData(dataset, split="before")' in caplog.text
        sources(make(), 1)
        sources(make(), 2, split="after")
        sources(make(), 2, split="before")
        sources(
            Dataset.range(20).map(decode).filter(lambda i: i > 3).batch(8), 2
        )  # No split could help.
    assert len(caplog.records) == 1


def test_python_code_without_a_state_runs_for_own_rows():
    calls = []

    def load(value):
        calls.append(value)
        return value * 2

    def make():
        return (
            Dataset.range(20)
            .map(
                lambda i: tf.ensure_shape(
                    tf.numpy_function(load, [i], tf.int64, stateful=False), []
                )
            )
            .batch(10)
        )

    expected = numpy_batches(make())
    calls.clear()
    assert_union_is(sources(make(), 2), expected)
    assert sorted(calls) == list(range(20))
