"""Reads from a `tf.data` pipeline how it is batched and how many examples it has, without running it."""

from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from tnt_jax.data import _tensorflow
from tnt_jax.data.tf_replay import BATCHES, MAPS

_TRANSPARENT = (
    *MAPS, "_OptionsDataset", "_PrefetchDataset", "CacheDataset", "_TakeDataset", "_SkipDataset", "_RepeatDataset", "_ShardDataset",
    "_ShuffleDataset", "_FilterDataset", "_TakeWhileDataset", "_ConcatenateDataset", "_ZipDataset", "_ScanDataset", "_IgnoreErrorsDataset",
    "_AssertCardinalityDataset",
)  # fmt: skip
_KEEPS_EVERY_EXAMPLE = (
    *MAPS,
    "_OptionsDataset",
    "_PrefetchDataset",
    "CacheDataset",
    "_ShuffleDataset",
    "_AssertCardinalityDataset",
)


@dataclass(frozen=True)
class Batching:
    """How the elements of a dataset are batched.

    Attributes:
        size: Rows of a full batch; None where batches differ or the pipeline does not tell.
        drop_remainder: Whether an incomplete last batch is dropped.
        num_examples: Rows of one pass; None when unknown or infinite.
    """

    size: int | None
    drop_remainder: bool = False
    num_examples: int | None = None


def batching_of(dataset: Any) -> Batching | None:
    """Returns how the dataset is batched, by its last batching operation, or None if its elements are single examples."""
    stage, keeps_all = dataset, True
    while type(stage).__name__ in _TRANSPARENT:
        keeps_all = keeps_all and type(stage).__name__ in _KEEPS_EVERY_EXAMPLE
        stage = stage._inputs()[0]
    if type(stage).__name__ in BATCHES:
        size, drop = int(stage._batch_size), bool(stage._drop_remainder)
        examples = int(stage._inputs()[0].cardinality()) if keeps_all else -1
        if drop and examples >= 0:
            examples = examples // size * size
        return Batching(size, drop, examples if examples >= 0 else None)
    if type(stage).__name__ == "_RebatchDataset":
        sizes = stage._batch_sizes.numpy().reshape(-1)
        return Batching(int(sizes[0]) if len(sizes) == 1 else None, bool(stage._drop_remainder))
    # An operation that says nothing about batches: a generator or bucketing that yields batches has an open leading dimension.
    specs = _tensorflow.flatten(dataset.element_spec)
    leading = [spec.shape[0] if spec.shape.rank else 0 for spec in specs if isinstance(spec, tf.TensorSpec)]
    return Batching(None) if specs and len(leading) == len(specs) and all(size is None for size in leading) else None


def check_tensors(dataset: Any) -> None:
    """Raises a `TypeError` that names the first component which cannot be placed on a device."""
    for number, spec in enumerate(_tensorflow.flatten(dataset.element_spec)):
        where = f"component {number}"
        if not isinstance(spec, tf.TensorSpec):
            raise TypeError(
                f"The dataset's elements must be dense tensors, but {where} is a {type(spec).__name__}. "
                "Add a map that makes it dense, for instance with to_tensor() or tf.sparse.to_dense()."
            )
        if spec.dtype == tf.string:
            raise TypeError(
                f"The dataset's elements must be numbers, but {where} is text (tf.string). Tokenize it or leave it out."
            )


def reshuffles(dataset: Any) -> bool:
    """Tells whether a shuffle or a stream of random numbers in the pipeline gives each pass numbers of its own."""
    kind = type(dataset).__name__
    own = (kind == "_ShuffleDataset" and bool(dataset._reshuffle_each_iteration)) or (
        kind == "_RandomDataset" and dataset._rerandomize
    )
    return bool(own) or any(reshuffles(source) for source in dataset._inputs())


def reshuffles_within_a_pass(dataset: Any) -> bool:
    """Tells whether a reshuffling shuffle stands before a repeat, so that one pass draws several orders."""
    own = type(dataset).__name__ == "_RepeatDataset" and reshuffles(dataset)
    return own or any(reshuffles_within_a_pass(source) for source in dataset._inputs())
