"""Turns the data passed to `fit`, `evaluate` or `predict` into a `Source`."""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from fractions import Fraction
from typing import Any, TypeVar

import jax

from tnt_jax.data.arguments import is_arrays, is_tf_dataset, takes_batch_size
from tnt_jax.data.elements import is_of_library
from tnt_jax.data.indexed.grain import rows_of_batched
from tnt_jax.data.indexed.pydataset import PyDatasetSource, is_py_dataset
from tnt_jax.data.indexed.random_access import RandomAccess, RandomAccessSource
from tnt_jax.data.layout import ReadOptions
from tnt_jax.data.ray.spec import RayData, is_ray_dataset, is_ray_iterator, is_ray_shard
from tnt_jax.data.recipes.token_batches import TokenBatches, TokenBatchSource
from tnt_jax.data.shards import ShardSource
from tnt_jax.data.sources import (
    DEFAULT_BATCH_SIZE,
    IterableSource,
    Source,
    array_source,
    given_batch_size,
    num_shards,
    stages_of,
    warn_once,
)
from tnt_jax.data.tables.rows import columns, is_hugging_face
from tnt_jax.data.tf.tfdata import TfData, tf_source

_Spec = TypeVar("_Spec", RandomAccess, RayData)


def as_source(x: Any, y: Any, sample_weight: Any, options: ReadOptions) -> Source:
    """Returns a source of global batches `(inputs, targets, weight)` of what `fit` was passed."""
    if x is None:
        raise ValueError("x is missing: pass arrays, a tf.data.Dataset, or an iterable of batches.")
    if options.reproducible and not options.distribute:
        warn_once(
            "With tnt_distribute_dataset=False each process brings its own shard, and training is "
            "reproducible only if the shards, put together, are the same global batches for every "
            "number of processes. Pass the whole dataset and leave the splitting to fit."
        )
    if is_arrays(x):
        return array_source(x, y, sample_weight, options)
    _check_arguments(x, y, sample_weight, options)
    if isinstance(x, Source):
        return x
    if _is_of_ray(x):
        return _ray_source(x, options)
    if isinstance(x, RandomAccess) or gives_examples(x):
        return _random_access_source(x, options)
    if options.distribute and (rows := rows_of_batched(x)) is not None:
        return _random_access_source(rows, options)
    if isinstance(x, TokenBatches):
        _check_distributed("Token batches", options)
        return TokenBatchSource(x, options.rank_slice)
    if is_py_dataset(x):
        return PyDatasetSource(x, options)
    if isinstance(x, TfData) or is_tf_dataset(x):
        return tf_source(x, options)
    if is_hugging_face(x, "IterableDataset"):
        raise TypeError(
            "A datasets.IterableDataset gives rows, not batches: pass "
            "tnt_jax.data.stream_columns(stream, batch_size, inputs=..., targets=...)."
        )
    if isinstance(x, Iterable) or is_of_library(x, "grain", "MapDataset"):
        return _iterable_source(x, options)
    raise TypeError(
        "x must be arrays, a tf.data.Dataset, an iterable of batches or a source, but is "
        f"{type(x).__module__}.{type(x).__name__}."
    )


def _check_arguments(x: Any, y: Any, sample_weight: Any, options: ReadOptions) -> None:
    """Refuses arguments for arrays if the data contains its own targets and batches."""
    for name, value in (("y", y), ("sample_weight", sample_weight)):
        if value is not None:
            raise ValueError(
                f"{name} was passed with a {type(x).__name__}, which must contain it: let each "
                "element be (inputs, targets) or (inputs, targets, sample_weight)."
            )
    if isinstance(x, RandomAccess) or _is_of_ray(x) or gives_examples(x):
        return
    if options.drop_remainder:
        raise ValueError(
            f"drop_remainder=True was passed with a {type(x).__name__}, which has its own "
            f"batches. Let the data itself leave its incomplete last batch out."
        )
    if options.batch_size is None:
        return
    way_out = ""
    if isinstance(x, TfData) or is_tf_dataset(x):
        way_out = f", and batch the dataset itself: dataset.batch({options.batch_size})"
    raise ValueError(
        f"batch_size={options.batch_size} was passed with a {type(x).__name__}, which is already "
        "batched. Leave it (and validation_batch_size for validation data of this kind) "
        f"unset{way_out}."
    )


def gives_examples(x: Any) -> bool:
    """Returns whether `x` gives examples by index, as TFDS, Grain and PyTorch datasets do."""
    if not (hasattr(x, "__len__") and hasattr(x, "__getitem__")):
        return False
    if isinstance(x, (list, tuple, Mapping, str)) or is_py_dataset(x) or is_tf_dataset(x):
        return False
    # The operations of a Grain dataset tell whether its elements are batches.
    makes_batches = (type(stage).__name__.endswith("BatchMapDataset") for stage in stages_of(x))
    return not (is_of_library(x, "grain", "MapDataset") and any(makes_batches))


