"""Where the selection of own rows stands in a tf.data pipeline, and with
which seeds.
"""

import re

import jax
import numpy as np
import pytest

tf = pytest.importorskip("tensorflow", reason="needs TensorFlow")

from tensorflow.python.eager import context  # noqa: E402
from tfdata_checks import Dataset, assert_union_is, counted, numpy_batches, pairs, sources  # noqa: E402

from tnt_jax.data.layout import RankSlice, local_rows  # noqa: E402
from tnt_jax.data.tf.tfdata import TfData, TfDataSource  # noqa: E402

AUTOTUNE = tf.data.AUTOTUNE


# ---- Where the selection stands ----


def test_maps_run_for_own_rows_only():
    calls = {}
    dataset = (
        Dataset.range(64)
        .map(counted(calls, "decode"))
        .shuffle(16, seed=3)
        .repeat(2)
        .map(counted(calls, "augment"))
        .batch(16)
    )
    for source in sources(dataset, 4, split="before"):
        calls.clear()
        list(source.batches(0))
        assert calls == {"decode": 32, "augment": 32}
    calls.clear()
    list(sources(dataset, 4, split="after")[0].batches(0))
    assert calls == {"decode": 128, "augment": 128}


@pytest.mark.parametrize(
    ("make", "before", "after"),
    [
        (lambda: Dataset.range(9).map(abs).shuffle(3).map(abs).batch(4).prefetch(1), "range shuffle", "map(abs) map(abs) batch prefetch"),
        (lambda: Dataset.range(9).map(abs).cache().shuffle(3).map(abs).batch(4), "range map(abs) cache shuffle", "map(abs) batch"),
        (lambda: Dataset.range(9).map(abs).cache().batch(4), "range", "map(abs) cache batch"),
        (lambda: Dataset.range(9).map(abs).filter(lambda i: i > 2).map(abs).batch(4), "range map(abs) filter(lambda)", "map(abs) batch"),
        (lambda: Dataset.zip((Dataset.range(9).map(abs), Dataset.range(9))).batch(4), "range map(abs) range zip batch", ""),
        (lambda: Dataset.range(9).batch(4).map(lambda i: i + 1).take(2), "range batch map(lambda) take", ""),
        (lambda: Dataset.range(9).map(abs).batch(4).map(lambda i: i[::-1]), "range map(abs) batch map(lambda)", ""),
    ],
)  # fmt: skip
def test_place_of_the_selection(make, before, after):
    distribution = sources(make(), 2)[1].distribution
    assert " ".join(distribution.before) == before
    assert " ".join(distribution.after) == after


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (
            lambda: Dataset.range(9).batch(4).map(lambda i: i[::-1]),
            r"map\(lambda\) works on whole batches and may mix their rows",
        ),
        (
            lambda: Dataset.range(9).batch(4).filter(lambda i: True),
            r"filter\(lambda\) stands after the batching",
        ),
        (
            lambda: Dataset.range(9).map(lambda i: tf.fill([i], i)).padded_batch(4),
            "padded_batch pads to the longest row",
        ),
        (
            lambda: Dataset.range(9).map(lambda i: tf.random.uniform([])).batch(4),
            r"runs for all rows, because RandomUniform depends",
        ),
        (
            lambda: (
                Dataset.range(9)
                .map(lambda i: tf.random.uniform([], seed=1), num_parallel_calls=2)
                .batch(4)
            ),
            r"because RandomUniform draws in parallel, so that its results differ from run to run",
        ),
        (
            lambda: (
                Dataset.range(9).map(lambda i: tf.py_function(lambda x: x, [i], tf.int64)).batch(4)
            ),
            "because EagerPyFunc depends",
        ),
        (
            lambda: Dataset.range(9).filter(lambda i: True).batch(4),
            r"filter\(lambda\) and what stands before it run for all rows",
        ),
    ],
)
def test_reason_is_given_at_info(make, reason, caplog):
    with caplog.at_level("INFO", logger="tnt_jax"):
        source = sources(make(), 2)[0]
    assert re.search(reason, "\n".join(source.distribution.notes))
    assert re.search(reason, caplog.text)


