import numpy as np
import pytest

from tnt_jax.parameter_server.partition import (
    FixedShardsPartitioner,
    MaxSizePartitioner,
    MinSizePartitioner,
    plan_shards,
)


@pytest.mark.parametrize(
    ("partitioner", "shape", "expected"),
    [
        # tf.distribute.experimental.partitioners, with the numbers of their documentation and of
        # TensorFlow 2.21 for float32.
        (FixedShardsPartitioner(2), (10, 3), 2),
        (FixedShardsPartitioner(7), (3,), 3),
        (FixedShardsPartitioner(7), (), 1),
        (MinSizePartitioner(min_shard_bytes=4, max_shards=2), (6, 1), 2),
        (MinSizePartitioner(min_shard_bytes=4, max_shards=100), (6, 1), 6),
        (MinSizePartitioner(min_shard_bytes=1000, max_shards=100), (6, 1), 1),
        (MaxSizePartitioner(max_shard_bytes=4), (6, 1), 6),
        (MaxSizePartitioner(max_shard_bytes=4, max_shards=2), (6, 1), 2),
        (MaxSizePartitioner(max_shard_bytes=1024), (6, 1), 1),
        (MaxSizePartitioner(max_shard_bytes=4), (2, 5), 2),  # A row is never divided.
        (MaxSizePartitioner(max_shard_bytes=4), (0, 5), 1),
    ],
)
def test_number_of_parts(partitioner, shape, expected):
    assert partitioner(shape, np.float32) == expected


def test_partitioners_choose_what_tensorflow_chooses():
    tf = pytest.importorskip("tensorflow")
    theirs = tf.distribute.experimental.partitioners
    pairs = [
        (FixedShardsPartitioner(3), theirs.FixedShardsPartitioner(3)),
        (MinSizePartitioner(64, 4), theirs.MinSizePartitioner(64, 4)),
        (MaxSizePartitioner(64), theirs.MaxSizePartitioner(64)),
        (MaxSizePartitioner(64, 2), theirs.MaxSizePartitioner(64, 2)),
    ]
    for shape in [(4,), (16,), (17, 2), (5, 40), (64, 3)]:
        for ours, their in pairs:
            assert ours(shape, np.float32) == their(tf.TensorShape(shape), tf.float32)[0], shape


@pytest.mark.parametrize("num_servers", [1, 2, 3, 5])
@pytest.mark.parametrize(
    "partitioner",
    [None, FixedShardsPartitioner(3), MaxSizePartitioner(24), MinSizePartitioner(8, 9)],
)
def test_arrays_come_back_from_their_parts(num_servers, partitioner):
    rng = np.random.default_rng(0)
    shapes = [(7, 3), (), (1,), (0, 2), (11,), (4, 2, 2)]
    arrays = [rng.normal(size=shape).astype(np.float32) for shape in shapes]
    plan = plan_shards(
        shapes, [x.dtype for x in arrays], num_servers=num_servers, partitioner=partitioner
    )
    pieces = [plan.packed(server, arrays) for server in range(num_servers)]
    for whole, array in zip(plan.unpacked(pieces), arrays, strict=True):
        np.testing.assert_array_equal(whole, array)
    assert sum(x.size for piece in pieces for x in piece) == sum(x.size for x in arrays)
    for server in range(num_servers):
        for index, array in enumerate(arrays):
            assert plan.part(server, index, array).shape == plan.shape_on(server, index)


def test_bytes_are_balanced():
    plan = plan_shards([(100,), (60,), (50,), (30,)], [np.float32] * 4, num_servers=2)
    assert [plan.held(0), plan.held(1)] == [[0, 3], [1, 2]]


def test_model_state_is_not_divided():
    plan = plan_shards(
        [(8,), (2,)],
        [np.float32] * 2,
        num_servers=2,
        partitioner=FixedShardsPartitioner(2),
        num_divided=1,
    )
    assert plan.is_divided(0)
    assert not plan.is_divided(1)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: FixedShardsPartitioner(0), "num_shards must be an integer of at least 1"),
        (lambda: MinSizePartitioner(max_shards=0), "max_shards must be an integer"),
        (lambda: MaxSizePartitioner(2.5), "max_shard_bytes must be an integer"),
        (
            lambda: plan_shards(
                [(2,)], [np.float32], num_servers=1, partitioner=lambda shape, dtype: [2]
            ),
            r"A partitioner returns the number of parts.*returned \[2\] for the shape \(2,\)",
        ),
    ],
)
def test_invalid_sizes_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()