def _check_distributed(what: str, options: ReadOptions) -> None:
    if not options.distribute:
        raise ValueError(
            f"{what} are split over all processes; tnt_distribute_dataset=False is for datasets "
            "that each process shards itself. Pass the same data on every process."
        )


def _random_access_source(x: Any, options: ReadOptions) -> Source:
    _check_distributed("Random-access datasets", options)
    if is_hugging_face(x, "Dataset"):
        x = columns(x)
    if not isinstance(x, RandomAccess):
        size = given_batch_size(options)
        x = RandomAccess(x, batch_size=size, shuffle=options.shuffle, seed=options.seed)
    x = _with_arguments(x, options)
    return RandomAccessSource(x, options.rank_slice, micro_batch_size=options.micro_batch_size)


def _with_arguments(x: _Spec, options: ReadOptions) -> _Spec:
    if options.batch_size is not None and x.batch_size not in (None, options.batch_size):
        raise ValueError(
            f"A batch size of {options.batch_size} was passed with a {type(x).__name__} that has "
            f"batch_size={x.batch_size}. Pass it once."
        )
    if options.batch_size is not None:
        x = replace(x, batch_size=options.batch_size)
    return replace(x, drop_remainder=True) if options.drop_remainder else x


def _is_of_ray(x: Any) -> bool:
    return isinstance(x, RayData) or is_ray_dataset(x) or is_ray_iterator(x)


def _ray_source(x: Any, options: ReadOptions) -> Source:
    # Training without Ray starts sooner without it.
    from tnt_jax.data.ray.source import RaySource, shard_source

    spec = _with_arguments(x if isinstance(x, RayData) else RayData(x), options)
    if spec.batch_size is None and options.micro_batch_size is None:
        raise ValueError(
            "The global batch size of a Ray dataset is unknown: pass batch_size, or "
            "tnt_micro_batch_size (rows of one rank)."
        )
    if is_ray_shard(spec.dataset) or not options.distribute:
        return shard_source(
            spec, options.rank_slice, jax.process_count(), micro_batch_size=options.micro_batch_size
        )
    return RaySource(spec, options.rank_slice, micro_batch_size=options.micro_batch_size)


def _iterable_source(x: Iterable[Any], options: ReadOptions) -> Source:
    if options.distribute and (count := num_shards(x)) > 1:
        raise ValueError(
            f"The {type(x).__name__} reads one of {count} shards (by its sampler), but fit splits "
            "every batch over the processes, which must all be given the same one. Leave the "
            "sharding out, or pass tnt_distribute_dataset=False."
        )
    source = IterableSource if options.distribute else ShardSource
    return source(x, rank_slice=options.rank_slice, micro_batch_size=options.micro_batch_size)


def with_larger_batches(x: Any, batch_size: int | None, factor: Fraction) -> tuple[Any, int | None]:
    """Returns data, and the batch size of a call, with `factor` times the rows in each batch.

    The data has no `tnt_micro_batch_size`. Batches of a `tf.data` pipeline are put together and cut
    anew at its end.
    """
    if batch_size is not None:
        return x, multiplied(batch_size, factor)
    if isinstance(x, RandomAccess | RayData) and x.batch_size is not None:
        return replace(x, batch_size=multiplied(x.batch_size, factor)), None
    if isinstance(x, TokenBatches):
        return replace(x, tokens_per_batch=multiplied(x.tokens_per_batch, factor)), None
    if isinstance(x, TfData):
        named = None if x.named is None else _rebatched(x.named, factor)
        return replace(x, dataset=_rebatched(x.dataset, factor), named=named), None
    if is_tf_dataset(x):
        return _rebatched(x, factor), None
    if takes_batch_size(x) or gives_examples(x):
        return x, multiplied(DEFAULT_BATCH_SIZE, factor)
    raise ValueError(
        f"The batches of a {type(x).__name__} are made by the script, so that tnt-jax scale --weak "
        "cannot make them larger. Measure with --strong, or pass arrays, a tf.data.Dataset or a "
        "RandomAccess."
    )


def multiplied(size: int, factor: Fraction) -> int:
    """Returns a batch size times a factor, which must be a whole number."""
    product = size * factor
    if product.denominator != 1:
        raise ValueError(
            f"With --weak a global batch of {size} becomes {factor} times as large, which is no "
            "whole number. Choose numbers of ranks that are multiples of the lowest."
        )
    return int(product)


def _rebatched(dataset: Any, factor: Fraction) -> Any:
    from tnt_jax.data.tf.inspection import batching_of

    batching = batching_of(dataset)
    if batching is None:
        return dataset  # It is refused as in training.
    if batching.size is None:
        raise ValueError(
            "The batches of the tf.data.Dataset differ in size, or do not tell it, so that tnt-jax "
            "scale --weak cannot make them larger. Measure with --strong."
        )
    size = multiplied(batching.size, factor)
    return dataset.rebatch(size, drop_remainder=batching.drop_remainder)
