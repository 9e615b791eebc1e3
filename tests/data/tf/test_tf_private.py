"""A version of TensorFlow that lacks a private name that the package reads: rows are selected after
the pipeline, and the log says so.
"""

import ast
from pathlib import Path

import numpy as np
import pytest

tf = pytest.importorskip("tensorflow", reason="needs TensorFlow")

from tfdata_checks import Dataset, assert_union_is, numpy_batches, sources  # noqa: E402

import tnt_jax as tnt  # noqa: E402
from tnt_jax.data.tf import private, records  # noqa: E402
from tnt_jax.data.tf import tfdata as tfdata_module  # noqa: E402

MISSING = "this version of TensorFlow"
NUMBERS = Dataset.range(24)
SHUFFLED = NUMBERS.shuffle(5, 3, reshuffle_each_iteration=False)


def two(i):
    return Dataset.range(i, i + 2)


def all_rows(rows):
    return tf.constant(True)


OPERATIONS = {
    "_TakeDataset": lambda: NUMBERS.take(20).batch(8),
    "_SkipDataset": lambda: NUMBERS.skip(4).batch(8),
    "_RepeatDataset": lambda: NUMBERS.repeat(2).batch(8),
    "_ShardDataset": lambda: NUMBERS.shard(2, 1).batch(8),
    "_ShuffleDataset": lambda: NUMBERS.shuffle(5, 3, reshuffle_each_iteration=False).batch(8),
    "_RandomDataset": lambda: Dataset.random(3, rerandomize_each_iteration=False).take(20).batch(8),
    "_AssertCardinalityDataset": lambda: NUMBERS.apply(
        tf.data.experimental.assert_cardinality(24)
    ).batch(8),
    "_PrefetchDataset": lambda: NUMBERS.prefetch(2).batch(8),
    "CacheDataset": lambda: NUMBERS.cache().batch(8),
    "_MapDataset": lambda: NUMBERS.map(abs).batch(8),
    "_ParallelMapDataset": lambda: NUMBERS.map(abs, 2, deterministic=True).batch(8),
    "_FilterDataset": lambda: SHUFFLED.filter(lambda i: i != 3).batch(8).filter(all_rows),
    "_TakeWhileDataset": lambda: SHUFFLED.take_while(lambda i: i < 20).batch(8).filter(all_rows),
    "_FlatMapDataset": lambda: SHUFFLED.flat_map(two).batch(8),
    "_InterleaveDataset": lambda: SHUFFLED.interleave(two, 2, 1).batch(8),
    "_ParallelInterleaveDataset": lambda: NUMBERS.interleave(
        two, 2, 1, num_parallel_calls=2, deterministic=True
    ).batch(8),
    "_ScanDataset": lambda: SHUFFLED.scan(tf.constant(0, tf.int64), lambda s, i: (s + i, s)).batch(
        8
    ),
    "_GroupByWindowDataset": lambda: SHUFFLED.group_by_window(
        lambda i: i % 2, lambda _, rows: rows.batch(8), 8
    ),
    "_RebatchDataset": lambda: SHUFFLED.batch(4).rebatch(8),
    "_WindowDataset": lambda: SHUFFLED.window(4).flat_map(lambda w: w).batch(8),
    "_BatchDataset": lambda: NUMBERS.batch(8),
    "_ParallelBatchDataset": lambda: SHUFFLED.batch(
        8, num_parallel_calls=2, deterministic=True
    ).filter(all_rows),
    "_PaddedBatchDataset": lambda: SHUFFLED.padded_batch(8, []).filter(all_rows),
    "_ZipDataset": lambda: Dataset.zip((NUMBERS, SHUFFLED)).batch(8),
}


@pytest.fixture(autouse=True)
def no_global_seed():
    """Forgets the seed that a test of another file may have given to TensorFlow."""
    tf.random.set_seed(None)


# Attributes of operations and functions that every pipeline needs, and of the eager context.
NAMES = ["_inputs", "_functions", "_func", "_input_structure", "_seed", "function", "graph"]
NAMES += ["output_structure"]


def find(dataset, kind):
    """Returns the operation of a class in a pipeline, or None."""
    if type(dataset).__name__ == kind:
        return dataset
    return next(filter(None, (find(source, kind) for source in dataset._inputs())), None)


def take_away(monkeypatch, name, kind=None):
    """Hides an attribute from the package, of objects of one class or of all, but not from
    TensorFlow, which reads it too.
    """

    def read(owner, wanted, *default):
        if wanted == name and kind in (None, type(owner).__name__):
            raise AttributeError(f"{type(owner).__name__!r} has no attribute {name!r}")
        return getattr(owner, wanted, *default)

    monkeypatch.setattr(private, "getattr", read, raising=False)


