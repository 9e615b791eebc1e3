"""Compares distributed `tf.data` pipelines, process by process in one Python process, with the
stream of TensorFlow itself.
"""

import jax
import numpy as np
import tensorflow as tf

from tnt_jax.data.layout import RankSlice
from tnt_jax.data.tf.tfdata import TfData, TfDataSource

Dataset = tf.data.Dataset


def pairs(count):
    """Elements `(i, [i, i, i])`."""
    return Dataset.range(count).map(lambda i: (i, tf.fill([3], tf.cast(i, tf.float32))))


def sources(dataset, num_processes, ranks_per_process=1, split="auto", **kwargs):
    num_ranks = num_processes * ranks_per_process
    rank_slices = [
        RankSlice(num_ranks, process * ranks_per_process, ranks_per_process)
        for process in range(num_processes)
    ]
    return [
        TfDataSource(TfData(dataset, split), rank_slice, **kwargs) for rank_slice in rank_slices
    ]


def assert_same(actual, expected):
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for one, other in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert one.dtype == other.dtype
        np.testing.assert_array_equal(one, other)


def assert_union_is(parts, expected, epoch=0, start_batch=0):
    """Checks that the processes' rows, in order and without padding, are the batches `expected`."""
    num_batches = 0
    for batch, whole in zip(
        zip(*(p.batches(epoch, start_batch) for p in parts), strict=True), expected, strict=True
    ):
        rows = len(jax.tree.leaves(whole)[0])
        assert {part.num_rows for part in batch} == {rows}
        assert len({part.mask is None for part in batch}) == 1
        micro = -(-rows // (ranks := parts[0]._rank_slice.num_ranks))
        assert sum(len(jax.tree.leaves(part.data)[0]) for part in batch) == micro * ranks
        real = [
            jax.tree.map(lambda x, m=part.mask: x if m is None else x[m > 0], part.data)
            for part in batch
        ]
        assert_same(jax.tree.map(lambda *x: np.concatenate(x), *real), whole)
        for part in batch:
            if part.mask is not None and not part.mask.all():
                padding = jax.tree.map(lambda x, m=part.mask: x[m == 0], part.data)
                assert_same(
                    padding,
                    jax.tree.map(lambda x, p=padding: np.repeat(x[-1:], _length(p), axis=0), whole),
                )
        num_batches += 1
    return num_batches


def _length(tree):
    return len(jax.tree.leaves(tree)[0])


def numpy_batches(dataset):
    return list(dataset.as_numpy_iterator())


def counted(calls, name):
    """Returns a function for `map` that counts its calls under `name`."""

    def count(i):
        def add(x):
            calls[name] = calls.get(name, 0) + 1
            return x

        return tf.numpy_function(add, [i], tf.int64)

    return count
