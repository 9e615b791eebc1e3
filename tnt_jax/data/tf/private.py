"""All private names of TensorFlow that tnt_jax uses.

The rest of the package uses the documented interface of `tf.data` and these names.

Checked with TensorFlow 2.20 and 2.21. A name that another version lacks raises `Unreadable`; the
pipeline then runs as it is, and rows are selected after it. TensorFlow is imported by the first
call, not by importing this file.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

# The parameters of an operation, by its class: attributes whose names start with an underscore.
# There is no public access to them.
_PARAMETERS = {
    "_TakeDataset": "count",
    "_SkipDataset": "count",
    "_RepeatDataset": "count",
    "_ShardDataset": "num_shards index",
    "_ShuffleDataset": "buffer_size seed seed2 reshuffle_each_iteration",
    "_RandomDataset": "seed seed2 rerandomize",
    "_AssertCardinalityDataset": "expected_cardinality",
    "_PrefetchDataset": "buffer_size",
    "CacheDataset": "filename",
    "_MapDataset": "map_func",
    "_ParallelMapDataset": "map_func num_parallel_calls deterministic",
    "_FilterDataset": "predicate",
    "_TakeWhileDataset": "predicate",
    "_FlatMapDataset": "map_func",
    "_InterleaveDataset": "map_func cycle_length block_length",
    "_ParallelInterleaveDataset": "map_func cycle_length block_length num_parallel_calls",
    "_ScanDataset": "initial_state scan_func",
    "_GroupByWindowDataset": "key_func reduce_func window_size_func",
    "_RebatchDataset": "batch_sizes drop_remainder",
    "_WindowDataset": "size shift stride drop_remainder",
    "_BatchDataset": "batch_size drop_remainder",
    "_ParallelBatchDataset": "batch_size drop_remainder num_parallel_calls deterministic",
    "_PaddedBatchDataset": "batch_size padded_shapes padding_values drop_remainder",
    "_ZipDataset": "datasets",
    "TFRecordDatasetV2": "filenames",
}
PARAMETERS = {kind: tuple(names.split()) for kind, names in _PARAMETERS.items()}
# Functions, by their module. `tf.nest` leaves datasets, sparse and ragged tensors whole, which the
# functions of a pipeline take in parts.
FUNCTIONS = {
    "to_tensor_list": "data.util.structure",
    "from_compatible_tensor_list": "data.util.structure",
    "get": "framework.op_def_registry",
    "context": "eager.context",
}
# First seed of an operation that has a seed while no global seed is set.
DEFAULT_GRAPH_SEED = 87654321


class Unreadable(Exception):
    """The installed version of TensorFlow lacks a private name that this package reads."""


def _attribute(owner: Any, name: str) -> Any:
    try:
        return getattr(owner, name)
    except AttributeError as error:
        raise Unreadable(str(error)) from error


def function(name: str) -> Callable[..., Any]:
    """Returns a function of `FUNCTIONS`."""
    try:
        module = import_module(f"tensorflow.python.{FUNCTIONS[name]}")
    except ImportError as error:
        raise Unreadable(str(error)) from error
    return _attribute(module, name)


def inputs(dataset: Any) -> list[Any]:
    """Returns the datasets that the last operation of `dataset` reads; empty for a source."""
    return _attribute(dataset, "_inputs")()


def operations(dataset: Any) -> Iterator[Any]:
    """Yields all operations of a pipeline, each after those that it reads."""
    for source in inputs(dataset):
        yield from operations(source)
    yield dataset


def functions(dataset: Any) -> list[Any]:
    """Returns the wrappers of the functions that the last operation of `dataset` calls."""
    return _attribute(dataset, "_functions")()


def parameter(dataset: Any, name: str) -> Any:
    """Returns a parameter that `PARAMETERS` lists for the last operation of `dataset`."""
    assert name in PARAMETERS[type(dataset).__name__]
    return _attribute(dataset, f"_{name}")


def is_parallel(dataset: Any) -> bool:
    """Returns whether the last operation of `dataset` has a parameter `num_parallel_calls`."""
    return "num_parallel_calls" in PARAMETERS.get(type(dataset).__name__, ())


def asks_for_any_order(dataset: Any) -> bool:
    """Returns whether the last operation has `deterministic=False`; an interleave does not tell."""
    kind = type(dataset).__name__
    if "deterministic" in PARAMETERS.get(kind, ()):
        return parameter(dataset, "deterministic") == "false"
    return getattr(dataset, "_deterministic", "") == "false"


def made_like(dataset: Any, *args: Any) -> Any:
    """Returns an operation of the private class of `dataset` with other arguments."""
    try:
        return type(dataset)(*args)
    except TypeError as error:
        raise Unreadable(str(error)) from error


def graph_of(wrapper: Any) -> Any:
    """Returns the `tf.Graph` that a function of a pipeline was traced to."""
    return _attribute(_attribute(wrapper, "function"), "graph")


def user_function(wrapper: Any) -> Callable[..., Any]:
    """Returns the user's own function, as it was before tracing."""
    return _attribute(wrapper, "_func")


def traced_function(wrapper: Any) -> Callable[..., Any]:
    """Returns a traced function without the user's Python code, of the element's components."""
    traced = _attribute(wrapper, "function")
    source = _attribute(wrapper, "_input_structure")
    result = _attribute(wrapper, "output_structure")
    to_tensors, from_tensors = function("to_tensor_list"), function("from_compatible_tensor_list")

    def call(*arguments: Any) -> Any:
        is_single = len(arguments) == 1 and type(source) is not tuple
        flat = to_tensors(source, arguments[0] if is_single else arguments)
        return from_tensors(result, traced(*flat))

    return call


def is_stateful(operation: str) -> bool:
    """Returns whether TensorFlow marks a kind of operation as stateful."""
    definition = function("get")(operation)
    return definition is not None and definition.is_stateful


@contextmanager
def global_seed(seed: int) -> Iterator[None]:
    """Sets the global seed for what is traced inside the block.

    `tf.random.set_seed` would also restart the generators of the user's eager code.
    """
    eager = function("context")()
    before = _attribute(eager, "_seed")
    eager._seed = seed
    try:
        yield
    finally:
        eager._seed = before