def assert_rows_are_selected_after(dataset, caplog):
    """Checks the stream of two processes and the warning."""
    expected = numpy_batches(dataset)
    tnt.shutdown()
    with caplog.at_level("WARNING", logger="tnt_jax"):
        parts = sources(dataset, 2)
    assert "Every process runs the whole pipeline, because " + MISSING in caplog.text
    assert parts[0].distribution.before == ("the whole pipeline",)
    assert_union_is(parts, expected)


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        (kind, name)
        for kind, names in private.PARAMETERS.items()
        for name in names
        if kind != "TFRecordDatasetV2"
    ],
)
def test_an_operation_without_a_parameter_is_left_where_it_is(kind, name, caplog, monkeypatch):
    assert find(OPERATIONS[kind](), kind) is not None
    take_away(monkeypatch, f"_{name}", kind)
    assert_rows_are_selected_after(OPERATIONS[kind](), caplog)


def everything():
    """Returns a pipeline for which all functions of `private.py` are called."""
    pairs = Dataset.zip((NUMBERS.map(abs), NUMBERS)).shuffle(5, 3, reshuffle_each_iteration=False)
    seeded = pairs.map(
        lambda i, j: (i, tf.random.stateless_uniform([], [3, 4]) + tf.cast(j, tf.float32))
    )
    return seeded.batch(8)


@pytest.mark.parametrize(
    "name",
    [*NAMES, *private.FUNCTIONS],
)
def test_a_tensorflow_without_a_name_that_all_pipelines_need(name, caplog, monkeypatch):
    take_away(monkeypatch, name)
    assert_rows_are_selected_after(everything(), caplog)


def test_a_module_that_has_gone_is_like_a_name_that_has_gone(caplog, monkeypatch):
    monkeypatch.setitem(private.FUNCTIONS, "to_tensor_list", "data.elsewhere")
    assert_rows_are_selected_after(everything(), caplog)


def test_a_class_that_takes_other_arguments_is_like_a_name_that_has_gone(caplog, monkeypatch):
    dataset = SHUFFLED.batch(4).unbatch().batch(8)
    expected = numpy_batches(dataset)
    monkeypatch.setattr(type(find(dataset, "_UnbatchDataset")), "__init__", lambda self: None)
    tnt.shutdown()
    with caplog.at_level("WARNING", logger="tnt_jax"):
        parts = sources(dataset, 2)
    assert "because " + MISSING in caplog.text
    assert_union_is(parts, expected)


def test_files_of_records_that_cannot_be_compared_are_said_to_be(caplog, monkeypatch, tmp_path):
    with tf.io.TFRecordWriter(str(tmp_path / "some.tfrecord")) as file:
        file.write(b"1")
    dataset = tf.data.TFRecordDataset([str(tmp_path / "some.tfrecord")]).ignore_errors()
    assert records.files_of(dataset) == [str(tmp_path / "some.tfrecord")]
    take_away(monkeypatch, "_filenames")
    monkeypatch.setattr(records.jax, "process_count", lambda: 2)
    with caplog.at_level("WARNING", logger="tnt_jax"):
        assert records.sizes_if_skipped(dataset) is None
    assert "is not checked: " + MISSING in caplog.text


def test_errors_of_the_users_code_are_not_taken_for_another_tensorflow():
    calls = []

    def once(i):
        calls.append(i)
        return abs(i) if len(calls) == 1 else i.no_such_attribute

    # A random operation without a seed is traced again, with one.
    dataset = NUMBERS.map(lambda i: once(i) + tf.random.uniform([], 0, 2, tf.int64)).batch(8)
    with pytest.raises(AttributeError, match="no_such_attribute"):
        sources(dataset, 2)


def test_a_map_that_takes_whole_batches_alone_runs_for_all_rows():
    def as_traced(rows):
        return rows + np.arange(8)[: int(rows.shape[0])] * (0 if rows.shape[0] == 8 else None)

    make = lambda: NUMBERS.batch(8, drop_remainder=True).map(as_traced)  # noqa: E731
    parts = sources(make(), 2, split="auto")
    assert_union_is(parts, numpy_batches(make()))
    with pytest.raises(ValueError, match=r"impossible: map\(as_traced\) takes whole batches alone"):
        sources(make(), 2, split="before")


def test_private_names_of_tensorflow_are_read_in_one_file():
    package = Path(tfdata_module.__file__).parents[2]
    python_files = [
        file
        for file in package.rglob("*.py")
        if file.parent.name == "tf" or "import tensorflow" in file.read_text()
    ]
    wrong = [
        f"{file.relative_to(package)}:{node.lineno}: {ast.unparse(node)}"
        for file in python_files
        if file.name != "private.py"
        for node in ast.walk(ast.parse(file.read_text()))
        if _is_private(node)
    ]
    assert len(python_files) > 8
    assert wrong == []


def _is_private(node):
    """Tells whether a node of a file reads an attribute of another object by a private name."""
    if isinstance(node, ast.Attribute):
        owner = node.value.id if isinstance(node.value, ast.Name) else ""
        return _is_private_name(node.attr) and owner not in ("self", "cls")
    if isinstance(node, ast.ImportFrom):
        return str(node.module).startswith("tensorflow.python")
    if isinstance(node, ast.Import):
        return any(alias.name.startswith("tensorflow.python") for alias in node.names)
    is_text = isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    if is_text and node.func.id in ("getattr", "hasattr", "setattr"):
        name = node.args[1]
        return isinstance(name, ast.Constant) and _is_private_name(str(name.value))
    return False


def _is_private_name(name):
    return name.startswith("_") and not name.endswith("__")