def test_distribution_is_logged_once_per_source(caplog):
    with caplog.at_level("INFO", logger="tnt_jax"):
        sources(Dataset.range(21).map(abs).shuffle(4).batch(8), 2, 2)[0]
    assert (
        "global batch 8, 2 rows on each of 4 ranks, 3 steps per epoch, 3 padded rows in the last "
        "batch." in caplog.text
    )
    assert (
        "for all rows: range, shuffle.\nIt runs for its own rows: map(abs), batch." in caplog.text
    )
    assert "shuffle has no seed, so every process uses 42." in caplog.text


def test_forcing_what_is_impossible_is_an_error():
    with pytest.raises(
        ValueError,
        match=r"split='before' is impossible: filter\(lambda\) stands after the batching",
    ):
        sources(Dataset.range(9).batch(4).filter(lambda i: True), 2, split="before")
    with pytest.raises(
        ValueError, match="split must be one of 'auto', 'before', 'after', but is 'early'"
    ):
        TfData(Dataset.range(9), split="early")  # pyright: ignore[reportArgumentType]


def test_forced_split_moves_maps_with_random_operations():
    dataset = Dataset.range(32).map(lambda i: (i, tf.random.uniform([]))).batch(8)
    (first, second) = sources(dataset, 2, split="before")
    assert first.distribution.before == ("range",)
    ids = [
        np.concatenate([a.data[0], b.data[0]])
        for a, b in zip(first.batches(0), second.batches(0), strict=True)
    ]
    np.testing.assert_array_equal(np.concatenate(ids), np.arange(32))


# ---- The same order and the same random numbers everywhere ----


def test_unseeded_shuffle_is_seeded_with_42_everywhere():
    def nested(s):
        return Dataset.range(4).interleave(
            lambda i: Dataset.range(i, 40, 4).shuffle(9, **s), cycle_length=2
        )

    branch = lambda s: Dataset.zip((Dataset.range(40).shuffle(7, **s), Dataset.range(40)))  # noqa: E731
    second = lambda s: Dataset.range(20).concatenate(Dataset.range(20).shuffle(9, **s))  # noqa: E731
    for make in (branch, second):
        assert_union_is(sources(make({}).batch(8), 3), numpy_batches(make({"seed": 42}).batch(8)))
    one, two = (sources(nested({}).batch(8), 3) for _ in range(2))
    assert_union_is(one, [batch.data for batch in sources(nested({}).batch(8), 1)[0].batches(0)])
    assert any(
        "interleave(lambda) draws random numbers without a seed (ShuffleDatasetV3)" in note
        for note in two[0].distribution.notes
    )


@pytest.mark.parametrize(
    "join",
    [
        lambda d: Dataset.zip((d, d.map(lambda i: -i))).batch(8),
        lambda d: d.concatenate(d.map(abs)).batch(8),
        lambda d: d.batch(8).concatenate(d.batch(8)),
        lambda d: (lambda b: b.concatenate(b))(d.batch(8)),
        lambda d: (lambda b: Dataset.zip((b, b.prefetch(1))))(d.batch(8)),
    ],
)
def test_shuffle_that_occurs_twice_draws_two_orders_as_in_tensorflow(join):
    make = lambda: join(Dataset.range(20).map(lambda i: i + 1).shuffle(20, seed=3))  # noqa: E731
    expected = numpy_batches(make())
    for num_processes in (1, 2, 3):
        assert_union_is(sources(make(), num_processes), expected)


def test_seeds_under_a_global_seed_are_kept():
    make = lambda: Dataset.range(40).shuffle(40).shuffle(11, seed=3).batch(8)  # noqa: E731
    tf.random.set_seed(7)
    try:
        expected = numpy_batches(make())
        tf.random.set_seed(7)
        assert_union_is(sources(make(), 2), expected)
    finally:
        context.context()._seed = None


@pytest.mark.parametrize("num_processes", [1, 2, 4])
def test_random_operations_in_sequential_maps_give_the_same_pixels(num_processes):
    make = lambda: Dataset.range(40).map(lambda i: (i, tf.random.uniform([3]))).shuffle(9).batch(8)  # noqa: E731
    expected = [batch.data for batch in sources(make(), 1)[0].batches(0)]
    assert_union_is(sources(make(), num_processes), expected)
    assert len({float(x) for batch in expected for x in batch[1].ravel()}) == 120


