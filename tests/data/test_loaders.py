"""What loaders of PyTorch and Grain, and iterables of every shape, are taken for."""

from collections import UserDict, namedtuple

import jax
import ml_dtypes
import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs PyTorch")
grain = pytest.importorskip("grain")
tf = pytest.importorskip("tensorflow")

import keras  # noqa: E402

from tnt_jax.data import RandomAccess, TfData  # noqa: E402
from tnt_jax.data.dispatch import as_source  # noqa: E402
from tnt_jax.data.elements import as_batch, unpack  # noqa: E402
from tnt_jax.data.indexed.random_access import RandomAccessSource  # noqa: E402
from tnt_jax.data.layout import (  # noqa: E402
    RankSlice,
    ReadOptions,
)
from tnt_jax.data.sources import IterableSource  # noqa: E402

X = np.arange(24.0, dtype=np.float32).reshape(12, 2)
Pair = namedtuple("Pair", "x y")
tensor = torch.tensor


@pytest.mark.parametrize(
    ("element", "expected"),
    [
        ([tensor([1.0, 2.0]), tensor([3, 4])], (np.float32([1, 2]), np.array([3, 4]))),
        (tensor([1.0], requires_grad=True), np.float32([1])),
        (tensor([1.5], dtype=torch.bfloat16), np.array([1.5], ml_dtypes.bfloat16)),
        (
            [[tensor([1.0]), tensor([2.0])], tensor([3])],
            ([np.float32([1]), np.float32([2])], np.array([3])),
        ),
        (Pair(tensor([1]), tensor([2])), Pair(np.array([1]), np.array([2]))),
        (UserDict(a=tensor([1])), {"a": np.array([1])}),
        (([[1, 2], [3, 4]], [0, 1]), (np.array([[1, 2], [3, 4]]), np.array([0, 1]))),
        ([[1.0, 2.0], [3.0, 4.0]], np.array([[1.0, 2.0], [3.0, 4.0]])),
        ((X, None, X), (X, None, X)),
    ],
)
def test_an_element_becomes_arrays(element, expected):
    found = as_batch(element)
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert one.dtype == other.dtype
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize(
    ("element", "error", "message"),
    [
        (
            (X, ["cat", "dog"]),
            ValueError,
            r"component \[1\]\[0\] of the data is a str that gives an array of <U3. Turn text",
        ),
        (
            (X, np.array(["a", None], object)),
            ValueError,
            r"component \[1\] of the data is a ndarray that gives an array of object",
        ),
        (
            ({"ids": [[1, 2], [3]]}, X),
            ValueError,
            r"component \[0\]\['ids'\] of the data is a list whose rows differ.*Pad them",
        ),
        ("text", ValueError, "an element of the data is a str"),
    ],
)
def test_what_is_no_array_of_numbers_is_named(element, error, message):
    with pytest.raises(error, match=message):
        as_batch(element)


@pytest.mark.parametrize(
    ("data", "num_parts"),
    [
        ([X, X], 2),
        ([X, X, X], 3),
        ([(X, X), X], 2),
        ([(X, X), (X, X)], 1),
        ([1, 2], 1),
        (X, 1),
        ([X], 1),
        ([], 1),
    ],
)
def test_a_list_of_arrays_is_unpacked_as_a_tuple(data, num_parts):
    assert sum(part is not None for part in unpack(data)) == num_parts


def loader(dataset, **options):
    return torch.utils.data.DataLoader(dataset, batch_size=4, **options)


class Endless(torch.utils.data.IterableDataset):
    def __iter__(self):
        return (torch.ones(2) for _ in iter(int, 1))


def rows_of(batches):
    return np.concatenate(
        [b.data if b.mask is None else b.data[b.mask > 0] for b in batches]
    ).tolist()


