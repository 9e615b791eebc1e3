"""Finds what may differ between runs in a `tf.data` pipeline, despite `replay.py`."""

from collections.abc import Iterator
from typing import Any

from tnt_jax.data.tf import private as _tensorflow
from tnt_jax.data.tf.functions import function_nodes, stateful_operations, unseeded_operations
from tnt_jax.data.tf.replay import draws_in_parallel, is_unseeded_source_of_order, operation_name


def run_to_run_differences(stream: Any) -> list[str]:
    """Returns a clause for each operation that may differ between two runs.

    Its elements or their order may differ. Python functions, files and generators are not checked.
    """
    return list(
        dict.fromkeys(reason for operation in _operations(stream) for reason in _reasons(operation))
    )


def draws_for_own_rows(dataset: Any) -> list[str]:
    """Returns a clause for each operation whose random numbers depend on which rows it runs for."""
    return [
        f"{operation_name(operation)} draws random numbers for the rows of a process alone "
        f"({', '.join(kinds)})"
        for operation in _operations(dataset)
        for function in _tensorflow.functions(operation)
        if (kinds := stateful_operations(function))
    ]


def _operations(dataset: Any) -> Iterator[Any]:
    for source in _tensorflow.inputs(dataset):
        yield from _operations(source)
    yield dataset


def _reasons(operation: Any) -> Iterator[str]:
    name = operation_name(operation)
    if _tensorflow.asks_for_any_order(operation):
        yield f"{name} has deterministic=False"
    if is_unseeded_source_of_order(operation):
        yield f"{name} has no seed"
    if kinds := draws_in_parallel(operation):
        yield f"{name} draws random numbers in parallel ({', '.join(kinds)})"
    for function in _tensorflow.functions(operation):
        if kinds := unseeded_operations(function):
            yield f"{name} draws random numbers without a seed ({', '.join(kinds)})"
        yield from (f"inside {name} a dataset {reason}" for reason in _inner_reasons(function))


def _inner_reasons(function: Any) -> Iterator[str]:
    """Yields what may differ in the datasets that a function of the pipeline creates."""
    parallel = [
        node
        for node in function_nodes(function)
        if node.op.startswith(("ParallelMap", "ParallelInterleave"))
    ]
    if any(node.attr["deterministic"].s == b"false" for node in parallel):
        yield "has deterministic=False"
    if parallel and (kinds := stateful_operations(function)):
        yield f"draws random numbers in parallel ({', '.join(kinds)})"
