"""Every name of TensorFlow that is not public; the rest of the package uses `tf.data` through its documented interface and these.

Checked with TensorFlow 2.20 and 2.21.
"""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportMissingModuleSource=false
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import tensorflow as tf
from tensorflow.python.data.ops import dataset_ops
from tensorflow.python.data.util import nest, structure
from tensorflow.python.eager import context
from tensorflow.python.framework import op_def_registry, tensor_util
from tensorflow.python.ops import gen_dataset_ops

# First seed of an operation that was given one while no global seed was set.
DEFAULT_GRAPH_SEED = 87654321

flatten = nest.flatten
flatten_up_to = nest.flatten_up_to
is_nested = nest.is_nested
map_structure = nest.map_structure
pack_sequence_as = nest.pack_sequence_as
to_tensor_list = structure.to_tensor_list
from_tensor_list = structure.from_compatible_tensor_list
constant_value = tensor_util.constant_value


def is_stateful(operation: str) -> bool:
    """Tells whether TensorFlow marks a kind of operation as stateful."""
    definition = op_def_registry.get(operation)
    return definition is not None and definition.is_stateful


@contextmanager
def global_seed(seed: int) -> Iterator[None]:
    """Sets the global seed for what is traced inside; `tf.random.set_seed` would also restart the generators of the user's eager code."""
    eager = context.context()
    before = eager._seed
    eager._seed = seed
    try:
        yield
    finally:
        eager._seed = before


def shuffle_with_seeds(dataset: Any, *, buffer_size: Any, seeds: tuple[Any, Any], reshuffle_each_iteration: bool) -> Any:
    """Returns `dataset.shuffle` with the pair of seeds as it is; the method takes one seed and mixes it with the global one."""
    variant = gen_dataset_ops.shuffle_dataset_v3(
        dataset._variant_tensor,
        buffer_size=buffer_size,
        seed=tf.cast(seeds[0], tf.int64),
        seed2=tf.cast(seeds[1], tf.int64),
        seed_generator=gen_dataset_ops.dummy_seed_generator(),
        reshuffle_each_iteration=reshuffle_each_iteration,
        **dataset._flat_structure,
    )
    return _dataset_of(variant, dataset.element_spec, dataset)


def with_element_spec(dataset: Any, spec: Any) -> Any:
    """Returns `dataset` with its elements declared as `spec`."""
    return _dataset_of(dataset._variant_tensor, spec, dataset)


def _dataset_of(variant: Any, spec: Any, source: Any) -> Any:
    dataset = dataset_ops._VariantDataset(variant, spec)
    # The functions of a pipeline live as long as the Python objects of its operations.
    dataset._tnt_source = source
    return dataset
