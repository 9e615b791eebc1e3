"""Rebuilds operations of a `tf.data` pipeline on other inputs, in a fixed order by fixed seeds.

And finds operations in its functions that keep state or draw random numbers.
"""

import re
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import tensorflow as tf

from tnt_jax.data.layout import RankSlice
from tnt_jax.data.tf import private
from tnt_jax.seeding import seed_or_default

Dataset = tf.data.Dataset
read = private.parameter
Function = Callable[[Any], Callable[..., Any]]

MAPS = ("_MapDataset", "_ParallelMapDataset")
BATCHES = ("_BatchDataset", "_ParallelBatchDataset", "_PaddedBatchDataset")
# Operations that choose, repeat or reorder elements by their position alone: they commute with any
# map.
INDEX_OPERATIONS = frozenset(
    """_TakeDataset _SkipDataset _RepeatDataset _ShardDataset _ShuffleDataset
    _AssertCardinalityDataset""".split()
)

# Operations with seeds of their own.
_ORDERS = ("_ShuffleDataset", "_RandomDataset")
# Operations that call their function for several elements at once.
PARALLEL = ("_ParallelMapDataset", "_ParallelInterleaveDataset")

# Operations that a method of a dataset makes, whose name `_method_of` returns, from the parameters
# of `private.PARAMETERS` in their order.
_BY_METHOD = """_TakeDataset _SkipDataset _RepeatDataset _ShardDataset _PrefetchDataset CacheDataset
    _MapDataset _ParallelMapDataset _FilterDataset _TakeWhileDataset _FlatMapDataset
    _InterleaveDataset _ParallelInterleaveDataset _ScanDataset _UniqueDataset _WindowDataset
    _BatchDataset _ParallelBatchDataset _PaddedBatchDataset""".split()
_INTEGERS = ("buffer_size", "cycle_length", "block_length", "num_parallel_calls")
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


def _by_method(operation: Any, inputs: list[Any], function: Function, *, calls: bool = True) -> Any:
    """Returns the operation on other inputs; without `calls` it works on one element at a time."""
    arguments: list[Any] = []
    order: dict[str, bool] = {}
    for name in private.PARAMETERS.get(type(operation).__name__, ()):
        if name == "deterministic" or (name == "num_parallel_calls" and not calls):
            continue
        value = read(operation, name)
        if name.endswith(("func", "predicate")):
            arguments.append(function(value))
        else:
            arguments.append(int(value) if name in _INTEGERS else value)
        if name == "num_parallel_calls":
            order = {"deterministic": True}
    return getattr(inputs[0], _method_of(operation))(*arguments, **order)


def _by_class(operation: Any, inputs: list[Any], _: Function) -> Any:
    # The methods unbatch() and rebatch() put a re-encoding before the operation, which is an
    # operation of its own here.
    names = private.PARAMETERS.get(type(operation).__name__, ())
    return private.made_like(operation, inputs[0], *(read(operation, name) for name in names))


_REPLAYS: dict[str, Callable[[Any, list[Any], Function], Any]] = {
    **dict.fromkeys(_BY_METHOD, _by_method),
    **dict.fromkeys(("_AssertCardinalityDataset", "_UnbatchDataset", "_RebatchDataset"), _by_class),
    "_ShuffleDataset": lambda op, ins, _: _shuffle_like(op, ins[0]),
    "_RandomDataset": lambda op, *_: _with_seed(
        op, lambda seed: Dataset.random(seed, rerandomize_each_iteration=read(op, "rerandomize"))
    ),
    "_OptionsDataset": lambda op, ins, _: ins[0].with_options(op.options()),
    "_GroupByWindowDataset": lambda op, ins, f: ins[0].group_by_window(
        f(read(op, "key_func")),
        f(read(op, "reduce_func")),
        window_size_func=f(read(op, "window_size_func")),
    ),
    "_RestructuredDataset": lambda op, ins, _: _with_element_spec(ins[0], op.element_spec),
    # Whether it logs is not kept; what is skipped in silence is worse than a line too many.
    "_IgnoreErrorsDataset": lambda op, ins, _: ins[0].ignore_errors(log_warning=True),
    "_ZipDataset": lambda op, ins, _: Dataset.zip(
        tf.nest.pack_sequence_as(read(op, "datasets"), ins)
    ),
    "_ConcatenateDataset": lambda op, ins, _: ins[0].concatenate(ins[1]),
}
# Operations that start their inputs, and draw the seeds of these, as soon as they are started. Of
# unknown ones that is not known.
STARTING_INPUTS = _REPLAYS.keys() - {"_RepeatDataset", "CacheDataset", "_ConcatenateDataset"}


