"""Finds operations in a `tf.data` pipeline's functions that keep state or draw random numbers."""

from typing import Any

from tnt_jax.data.tf import private
from tnt_jax.seeding import seed_or_default

# Tarantella's choice.
_DEFAULT_SEED = 42

# Operations that TensorFlow marks as stateful, although running them for other elements, or more or
# less often, changes nothing.
_HARMLESS = frozenset(
    """DummySeedGenerator Assert Print PrintV2 NoOp ReadVariableOp VarHandleOp ResourceGather
    If While Case StatefulPartitionedCall PartitionedCall HashTableV2 MutableHashTableV2
    LookupTableFindV2 LookupTableSizeV2 LookupTableExportV2 AnonymousHashTable""".split()
)
# Datasets made inside a function are marked as stateful because they are resources; only these draw
# random numbers.
_RANDOM_DATASETS = frozenset(
    ["ShuffleDataset", "ShuffleDatasetV2", "ShuffleDatasetV3", "RandomDataset", "RandomDatasetV2"]
)
# Python code, of which nothing is known; with stateful=False (PyFuncStateless) the user states that
# it keeps no state.
_PYTHON = frozenset(["PyFunc", "EagerPyFunc"])


def function_nodes(wrapper: Any) -> list[Any]:
    """Returns the nodes of a dataset's traced function and of the functions that it calls."""
    graph = private.graph_of(wrapper).as_graph_def()
    called = (node for function in graph.library.function for node in function.node_def)
    return [*graph.node, *called]


def stateful_operations(wrapper: Any) -> list[str]:
    """Returns the kinds of operation in a function whose results depend on earlier calls."""
    return sorted({node.op for node in function_nodes(wrapper) if _keeps_state(node)})


def calls_python(wrapper: Any) -> bool:
    """Returns whether a function calls Python code that may keep state."""
    return any(node.op in _PYTHON for node in function_nodes(wrapper))


def unseeded_operations(wrapper: Any) -> list[str]:
    """Returns the kinds of random operation in a function that each process seeds differently."""
    nodes = function_nodes(wrapper)
    constants = {node.name: node for node in nodes if node.op == "Const"}
    return sorted({node.op for node in nodes if _is_unseeded(node, constants)})


def seed_of_unseeded() -> int:
    """Returns the seed of all that the user left unseeded: that of `set_seed`, or 42."""
    # TensorFlow treats a pair of zeros as no seed.
    return seed_or_default(None, default=_DEFAULT_SEED) or _DEFAULT_SEED


def name_of(wrapper: Any) -> str:
    """Returns the name of the user's function."""
    function = private.user_function(wrapper)
    name = getattr(function, "__name__", type(function).__name__)
    return "lambda" if name == "<lambda>" else name


def _keeps_state(node: Any) -> bool:
    is_dataset = node.op.endswith(("Dataset", "DatasetV2", "DatasetV3", "DatasetV4"))
    if node.op in _HARMLESS or (is_dataset and node.op not in _RANDOM_DATASETS):
        return False
    return node.op in _PYTHON or private.is_stateful(node.op)


def _is_unseeded(node: Any, constants: dict[str, Any]) -> bool:
    if node.op in _RANDOM_DATASETS:
        seeds = [constants.get(name.split(":")[0]) for name in node.input[-4:]]
        values = [c.attr["value"].tensor for c in seeds if c is not None and "seed" in c.name]
        return bool(values) and all(not any(value.int64_val) for value in values)
    return all(name in node.attr and node.attr[name].i == 0 for name in ("seed", "seed2"))