@pytest.mark.parametrize("num_processes", [2, 4])
def test_stateless_random_operations_run_for_own_rows(num_processes):
    def augment(index, i):
        return i, tf.random.stateless_uniform([2], tf.stack([index, 5]))

    def make():
        return (
            Dataset.range(40)
            .shuffle(40, seed=1)
            .enumerate()
            .map(augment, num_parallel_calls=AUTOTUNE)
            .batch(8)
        )

    parts = sources(make(), num_processes)
    assert "map(augment)" in parts[0].distribution.after
    assert_union_is(parts, numpy_batches(make()))


def test_nondeterministic_order_is_made_deterministic():
    make = lambda: Dataset.range(50).map(abs, num_parallel_calls=4, deterministic=False).batch(10)  # noqa: E731
    parts = sources(make(), 2)
    assert any("deterministic=False" in note for note in parts[0].distribution.notes)
    assert_union_is(parts, [np.arange(k, k + 10) for k in range(0, 50, 10)])
    options = tf.data.Options()
    options.deterministic = False
    parts = sources(make().with_options(options), 2)
    assert any(
        "option deterministic=False is not followed" in note for note in parts[0].distribution.notes
    )


@pytest.mark.parametrize("seed", [None, 9])
def test_streams_of_random_numbers_are_the_same_everywhere(seed):
    def make(seed):
        numbers = Dataset.random(seed, rerandomize_each_iteration=True)
        return (
            Dataset.zip((Dataset.range(20), numbers))
            .map(lambda i, r: (i, r), num_parallel_calls=2)
            .batch(8)
        )

    serial = make(seed or 42)
    epochs = [numpy_batches(serial) for _ in range(3)]
    assert not np.array_equal(epochs[0][0][1], epochs[1][0][1])
    for epoch in (0, 2, 1):
        assert_union_is(sources(make(seed), 3), epochs[epoch], epoch=epoch)


def test_rows_that_are_flagged_as_bad_are_masked_and_counted(caplog):
    dataset = Dataset.range(20).map(lambda i: (i % 6 != 5, i)).batch(8)
    parts = [
        TfDataSource(TfData(dataset, has_flags=True), RankSlice(2, process)) for process in range(2)
    ]
    with caplog.at_level("WARNING", logger="tnt_jax"):
        batches = [batch for source in parts for batch in source.batches(0)]
    assert sorted(int(i) for batch in batches for i in batch.data[batch.mask > 0]) == [
        i for i in range(20) if i % 6 != 5
    ]
    assert sum(source.num_skipped for source in parts) == 3
    assert "Skipped 1 records that cannot be read" in caplog.text


@pytest.mark.parametrize("split", ["before", "after"])
def test_groups_of_processes_have_equal_parts_of_each_batch(split):
    dataset = Dataset.range(17).map(abs).batch(6)  # The last batch has 5 rows.
    for process in range(4):
        ranks = RankSlice(4, process, num_groups=2)
        batches = TfDataSource(TfData(dataset, split=split), ranks).batches(0)
        for first, batch in zip((0, 6, 12), batches, strict=True):
            expected = local_rows(batch.num_rows, ranks)
            real = slice(None) if expected.mask is None else expected.mask > 0
            np.testing.assert_array_equal(batch.mask, expected.mask)
            np.testing.assert_array_equal(batch.data[real], first + expected.indices[real])


# ---- Epochs and positions ----


# ---- Sizes ----


# ---- Shards ----


@pytest.mark.parametrize(
    ("dataset", "options", "is_known"),
    [
        (pairs(20).batch(6), {}, True),
        (pairs(5).batch(6), {}, True),
        (
            pairs(20).map(lambda i, x: ({"a": x, "b": tf.cast(i, tf.bfloat16)}, i)).batch(4),
            {},
            True,
        ),
        (pairs(20), {"micro_batch_size": 2}, True),
        (pairs(20).filter(lambda i, x: i > 2).batch(6), {}, True),
        (pairs(20).padded_batch(6, padded_shapes=([], [None])), {}, False),
    ],
)
def test_the_first_batch_has_the_form_that_was_announced(dataset, options, is_known):
    for source in sources(dataset, 3, **options):
        announced, first = source.announce(), next(source.batches(0))
        assert (announced is not None) == is_known
        if announced is None:
            continue
        assert announced.num_rows == first.num_rows
        form = [(x.shape, x.dtype) for x in jax.tree.leaves((announced.data, announced.mask))]
        assert form == [(x.shape, x.dtype) for x in jax.tree.leaves((first.data, first.mask))]
        assert jax.tree.structure(announced.data) == jax.tree.structure(first.data)
