"""What importing the package costs and touches, and that imports point down: between rooms, and
between the files of a room.
"""

import ast
import subprocess
import sys
import tomllib
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import tnt_jax

PACKAGE = Path(tnt_jax.__file__).parent
# The whole rule: the contracts that `lint-imports` checks.
CONTRACTS = tomllib.loads((PACKAGE.parent / "pyproject.toml").read_text())["tool"]["importlinter"][
    "contracts"
]
LAYERS = next(rule["layers"] for rule in CONTRACTS if rule["type"] == "layers")
MODULES = {
    ".".join(("tnt_jax", *file.relative_to(PACKAGE).with_suffix("").parts)): file
    for file in PACKAGE.rglob("*.py")
}

# The packages that import their public names on first use.
LAZY = [
    ".".join((PACKAGE.name, *file.parent.relative_to(PACKAGE).parts))
    for file in sorted(PACKAGE.rglob("__init__.pyi"))
]


def room(module):
    return module.split(".")[1]


@cache
def nodes(module):
    """Returns the syntax tree of a module, flat."""
    return [*ast.walk(ast.parse(MODULES[module].read_text()))]


@cache
def imports(module):
    """Returns the modules that a module imports, wherever in the file; of this package with the
    name of the file.
    """
    found = set()
    for node in nodes(module):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}: relative import"
            inner = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {
                name for name in inner if name in MODULES or f"{name}.__init__" in MODULES
            } or {str(node.module)}
    return {f"{name}.__init__" if f"{name}.__init__" in MODULES else name for name in found} - {
        "tnt_jax.__init__"
    }


@cache
def allowed(room):
    """Returns the rooms that a room may import: itself, and lower ones that no contract forbids."""
    rooms = [layer.split(" | ") for layer in LAYERS]
    level = next((number for number, layer in enumerate(rooms) if room in layer), None)
    assert level is not None, f"{room} is in no layer: add it to the contracts in pyproject.toml."
    forbidden = {
        name.removeprefix("tnt_jax.")
        for rule in CONTRACTS
        if rule["type"] == "forbidden" and f"tnt_jax.{room}" in rule["source_modules"]
        for name in rule["forbidden_modules"]
    }
    return {room}.union(*rooms[level + 1 :]) - forbidden


def test_imports_point_down_between_rooms():
    up = {
        f"{module} imports {name}"
        for module in set(MODULES) - {"tnt_jax.__init__"}
        for name in imports(module)
        if name.startswith("tnt_jax.") and room(name) not in allowed(room(module))
    }
    assert up == set()


def named_imports(module):
    """Yields how the names begin that a module passes to `import_module`, of this package."""
    for node in nodes(module):
        if isinstance(node, ast.Call) and node.args and "import_module" in ast.unparse(node.func):
            name = ast.unparse(node.args[0]).removeprefix("f").strip("'\"")
            if name.split(".")[0] == "tnt_jax":
                yield name


def test_imports_by_name_point_down_too():
    by_name = [(module, name) for module in MODULES for name in named_imports(module)]
    assert by_name
    # The package itself has the names of all rooms.
    assert [pair for pair in by_name if "." not in pair[1]] == []
    assert [(m, name) for m, name in by_name if room(name) not in allowed(room(m))] == []


def test_files_import_in_no_circle():
    # A package's face hands names on: its files do not ask it for them.
    files = {
        module: imports(module) & set(MODULES)
        for module in MODULES
        if not module.endswith("__init__")
    }
    try:
        TopologicalSorter(files).prepare()
    except CycleError as error:
        pytest.fail(f"circle of imports: {' -> '.join(error.args[1])}")


def children(folder):
    """Returns the files and folders in a folder, each with those of its siblings that it imports."""
    found = {}
    for module in MODULES:
        if not module.startswith(f"{folder}.") or module == f"{folder}.__init__":
            continue
        child = module.removeprefix(f"{folder}.").split(".")[0]
        inner = {n for n in imports(module) if n.startswith(f"{folder}.") and n in MODULES}
        found.setdefault(child, set()).update(
            {n.removeprefix(f"{folder}.").split(".")[0] for n in inner} - {child, "__init__"}
        )
    return found


