"""Every name of TensorFlow that is not public; the rest of the package uses `tf.data` through its documented interface and these.

Checked with TensorFlow 2.20 and 2.21.
"""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportMissingModuleSource=false
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from tensorflow.python.data.ops import dataset_ops
from tensorflow.python.data.util import nest, structure
from tensorflow.python.eager import context
from tensorflow.python.framework import op_def_registry, tensor_util

# First seed of an operation that was given one while no global seed was set.
DEFAULT_GRAPH_SEED = 87654321

flatten: Callable[..., Any] = nest.flatten
flatten_up_to: Callable[..., Any] = nest.flatten_up_to
is_nested: Callable[..., Any] = nest.is_nested
map_structure: Callable[..., Any] = nest.map_structure
pack_sequence_as: Callable[..., Any] = nest.pack_sequence_as
to_tensor_list: Callable[..., Any] = structure.to_tensor_list
from_tensor_list: Callable[..., Any] = structure.from_compatible_tensor_list
constant_value: Callable[..., Any] = tensor_util.constant_value


def is_stateful(operation: str) -> bool:
    """Tells whether TensorFlow marks a kind of operation as stateful."""
    definition = op_def_registry.get(operation)
    return definition is not None and definition.is_stateful


@contextmanager
def global_seed(seed: int) -> Iterator[None]:
    """Sets the global seed for what is traced inside; `tf.random.set_seed` would also restart the generators of the user's eager code."""
    eager: Any = context.context()
    before = eager._seed
    eager._seed = seed
    try:
        yield
    finally:
        eager._seed = before


def with_element_spec(dataset: Any, spec: Any) -> Any:
    """Returns `dataset` with its elements declared as `spec`."""
    declared = dataset_ops._VariantDataset(dataset._variant_tensor, spec)
    # The functions of a pipeline live as long as the Python objects of its operations.
    declared._tnt_source = dataset
    return declared
