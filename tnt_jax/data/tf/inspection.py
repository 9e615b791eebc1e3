"""Reads how a `tf.data` pipeline is batched, and its number of examples, without running it."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from tnt_jax.data.tf import private
from tnt_jax.data.tf.replay import (
    BATCHES,
    MAPS,
    STARTING_INPUTS,
    draws_in_parallel,
    function_nodes,
    is_unseeded_source_of_order,
    operation_name,
    pair_of_seeds,
    seed_of_unseeded,
    stateful_operations,
    unseeded_operations,
)
from tnt_jax.log import logger


def run_to_run_differences(stream: Any) -> list[str]:
    """Returns a clause for each operation that may differ between two runs, but for Python code."""
    operations = private.operations(stream)
    return list(dict.fromkeys(reason for each in operations for reason in _reasons(each)))


def draws_for_own_rows(dataset: Any) -> list[str]:
    """Returns a clause for each operation whose random numbers depend on which rows it runs for."""
    return [
        f"{operation_name(operation)} draws random numbers for the rows of a process alone "
        f"({', '.join(kinds)})"
        for operation in private.operations(dataset)
        for function in private.functions(operation)
        if (kinds := stateful_operations(function))
    ]


def _reasons(operation: Any) -> Iterator[str]:
    name = operation_name(operation)
    if private.asks_for_any_order(operation):
        yield f"{name} has deterministic=False"
    if is_unseeded_source_of_order(operation):
        yield f"{name} has no seed"
    if kinds := draws_in_parallel(operation):
        yield f"{name} draws random numbers in parallel ({', '.join(kinds)})"
    for function in private.functions(operation):
        if kinds := unseeded_operations(function):
            yield f"{name} draws random numbers without a seed ({', '.join(kinds)})"
        yield from (f"inside {name} a dataset {reason}" for reason in _inner_reasons(function))


def _inner_reasons(function: Any) -> Iterator[str]:
    """Yields what may differ in the datasets that a function of the pipeline creates."""
    starts = ("ParallelMap", "ParallelInterleave")
    parallel = [node for node in function_nodes(function) if node.op.startswith(starts)]
    if any(node.attr["deterministic"].s == b"false" for node in parallel):
        yield "has deterministic=False"
    if parallel and (kinds := stateful_operations(function)):
        yield f"draws random numbers in parallel ({', '.join(kinds)})"


read = private.parameter

_KEEPS_EVERY_EXAMPLE = frozenset(MAPS) | frozenset(
    """_OptionsDataset _PrefetchDataset CacheDataset _ShuffleDataset
    _AssertCardinalityDataset""".split()
)
_TRANSPARENT = _KEEPS_EVERY_EXAMPLE | frozenset(
    """_TakeDataset _SkipDataset _RepeatDataset _ShardDataset _FilterDataset _TakeWhileDataset
    _ConcatenateDataset _ZipDataset _ScanDataset _IgnoreErrorsDataset""".split()
)


class Batching(NamedTuple):
    """Rows of a full batch, if one tells, and of a pass, None when unknown or infinite."""

    size: int | None
    drop_remainder: bool = False
    num_examples: int | None = None


def batching_of(dataset: Any) -> Batching | None:
    """Returns how the last batching operation batches; None if elements are single examples."""
    try:
        return _batching_by_operations(dataset)
    except private.Unreadable as error:
        logger.warning(
            "How the dataset is batched is read off its shapes alone: this version of TensorFlow "
            "differs (%s).",
            error,
        )
        sizes = _leading_sizes(dataset)
        return Batching(None) if len(set(sizes)) == 1 and sizes[0] != 0 else None


def _batching_by_operations(dataset: Any) -> Batching | None:
    stage = dataset
    keeps_all = True
    while type(stage).__name__ in _TRANSPARENT:
        keeps_all = keeps_all and type(stage).__name__ in _KEEPS_EVERY_EXAMPLE
        stage = private.inputs(stage)[0]
    if type(stage).__name__ in BATCHES:
        size = int(read(stage, "batch_size"))
        drop = bool(read(stage, "drop_remainder"))
        examples = int(private.inputs(stage)[0].cardinality()) if keeps_all else -1
        if drop and examples >= 0:
            examples = examples // size * size
        return Batching(size, drop, examples if examples >= 0 else None)
    if type(stage).__name__ == "_RebatchDataset":
        sizes = read(stage, "batch_sizes").numpy().reshape(-1)
        size = int(sizes[0]) if len(sizes) == 1 else None
        return Batching(size, bool(read(stage, "drop_remainder")))
    sizes = set(_leading_sizes(dataset))
    if type(stage).__name__ == "_TensorDataset" and len(sizes) == 1 and (size := sizes.pop()):
        # from_tensors() makes one element of whole arrays.
        return Batching(size, num_examples=size if keeps_all else None)
    # An operation that says nothing about batches: a generator or bucketing that yields batches has
    # an open leading dimension.
    return Batching(None) if sizes == {None} else None


def _leading_sizes(dataset: Any) -> list[int | None]:
    """Returns the leading dimension of each component: None if unknown, 0 if there is none."""
    return [
        spec.shape[0] if isinstance(spec, tf.TensorSpec) and spec.shape.rank else 0
        for spec in tf.nest.flatten(dataset.element_spec)
    ]


def check_tensors(dataset: Any) -> None:
    """Raises a `TypeError` that names the first component which cannot be put on a device."""
    for number, spec in enumerate(tf.nest.flatten(dataset.element_spec)):
        where = f"component {number}"
        if not isinstance(spec, tf.TensorSpec):
            raise TypeError(
                f"The dataset's elements must be dense tensors, but {where} is a "
                f"{type(spec).__name__}. Add a map that makes it dense, for instance with "
                "to_tensor() or tf.sparse.to_dense()."
            )
        if spec.dtype == tf.string:
            raise TypeError(
                f"The dataset's elements must be numbers, but {where} is text (tf.string). "
                f"Tokenize it or leave it out."
            )


def empty_rows(dataset: Any) -> Any:
    """Returns arrays `[0, ...]` like the rows of a batched dataset; None if a size is open."""
    specs = tf.nest.flatten(dataset.element_spec)
    if not all(spec.shape[1:].is_fully_defined() for spec in specs):
        return None
    zeros = [np.zeros((0, *spec.shape[1:]), spec.dtype.as_numpy_dtype) for spec in specs]
    return tf.nest.pack_sequence_as(dataset.element_spec, zeros)


def reshuffles(dataset: Any) -> bool:
    """Returns whether a shuffle or a stream of random numbers gives each pass its own numbers."""
    flags = {"_ShuffleDataset": "reshuffle_each_iteration", "_RandomDataset": "rerandomize"}
    drawing = (x for x in private.operations(dataset) if type(x).__name__ in flags)
    return any(bool(read(x, flags[type(x).__name__])) for x in drawing)


def needs_whole_passes(dataset: Any) -> bool:
    """Returns whether later orders depend on how much of a pass is read, as before a repeat."""
    every = private.operations(dataset)
    return any(type(x).__name__ not in STARTING_INPUTS and reshuffles(x) for x in every)


def seeds_of_order(dataset: Any) -> list[int]:
    """Returns the known seeds of the shuffles of a pipeline, from its end on."""
    try:
        return _seeds_of_order(dataset)
    except private.Unreadable:
        return []


def _seeds_of_order(dataset: Any) -> list[int]:
    own = []
    if is_unseeded_source_of_order(dataset):
        own = [seed_of_unseeded()]
    elif type(dataset).__name__ == "_ShuffleDataset":
        own = [*pair_of_seeds(dataset)]
    return own + [seed for each in private.inputs(dataset) for seed in _seeds_of_order(each)]
