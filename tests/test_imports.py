"""What importing the package costs and touches, and that imports point down only."""

import ast
import subprocess
import sys
from pathlib import Path

import tnt_jax

PACKAGE = Path(tnt_jax.__file__).parent
# A room may import the rooms of lower or equal level; rooms that stand alone are checked by name.
LEVELS = {
    "__init__": 0, "_jax": 0, "hlo": 0, "host_memory": 0, "log": 0, "models": 0, "settings": 0, "seeding": 0, "launch": 0,
    "ring": 0, "ring_connection": 0, "host_call": 0,
    "runtime": 1, "all_reduce": 1,
    "link_probe": 2, "overlap": 2, "data": 2, "collectives": 2, "random_rows": 2, "backward_order": 2, "kept_inputs": 2,
    "adapters": 3,
    "state": 3, "reduction": 3, "accumulation": 3, "sharded_update": 3, "virtual_ranks": 3, "packed": 3, "device_program": 3,
    "step": 4, "execution": 4, "reproducible": 5, "loop": 6, "tuning": 7, "checkpoint": 7, "keras_compat": 8,
}  # fmt: skip


def imported_modules(file):
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0 or file.name == "__init__.pyi", f"{file}: relative import"
            base = node.module or ""
            yield base
            yield from (
                f"{base}.{alias.name}" for alias in node.names if base in ("tnt_jax", "tnt_jax.data", "tnt_jax.keras_compat")
            )


def rooms():
    for file in PACKAGE.rglob("*.py"):
        parts = file.relative_to(PACKAGE).with_suffix("").parts
        yield parts[0], file


def test_imports_point_down():
    wrong = []
    for room, file in rooms():
        assert room in LEVELS, f"{file} is in no room: give it a level."
        for module in imported_modules(file):
            parts = module.split(".")
            if (
                parts[0] == "tnt_jax"
                and len(parts) > 1
                and parts[1] in LEVELS
                and room in LEVELS
                and LEVELS[parts[1]] > LEVELS[room]
            ):
                wrong.append(f"{file.relative_to(PACKAGE)} imports {module}")
    assert not wrong


def test_launch_uses_the_standard_library_alone():
    allowed = sys.stdlib_module_names | {"tnt_jax"}
    for room, file in rooms():
        if room == "launch":
            for module in imported_modules(file):
                parts = module.split(".")
                assert parts[0] in allowed, f"{file} imports {module}"
                assert parts[0] != "tnt_jax" or len(parts) == 1 or parts[1] in ("launch", "settings", "__version__"), (
                    f"{file}: {module}"
                )


def test_models_use_flax_alone():
    for room, file in rooms():
        if room == "models" and file.name != "__init__.py":
            for module in imported_modules(file):
                inside = module.startswith("tnt_jax.models")
                assert inside or not module.startswith("tnt_jax"), f"{file} imports {module}"


def run(code):
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


def test_importing_is_cheap_and_touches_nothing():
    heavy = "('jax', 'flax', 'optax', 'numpy', 'tensorflow', 'tensorflow_datasets', 'keras', 'orbax', 'torch')"
    assert run(f"import sys, tnt_jax; print([m for m in {heavy} if m in sys.modules])") == "[]"


def test_using_the_facade_imports_no_optional_package_and_opens_no_device():
    code = """
import sys, os, tnt_jax as tnt
import flax.linen as nn
model = tnt.Model(nn.Dense(3))
model.compile("adam", loss="mse", metrics=["mae"])
from jax._src import xla_bridge
optional = ("tensorflow", "tensorflow_datasets", "keras", "orbax", "torch")
print([m for m in optional if m in sys.modules], xla_bridge.backends_are_initialized())
"""
    assert run(code) == "[] False"


def test_every_public_name_can_be_used():
    for name in tnt_jax.__all__:
        assert getattr(tnt_jax, name) is not None