@pytest.mark.parametrize(
    ("data", "kind", "num_batches"),
    [
        (loader(list(X[:11])), IterableSource, 3),
        (loader(Endless()), IterableSource, None),
        (grain.MapDataset.source(X).batch(4), RandomAccessSource, 3),
        (grain.MapDataset.source(X).batch(4).map(lambda x: x), IterableSource, 3),
        (grain.MapDataset.source(X).batch(4).repeat(), IterableSource, None),
        (grain.MapDataset.source(X).batch(4).to_iter_dataset(), IterableSource, None),
        (grain.MapDataset.source(X), RandomAccessSource, 1),
        (grain.MapDataset.source(X).map(lambda x: x + 1).shuffle(seed=1), RandomAccessSource, 1),
        (torch.utils.data.TensorDataset(tensor(X)), RandomAccessSource, 1),
    ],
)
def test_loaders_give_batches_and_datasets_examples(data, kind, num_batches):
    source = as_source(data, None, None, ReadOptions(RankSlice(2)))
    assert isinstance(source, kind)
    assert source.num_batches == num_batches


def test_a_grain_dataset_that_repeats_for_ever_needs_steps():
    assert as_source(
        grain.MapDataset.source(X).batch(4).repeat(), None, None, ReadOptions(RankSlice(2))
    ).is_infinite


def sampled(num_shards):
    sharding = grain.sharding.ShardOptions(shard_index=0, shard_count=num_shards)
    sampler = grain.samplers.IndexSampler(12, shard_options=sharding, num_epochs=1)
    return grain.DataLoader(data_source=X, sampler=sampler, operations=[grain.transforms.Batch(4)])


@pytest.mark.parametrize(
    "data",
    [
        loader(
            list(X), sampler=torch.utils.data.DistributedSampler(list(X), num_replicas=3, rank=0)
        ),
        sampled(3),
    ],
)
def test_a_shard_is_not_split_once_more(data):
    with pytest.raises(
        ValueError, match=r"DataLoader reads one of 3 shards.*tnt_distribute_dataset=False"
    ):
        as_source(data, None, None, ReadOptions(RankSlice(2)))
    own = as_source(data, None, None, ReadOptions(RankSlice(2, 0, 2), distribute=False))
    assert len(rows_of(own.batches(0))) == 4
    assert isinstance(as_source(sampled(1), None, None, ReadOptions(RankSlice(2))), IterableSource)


class Batches(keras.utils.PyDataset):
    def __len__(self):
        return 3

    def __getitem__(self, index):
        return X[4 * index : 4 * index + 4]


@pytest.mark.parametrize(
    ("data", "advice"),
    [
        (tf.data.Dataset.from_tensor_slices(X).batch(4), r"dataset.batch\(8\)"),
        (tf.data.Dataset.from_tensor_slices(X), r"dataset.batch\(8\)"),
        (TfData(tf.data.Dataset.from_tensor_slices(X).batch(4)), r"dataset.batch\(8\)"),
        (Batches(), "unset."),
        ((x for x in [X]), "unset."),
        ([(X, X)], "unset."),
        (loader(list(X)), "unset."),
        (grain.MapDataset.source(X).batch(4), "unset."),
        (IterableSource([X], rank_slice=RankSlice(2)), "unset."),
    ],
)
@pytest.mark.parametrize("distribute", [True, False])
def test_a_batch_size_beside_batches_is_refused(data, advice, distribute):
    with pytest.raises(ValueError, match=f"batch_size=8 was passed with a .*{advice}"):
        as_source(data, None, None, ReadOptions(RankSlice(2), batch_size=8, distribute=distribute))


def test_a_batch_size_is_given_once_beside_random_access():
    for data in (RandomAccess(X), RandomAccess(X, batch_size=8)):
        assert (
            as_source(data, None, None, ReadOptions(RankSlice(2), batch_size=8)).global_batch_size
            == 8
        )
    with pytest.raises(ValueError, match=r"8 was passed with a RandomAccess that has batch_size=4"):
        as_source(
            RandomAccess(X, batch_size=4), None, None, ReadOptions(RankSlice(2), batch_size=8)
        )


def test_an_empty_batch_is_named():
    source = as_source([(X, X), (X[:0], X[:0])], None, None, ReadOptions(RankSlice(2)))
    with pytest.raises(
        ValueError,
        match=r"at least one row, but one of \[0\] float32\[2\], \[1\] float32\[2\] has none",
    ):
        list(source.batches(0))
