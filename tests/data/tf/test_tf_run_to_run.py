"""What differs from run to run in `tf.data` pipelines: repaired where it can be, else named."""

import logging

import numpy as np
import pytest
import tensorflow as tf
from tfdata_checks import Dataset, numpy_batches

import tnt_jax as tnt
from tnt_jax.data.dispatch import as_source
from tnt_jax.data.layout import RankSlice, ReadOptions
from tnt_jax.data.tf import private as _tensorflow
from tnt_jax.data.tf.inspection import run_to_run_differences
from tnt_jax.data.tf.tfdata import TfData, TfDataSource
from tnt_jax.job import Slot


@pytest.fixture(autouse=True)
def without_global_seed():
    """A global seed, which other tests may have set, seeds every operation."""
    with _tensorflow.global_seed(None):
        yield


@pytest.fixture
def warnings(caplog, monkeypatch):
    """Gives the function that returns what was warned of; every test may be warned anew."""
    monkeypatch.setattr(logging.getLogger("tnt_jax"), "propagate", True)
    tnt.shutdown()
    caplog.set_level("WARNING", logger="tnt_jax")
    return lambda: [
        record.getMessage() for record in caplog.records if record.name.startswith("tnt_jax")
    ]


def draw(i):
    return i, tf.random.uniform([], seed=3)


def draw_without_seed(i):
    return i, tf.random.normal([])


def draw_in_python(i):
    return tf.numpy_function(lambda i: i + np.random.randint(5), [i], tf.int64)


def stateless(i):
    return i, tf.random.stateless_uniform([], tf.stack([i, 5]))


def read(dataset, num_processes=1, **options):
    """The first process's rows."""
    source = TfDataSource(TfData(dataset, **options), RankSlice(num_processes), reproducible=True)
    return [batch.data for batch in source.batches(0)]


@pytest.mark.parametrize("function", [draw, draw_without_seed])
def test_parallel_draws_come_one_after_the_other(function, warnings):
    def make(**parallel):
        return Dataset.range(40).shuffle(40, seed=1).map(function, **parallel).batch(8)

    expected = read(make())
    assert not warnings()
    assert len(np.unique(np.concatenate([numbers for _, numbers in expected]))) == 40
    for _ in range(2):
        for actual, serial in zip(
            read(make(num_parallel_calls=4, deterministic=False)), expected, strict=True
        ):
            np.testing.assert_array_equal(actual, serial)
    (warning,) = warnings()
    assert f"map({function.__name__}) runs for one element at a time (Random" in warning


def test_pipelines_without_random_operations_stay_parallel(warnings):
    def make():
        return Dataset.range(20).map(stateless, num_parallel_calls=4, deterministic=False).batch(5)

    source = TfDataSource(TfData(make()), RankSlice(1), reproducible=True)
    operations = source._stream._inputs()[0]._inputs()[0]
    assert (type(operations).__name__, operations._deterministic) == ("_ParallelMapDataset", "true")
    assert not warnings()


def interleaved(**options):
    return (
        Dataset.range(3)
        .interleave(
            lambda i: Dataset.range(i * 9, i * 9 + 9), 3, 2, num_parallel_calls=3, **options
        )
        .batch(9)
    )


def test_an_interleave_in_any_order_is_put_in_order(warnings):
    source = TfDataSource(TfData(interleaved(deterministic=False)), RankSlice(1))
    nodes = tf.compat.v1.GraphDef.FromString(source._stream._as_serialized_graph().numpy()).node
    assert [
        node.attr["deterministic"].s for node in nodes if node.op.startswith("ParallelInterleave")
    ] == [b"true"]
    for actual, expected in zip(
        read(interleaved(deterministic=False)), numpy_batches(interleaved()), strict=True
    ):
        np.testing.assert_array_equal(actual, expected)
    assert not warnings()


def inner_draws(i):
    return Dataset.range(4).map(draw, num_parallel_calls=2)


def inner_order(i):
    return Dataset.range(4).map(stateless, num_parallel_calls=2, deterministic=False)


@pytest.mark.parametrize(
    ("dataset", "reasons"),
    [
        (lambda: Dataset.range(4).map(draw), []),
        (lambda: Dataset.range(4).shuffle(4, seed=1).map(stateless, num_parallel_calls=2), []),
        (
            lambda: Dataset.from_generator(
                lambda: iter(range(4)), output_signature=tf.TensorSpec((), tf.int64)
            ),
            [],
        ),
        (lambda: Dataset.range(4).shuffle(4), ["shuffle has no seed"]),
        (
            lambda: Dataset.range(4).map(draw_without_seed, 2, deterministic=False),
            [
                "map(draw_without_seed) has deterministic=False",
                "map(draw_without_seed) draws random numbers in parallel (RandomStandardNormal)",
                "map(draw_without_seed) draws random numbers without a seed (RandomStandardNormal)",
            ],
        ),
        (
            lambda: Dataset.range(4).map(draw_in_python, 2),
            ["map(draw_in_python) draws random numbers in parallel (PyFunc)"],
        ),
        (
            lambda: Dataset.range(2).flat_map(inner_draws),
            [
                "inside flat_map(inner_draws) a dataset draws random numbers in parallel "
                "(RandomUniform)"
            ],
        ),
        (
            lambda: Dataset.range(2).flat_map(inner_order),
            ["inside flat_map(inner_order) a dataset has deterministic=False"],
        ),
    ],
)
def test_run_to_run_differences(dataset, reasons):
    assert run_to_run_differences(dataset()) == reasons


def test_what_cannot_be_repaired_is_warned_of_once(warnings):
    make = lambda: Dataset.range(2).flat_map(inner_draws).batch(4)  # noqa: E731
    for _ in range(2):
        read(make())
    (warning,) = warnings()
    assert "not reproducible" in warning
    assert "inside flat_map(inner_draws) a dataset draws random numbers in parallel" in warning


def test_draws_for_own_rows_are_warned_of(warnings):
    make = lambda: Dataset.range(8).map(draw).batch(4)  # noqa: E731
    read(make(), 2)
    assert not warnings()
    read(make(), 2, split="before")
    (warning,) = warnings()
    assert "map(draw) draws random numbers for the rows of a process alone" in warning


def test_shards_of_the_processes_own_are_warned_of(warnings):
    for reproducible in (False, True):
        read_options = ReadOptions(RankSlice(1), distribute=False, reproducible=reproducible)
        as_source([(np.zeros((4, 1)), np.zeros(4))], None, None, read_options)
        assert len(warnings()) == reproducible
    assert "each process brings its own shard" in warnings()[0]


def test_set_seed_seeds_what_has_no_seed(monkeypatch):
    def batches(seed):
        monkeypatch.setattr("tnt_jax.seeding._seed", Slot(lambda: seed))
        return np.concatenate(read(Dataset.range(20).shuffle(20).batch(5)))

    for seed, expected in ((None, 42), (7, 7), (0, 42)):
        np.testing.assert_array_equal(
            batches(seed),
            np.concatenate(numpy_batches(Dataset.range(20).shuffle(20, expected).batch(5))),
        )
    assert not np.array_equal(batches(7), batches(8))