class Repairs:
    """Rebuilds pipelines so that every process sees the same stream, with notes on all changes.

    With `one_by_one`, parallel operations whose functions keep state, random generators for
    instance, call them for one element at a time: in parallel the order of the draws is random.
    """

    def __init__(self, ranks: RankSlice, *, one_by_one: bool = False) -> None:
        self.notes: list[str] = []
        self.slowed: list[str] = []  # Operations that work on one element at a time.
        # Unknown operations after a shuffle without a seed, which differs by process.
        self.disordered: list[str] = []
        self._ranks, self._one_by_one = ranks, one_by_one
        self.repaired = cache(self._repaired)

    def _repaired(self, dataset: Any) -> Any:
        """Returns the dataset with seeds and a fixed order, itself if it needs nothing."""
        sources = private.inputs(dataset)
        inputs = [self.repaired(source) for source in sources]
        changed = any(new is not old for new, old in zip(inputs, sources, strict=True))
        if changed or self._needs_repair(dataset):
            return self.rebuild(dataset, inputs)
        return dataset

    def note_order(self, dataset: Any) -> None:
        """Notes an operation that asks for any order, which is not granted."""
        if private.asks_for_any_order(dataset):
            self.notes.append(
                f"{operation_name(dataset)} has deterministic=False; it runs in order, because "
                "every process must see one order."
            )

    def rebuild(self, dataset: Any, inputs: list[Any]) -> Any:
        """Returns the operation `dataset` on `inputs`, repaired; itself if of an unknown kind."""
        kind = type(dataset).__name__
        name = operation_name(dataset)
        if kind not in _REPLAYS:
            self.notes.append(
                f"{name} is not known, so what stands before it was left as it is: if that "
                "shuffles without a seed, processes see different orders. Give every shuffle a "
                "seed."
            )
            if any(map(is_unseeded_source_of_order, private.operations(dataset))):
                self.disordered.append(name)
            return dataset
        if self._writes_file_of_all(dataset):
            return self.cached(dataset, inputs[0], "-whole")
        self._note_repair(dataset)
        replay = partial(_by_method, calls=False) if self._must_slow(dataset) else _REPLAYS[kind]
        if _unseeded_kinds(dataset):
            with private.global_seed(seed_of_unseeded()):
                # The user's own function is traced anew, with seeds.
                return replay(dataset, inputs, private.user_function)
        return replay(dataset, inputs, private.traced_function)

    def _needs_repair(self, dataset: Any) -> bool:
        # A seeded order is rebuilt as well: the user's object may have been iterated before, which
        # advances it. And a parallel interleave does not show whether it was made with
        # deterministic=False.
        return (
            type(dataset).__name__ in (*_ORDERS, "_ParallelInterleaveDataset")
            or private.asks_for_any_order(dataset)
            or bool(_unseeded_kinds(dataset))
            or self._must_slow(dataset)
            or self._writes_file_of_all(dataset)
        )

    def cached(self, dataset: Any, rows: Any, part: str = "") -> Any:
        """Returns `rows` with a cache like `dataset`, whose file is for this part of all rows."""
        file = read(dataset, "filename").numpy().decode()
        ranks = self._ranks
        last = ranks.first_rank + ranks.local_ranks - 1
        # Processes cache different rows, other ones of other windows, and may share a file system.
        name = f"{file}.ranks-{ranks.first_rank}-to-{last}-of-{ranks.num_ranks}{part}"
        if ranks.num_groups > 1:
            name += f"-in-{ranks.num_groups}-groups"
        return rows.cache(name if file else "")

    def _writes_file_of_all(self, dataset: Any) -> bool:
        """Returns whether several processes would write the file in which a cache keeps rows."""
        several = self._ranks.local_ranks < self._ranks.num_ranks
        is_cache = type(dataset).__name__ == "CacheDataset"
        return several and is_cache and bool(read(dataset, "filename").numpy())

    def _must_slow(self, dataset: Any) -> bool:
        return self._one_by_one and bool(draws_in_parallel(dataset))

    def _note_repair(self, dataset: Any) -> None:
        name = operation_name(dataset)
        if type(dataset).__name__ in _ORDERS:
            self.notes.append(
                f"{name} has no seed, so every process uses {seed_of_unseeded()}."
                if is_unseeded_source_of_order(dataset)
                else f"{name} has the seed {int(read(dataset, 'seed2'))}."
            )
        self.note_order(dataset)
        if kinds := _unseeded_kinds(dataset):
            self.notes.append(
                f"{name} draws random numbers without a seed ({', '.join(kinds)}); every process "
                f"seeds them with {seed_of_unseeded()}."
            )
        if self._must_slow(dataset):
            self.slowed.append(
                f"{name} runs for one element at a time ({', '.join(draws_in_parallel(dataset))})"
            )


