"""Private, experimental and version-dependent names of JAX stand in one room, each with the versions
that it was checked with.
"""

import ast
import gc
import re
from pathlib import Path

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

import tnt_jax
from tnt_jax import _jax

PACKAGE = Path(tnt_jax.__file__).parent
ROOM = PACKAGE / "_jax"
OTHERS = [file for file in sorted(PACKAGE.rglob("*.py")) if ROOM not in file.parents]
UNSTABLE = re.compile(r"jax\.(_[^_]\w*|extend|interpreters|experimental)\b|jaxlib\b")
# Private attributes of other libraries than JAX, and of named tuples.
FOREIGN = {
    "_replace", "_fields", "_asdict", "_exit", "_current_frames", "_ArgumentGroup",
    "_clear_losses", "_exclude_from_weight_decay", "_exclude_from_weight_decay_pattern",
    "_flatten_layers", "_fn", "_fn_kwargs", "_iterations", "_layers", "_learning_rate",
    "_model_variables_moving_average", "_moments", "_non_trainable_variables", "_obj_type",
    "_seed_generators", "_trainable_variables",
    # Of Ray.
    "_execution_idx", "_in_tune_session", "_private",
}  # fmt: skip


def names(node):
    """Yields the dotted names that a node of a file imports or reads."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        yield from (f"{node.module}.{alias.name}" for alias in node.names)
    elif isinstance(node, ast.Attribute):
        yield ast.unparse(node)


def own_private_names():
    """Returns the private names that the package itself gives to attributes, functions and values."""
    found = set()
    for file in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                found.add(node.name)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                found.add(node.id)
            elif isinstance(node, ast.Attribute) and ast.unparse(node.value) in ("self", "cls"):
                found.add(node.attr)
    return found


def test_no_other_file_uses_a_name_of_jax_that_may_change():
    assert len(OTHERS) > 100
    used = [
        (str(file.relative_to(PACKAGE)), name)
        for file in OTHERS
        for node in ast.walk(ast.parse(file.read_text()))
        for name in names(node)
        if UNSTABLE.match(name)
    ]
    assert used == []


def test_no_other_file_reads_a_private_attribute_of_unknown_origin():
    own = own_private_names() | FOREIGN
    wrong = [
        f"{file.relative_to(PACKAGE)}:{node.lineno}: {ast.unparse(node)}"
        for file in OTHERS
        if file != PACKAGE / "data" / "tf" / "private.py"
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Attribute)
        and node.attr.startswith("_")
        and not node.attr.endswith("__")
        and node.attr not in own
    ]
    assert wrong == []


def test_each_name_says_with_which_versions_it_was_checked():
    uses = 0
    for file in ROOM.glob("*.py"):
        lines = file.read_text().splitlines()
        for number, line in enumerate(lines):
            if re.match(r"\s*from (jax\._src|jax\.(extend|experimental|interpreters))\b", line):
                uses += 1
                before = " ".join(lines[max(0, number - 6) : number])
                assert re.search(r"Checked\b.* with JAX", before), f"{file.name}: {line.strip()}"
        assert "setattr" not in file.read_text()
    assert uses >= 10


def test_parts_of_an_array_that_was_put_together_are_found_without_marking_it():
    mesh = _jax.make_data_mesh(jax.devices()[:4])
    sharding = NamedSharding(mesh, PartitionSpec(_jax.DATA_AXIS))
    parts = [
        jax.device_put(np.full((2, 3), number), device)
        for number, device in enumerate(mesh.devices.flat)
    ]
    whole = _jax.from_local_parts(parts, (8, 3), sharding)
    assert _jax.local_parts(whole) is parts
    np.testing.assert_array_equal(whole, np.repeat(np.arange(4), 2)[:, None] * np.ones((1, 3)))
    assert [float(part.sum()) for part in _jax.local_parts(whole * 2)] == [0, 12, 24, 36]
    known = _jax.arrays._known_parts.get()
    before = len(known)
    del whole
    gc.collect()
    assert len(known) == before - 1
