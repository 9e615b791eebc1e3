"""The union of all processes' rows, in order, is the single-process stream: for listed and for
random pipelines.
"""

import itertools
from functools import cache

import numpy as np
import pytest

tf = pytest.importorskip("tensorflow", reason="needs TensorFlow")

from long_params import long_but_last  # noqa: E402
from tfdata_checks import Dataset, assert_union_is, numpy_batches, pairs, sources  # noqa: E402

# ---- The pipelines that Tarantella tests, and more, on elements (i, [i, i, i]) ----


PIPELINES = {
    "batch": lambda n, b, d: pairs(n).batch(b, d),
    "parallel batch": lambda n, b,
    d: pairs(n).batch(b, d, num_parallel_calls=2, deterministic=False),
    "shuffle": lambda n, b,
    d: pairs(n).shuffle(10, seed=44, reshuffle_each_iteration=True).batch(b, d),
    "shuffle twice": lambda n, b,
    d: pairs(n).shuffle(7, seed=1).skip(3).shuffle(9, seed=5).batch(b, d),
    "padded batch, fixed": lambda n, b,
    d: Dataset.range(n).map(lambda i: tf.fill([i % 4], i)).padded_batch(b, [5], drop_remainder=d),
    "padded batch, longest": lambda n, b,
    d: Dataset.range(n).map(lambda i: tf.fill([i % 4], i)).padded_batch(b, drop_remainder=d),
    "padded batch, value": lambda n, b,
    d: pairs(n).padded_batch(b, ([], [4]), (tf.constant(-1, tf.int64), -2.0), d),
    "everything": lambda n, b, d: (
        pairs(n).map(lambda i, x: (x, i)).cache().shuffle(64, seed=42).take(n).repeat(2)
        .map(lambda x, i: {"x": x, "y": i * i}, num_parallel_calls=2).batch(b, d).prefetch(2)
    ),
    "nested batch": lambda n, b,
    d: pairs(n).batch(2, drop_remainder=True).map(lambda i, x: (x, i)).batch(b, d),
    "batch, unbatch": lambda n, b, d: pairs(n).batch(3).unbatch().batch(b, d),
    "filter": lambda n, b,
    d: pairs(n).filter(lambda i, x: i % 3 != 1).map(lambda i, x: (x, i)).batch(b, d),
    "flat_map": lambda n, b,
    d: pairs(n).flat_map(lambda i, x: Dataset.from_tensor_slices(x)).batch(b, d),
    "flat_map after batch": lambda n, b,
    d: pairs(n).batch(5).flat_map(lambda i, x: Dataset.from_tensor_slices((i, x))).batch(b, d),
    "map after batch": lambda n, b,
    d: pairs(n).batch(b, d).map(lambda i, x: (x / 255.0 - [0.1, 0.2, 0.3], tf.one_hot(i, 5))),
    "map that mixes rows": lambda n, b,
    d: pairs(n).batch(b, d).map(lambda i, x: (i[::-1], x - tf.reduce_mean(x))),
    "parallel map": lambda n, b, d: pairs(n).map(lambda i, x: i, num_parallel_calls=3).batch(b, d),
    "interleave": lambda n, b, d: (
        Dataset.range(4).interleave(lambda i: Dataset.range(i, n, 4), cycle_length=3, block_length=2).map(lambda i: i + 1).batch(b, d)
    ),
    "parallel interleave": lambda n, b, d: (
        Dataset.range(4).interleave(lambda i: Dataset.range(i, n, 4), 2, 3, num_parallel_calls=2, deterministic=True).batch(b, d)
    ),
    "concatenate": lambda n, b, d: pairs(n // 2).concatenate(pairs(n - n // 2)).batch(b, d),
    "concatenate after batch": lambda n, b,
    d: pairs(n // 2).batch(b, d).concatenate(pairs(n).batch(b, d)),
    "zip": lambda n, b,
    d: Dataset.zip((pairs(n).map(lambda i, x: x * 2), Dataset.range(n).map(lambda i: -i))).batch(b, d),
    "zip of dictionaries": lambda n, b, d: (
        Dataset.zip({"a": pairs(n), "b": Dataset.range(n + 3).map(lambda i: -i)}).shuffle(5, 3).batch(b, d)
    ),
    "zip after batch": lambda n, b,
    d: Dataset.zip((pairs(n).batch(b, d), Dataset.range(n).batch(b, d))),
    "enumerate": lambda n, b, d: pairs(n).enumerate().map(lambda k, e: (k, e[1])).batch(b, d),
    "shard": lambda n, b, d: pairs(n).shard(2, 1).batch(b, d).shard(2, 0),
    "take, skip, repeat after batch": lambda n, b,
    d: pairs(n).batch(b, d).skip(1).repeat(2).take(5),
    "shuffle of batches": lambda n, b, d: pairs(n).batch(b, d).shuffle(8, seed=1),
    "cache after batch": lambda n, b, d: pairs(n).map(lambda i, x: x).batch(b, d).cache().repeat(2),
    "cache before batch": lambda n, b,
    d: pairs(n).map(lambda i, x: x).cache().map(lambda x: x + 1).batch(b, d).repeat(2),
    "filter of batches": lambda n, b,
    d: pairs(n).batch(b, d).filter(lambda i, x: tf.reduce_sum(i) % 2 == 0),
    "scan": lambda n, b,
    d: Dataset.range(n).scan(tf.constant(0, tf.int64), lambda s, i: (s + i, s + i)).batch(b, d),
    "take_while": lambda n, b,
    d: Dataset.range(n).take_while(lambda i: i < n - 2).map(lambda i: i * 2).batch(b, d),
    "window": lambda n, b,
    d: Dataset.range(n).window(3, drop_remainder=True).flat_map(lambda w: w.batch(3)).batch(b, d),
    "assert_cardinality": lambda n, b, d: (
        pairs(n).filter(lambda i, x: i >= 0).apply(tf.data.experimental.assert_cardinality(n)).map(lambda i, x: x).batch(b, d)
    ),
    "unique": lambda n, b, d: Dataset.range(n).map(lambda i: i // 2).unique().batch(b, d),
    "rebatch": lambda n, b, d: pairs(n).batch(3).rebatch(b, drop_remainder=d),
    "options": lambda n, b,
    d: pairs(n).with_options(tf.data.Options()).map(lambda i, x: x).batch(b, d).with_options(tf.data.Options()),
    "bucketing": lambda n, b,
    d: Dataset.range(n).map(lambda i: tf.fill([i % 7], i)).bucket_by_sequence_length(
        tf.size, [3, 5], [b, b, b], drop_remainder=d
    ),
    "generator": lambda n, b,
    d: Dataset.from_generator(lambda: iter(range(n)), output_signature=tf.TensorSpec([], tf.int32)).batch(b, d),
    "generator of batches": lambda n, b, d: Dataset.from_generator(
        lambda: (np.arange(k, min(k + b, n)) for k in range(0, n, b)),
        output_signature=tf.TensorSpec([None], tf.int64)
    ),
    "dictionaries": lambda n, b,
    d: pairs(n).map(lambda i, x: ({"a": x, "b": (i, x)}, i, 1.0)).batch(b, d),
}  # fmt: skip


@cache
def stream_of_tensorflow(name, drop_remainder):
    return numpy_batches(PIPELINES[name](37, 8, drop_remainder))


NUM_PROCESSES = [
    pytest.param(1, marks=pytest.mark.long),
    3,
    pytest.param(4, marks=pytest.mark.long),
]


@pytest.mark.parametrize("drop_remainder", long_but_last(True, False))
@pytest.mark.parametrize("num_processes", NUM_PROCESSES)
@pytest.mark.parametrize("name", PIPELINES)
def test_union_of_processes_is_the_stream_of_tensorflow(name, num_processes, drop_remainder):
    dataset = PIPELINES[name](37, 8, drop_remainder)
    assert_union_is(sources(dataset, num_processes), stream_of_tensorflow(name, drop_remainder))


# Each pair of values once; `pytest -m long` tries all three together.
REMAINDERS = [
    (batch, last, drop)
    if (batch // 2 + last // 2 + drop) % 2 == 0
    else pytest.param(batch, last, drop, marks=pytest.mark.long)
    for batch, last, drop in itertools.product((0, 2), (0, 2, 5), (False, True))
]


@pytest.mark.parametrize(
    "name", long_but_last("batch", "shuffle", "padded batch, value", "everything")
)
@pytest.mark.parametrize(("batch_remainder", "last_batch", "drop_remainder"), REMAINDERS)
@pytest.mark.parametrize("num_processes", NUM_PROCESSES)
def test_remainders(name, num_processes, batch_remainder, last_batch, drop_remainder):
    batch = 5 * num_processes + batch_remainder
    make = lambda: PIPELINES[name](6 * batch + last_batch, batch, drop_remainder)  # noqa: E731
    expected = numpy_batches(make())
    parts = sources(make(), num_processes)
    assert assert_union_is(parts, expected) == len(expected) == parts[0].num_batches
    assert parts[0].global_batch_size == batch


@pytest.mark.parametrize(
    "seed", [*range(12), *(pytest.param(n, marks=pytest.mark.long) for n in range(12, 50))]
)
def test_random_pipelines(seed):
    """Every pipeline that a random generator writes is split exactly, wherever the selection ends
    up.
    """
    generator = np.random.default_rng(seed)
    make, text = random_pipeline(generator)
    num_processes, ranks = int(generator.integers(2, 5)), int(generator.integers(1, 3))
    expected = numpy_batches(make())
    if not expected:
        return
    try:
        assert_union_is(sources(make(), num_processes, ranks), expected)
    except AssertionError as error:
        raise AssertionError(f"{text} on {num_processes} x {ranks} ranks") from error


def random_pipeline(generator):
    """Returns a function that makes a pipeline, and its text."""
    elementwise = [
        ".map(lambda i: i * 3 + 1)", ".map(lambda i: i - 7, num_parallel_calls=2)", ".prefetch(2)",
        ".cache()",
        ".map(lambda i: i // 2, num_parallel_calls=2)", ".shuffle({k}, seed={k})", ".take({n})",
        ".skip({k})", ".repeat(2)",
        ".shard(2, 1)", ".filter(lambda i: i % {k} != 0)", ".batch({k}).unbatch()",
        ".flat_map(lambda i: Dataset.range(i % 3))",
        ".interleave(lambda i: Dataset.range(i % 4), cycle_length=2, num_parallel_calls=2)",
        ".concatenate(Dataset.range({n}))",
        ".enumerate().map(lambda k, i: k + i)", ".scan(tf.constant(0, tf.int64), lambda s, i: (s "
                                                "+ i, s))", ".unique()",
        ".window({k}).flat_map(lambda w: w)",
    ]  # fmt: skip
    batched = [
        ".map(lambda i: i + 1)", ".map(lambda i: i - tf.reduce_max(i))", ".prefetch(1)", ".cache()",
        ".take({k})", ".skip(1)", ".repeat(2)",
        ".shuffle({k}, seed={k})", ".shard(2, 0)", ".filter(lambda i: i[0] % 2 == 0)",
        ".concatenate(Dataset.range({n}).batch({b}))",
        ".map(lambda i: tf.one_hot(i, 4))",
    ]  # fmt: skip
    values = {
        "k": int(generator.integers(2, 9)),
        "n": int(generator.integers(20, 60)),
        "b": int(generator.integers(8, 15)),
    }
    ops = [
        elementwise[i] for i in generator.integers(0, len(elementwise), generator.integers(1, 6))
    ]
    ops.append(f".batch({{b}}, drop_remainder={bool(generator.integers(2))})")
    after = [batched[i] for i in generator.integers(0, len(batched), generator.integers(0, 4))]
    one_hots = [op for op in after if "one_hot" in op]
    ops += [op for op in after if op not in one_hots] + one_hots[:1]
    text = "Dataset.range({n})" + "".join(ops)
    for name, value in values.items():
        text = text.replace(f"{{{name}}}", str(value))
    return (lambda: eval(text, {"Dataset": Dataset, "tf": tf})), text