def test_folders_are_small_and_few_levels_deep():
    folders = {module.rpartition(".")[0] for module in MODULES} - {"tnt_jax"}
    crowded = {f: sum(m.rpartition(".")[0] == f for m in MODULES) for f in folders}
    assert {folder: files for folder, files in crowded.items() if files > 12} == {}
    deep = {}
    for folder in folders:
        siblings, levels = children(folder), {}
        for child in TopologicalSorter(siblings).static_order():
            levels[child] = 1 + max((levels[x] for x in siblings[child]), default=0)
        deep[folder] = max(levels.values(), default=0)
    assert {folder: depth for folder, depth in deep.items() if depth > 8} == {}


def test_launching_uses_the_standard_library_alone():
    outside = {
        (module, name.split(".")[0])
        for module in MODULES
        if room(module) in ("launch", "cluster")
        for name in imports(module)
        if name.split(".")[0] not in {"tnt_jax", *sys.stdlib_module_names}
    }
    assert outside == {("tnt_jax.launch.scale.scaling", "matplotlib")}


def test_one_room_alone_imports_ray():
    # It does so by name, on first use, in `on_ray/worker.py`.
    assert [
        module for module in MODULES if "ray" in {n.split(".")[0] for n in imports(module)}
    ] == []


def run(code):
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


def test_importing_is_cheap_and_touches_nothing():
    heavy = "('jax', 'flax', 'optax', 'numpy', 'tensorflow', 'tensorflow_datasets', 'keras', 'orbax', 'torch', 'ray')"
    assert run(f"import sys, tnt_jax; print([m for m in {heavy} if m in sys.modules])") == "[]"


def test_using_the_facade_imports_what_it_needs_alone_and_opens_no_device():
    code = """
import sys, tnt_jax as tnt
tnt.Model, tnt.losses, tnt.callbacks
rare = ("reproducible.steps", "dispatch", "metrics.auc", "tensorboard", "tuning")
print([m for m in sys.modules if m == "flax" or m.startswith("tnt_jax") and m.endswith(rare)])
import flax.linen as nn
model = tnt.Model(nn.Dense(3))
model.compile("adam", loss="mse", metrics=["mae"])
from jax._src import xla_bridge
optional = ("tensorflow", "tensorflow_datasets", "keras", "orbax", "torch", "ray")
print([m for m in optional if m in sys.modules], xla_bridge.backends_are_initialized())
"""
    assert run(code) == "[]\n[] False"


def test_public_names_can_be_used_and_stay_what_the_stub_says():
    # A module below the package takes the place of a function with its name as soon as it is
    # imported.
    code = f"""
import ast, importlib, pathlib, pkgutil
import numpy as np, flax.linen as nn, tnt_jax as tnt
model = tnt.Model(nn.Dense(1))
model.compile("sgd", loss="mse")
model.fit(np.zeros((2, 3), "f4"), np.zeros((2, 1), "f4"), verbose=0)
for module in pkgutil.walk_packages(tnt.__path__, "tnt_jax."):
    if not module.name.endswith("__main__"):
        importlib.import_module(module.name)
wrong = []
for package in {LAZY}:
    here = importlib.import_module(package)
    named = set()
    stub = ast.parse(pathlib.Path(here.__file__).with_suffix(".pyi").read_text())
    for node in stub.body:
        for alias in getattr(node, "names", ()):
            home = importlib.import_module("." + (node.module or alias.name), package)
            expected = getattr(home, alias.name) if node.module else home
            named.add(alias.asname)
            if expected is None or getattr(here, alias.asname) is not expected:
                wrong.append((alias.asname, getattr(here, alias.asname)))
    wrong += set(here.__all__) - named
print(wrong)
"""
    assert len(LAZY) > 5
    assert run(code) == "[]"