def draws_in_parallel(dataset: Any) -> list[str]:
    """Returns the kinds of stateful operation that run for several elements at once."""
    if type(dataset).__name__ not in PARALLEL:
        return []
    return _kinds(dataset, stateful_operations)


def _unseeded_kinds(dataset: Any) -> list[str]:
    """Returns the kinds of random operation without a seed which can be given one."""
    return _kinds(dataset, unseeded_operations) if type(dataset).__name__ in _REPLAYS else []


def _kinds(dataset: Any, found_in: Callable[[Any], list[str]]) -> list[str]:
    return sorted({kind for each in private.functions(dataset) for kind in found_in(each)})


def is_unseeded_source_of_order(dataset: Any) -> bool:
    """Returns whether a shuffle or random stream has no seed: each process would draw one."""
    return type(dataset).__name__ in _ORDERS and pair_of_seeds(dataset) == (0, 0)


def pair_of_seeds(operation: Any) -> tuple[int, int]:
    """Returns the seeds of a shuffle or random stream: the global one, and its own."""
    return int(read(operation, "seed")), int(read(operation, "seed2"))


def _with_seed(operation: Any, make: Callable[[int], Any]) -> Any:
    """Returns `make(seed)` with the pair of seeds of `operation`, or of `seed_of_unseeded()`."""
    pair = pair_of_seeds(operation)
    if pair == (0, 0):
        # Without a global seed, TensorFlow notes this constant.
        pair = (private.DEFAULT_GRAPH_SEED, seed_of_unseeded())
    with private.global_seed(pair[0]):
        return make(pair[1])


def _with_element_spec(dataset: Any, spec: Any) -> Any:
    variant = tf.data.experimental.to_variant(dataset)
    declared: Any = tf.data.experimental.from_variant(variant, spec)
    # The functions of a pipeline live as long as the Python objects of its operations.
    declared.tnt_source = dataset
    return declared


def _shuffle_like(operation: Any, dataset: Any) -> Any:
    size = read(operation, "buffer_size")
    again = bool(read(operation, "reshuffle_each_iteration"))
    return _with_seed(operation, partial(dataset.shuffle, size, reshuffle_each_iteration=again))


def with_fixed_order(stream: Any, dataset: Any) -> tuple[Any, list[str]]:
    """Returns `stream` with options of `dataset` in a fixed order, and a note if that differs."""
    options = dataset.options()
    note = (
        "The option deterministic=False is not followed, because every process must see one order."
    )
    fixed = tf.data.Options().merge(options)
    fixed.deterministic = True
    return stream.with_options(fixed), [note] if options.deterministic is False else []


def operation_name(dataset: Any) -> str:
    """Returns a short name such as `map(decode)` for the last operation of a dataset."""
    functions = private.functions(dataset)
    return _method_of(dataset) + (f"({name_of(functions[0])})" if functions else "")


def _method_of(dataset: Any) -> str:
    """Returns a name from the class of an operation, such as `map` from `_ParallelMapDataset`."""
    kind = type(dataset).__name__.strip("_").removesuffix("V2").removesuffix("Dataset")
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", kind).lower().removeprefix("parallel_")


def operation_names(dataset: Any) -> list[str]:
    """Returns the names of all operations of a pipeline, source first."""
    every = private.operations(dataset)
    return [operation_name(x) for x in every if type(x).__name__ != "_OptionsDataset"]


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
