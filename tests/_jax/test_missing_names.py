"""Training goes on where a version of JAX lacks a private name: plain JAX is used, with a warning."""

import ast
import functools
import importlib.util
import json
import logging
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src import compilation_cache
from jax.sharding import NamedSharding, PartitionSpec
from missing_names import Drops, Plain, missing, train
from processes import SCRIPTS, launch

import tnt_jax as tnt
from tnt_jax import _jax
from tnt_jax._jax import arrays, compiling, fallbacks, kept_programs, programs

FOLDER = Path(_jax.__file__).parent
PRIVATE = ("jax._src", "jax.extend", "jax.interpreters", "jax.experimental", "jaxlib")
# Read by `getattr`, as JAX 0.10 has it and 0.12 does not.
OPTIONAL = {"jax._src.cache_key.IgnoreCallbacks"}
# Used by elastic jobs alone once a process is lost; without it the job ends then, and is restarted.
ELASTIC = {"jax.extend.backend.clear_backends"}


def is_module(name):
    try:
        importlib.import_module(name)
    except ImportError:
        return False
    return True


def names_in(function):
    """Returns the private names of JAX that a function reads."""
    found, modules = set(), {}
    for node in ast.walk(function):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(PRIVATE):
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                if is_module(full):
                    modules[alias.asname or alias.name] = full
                else:
                    found.add(full)
    for node in ast.walk(function):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            module = modules.get(node.value.id)
            found |= {f"{module}.{node.attr}"} if module else set()
    return sorted(found - OPTIONAL - ELASTIC)


def functions():
    """Returns the private names of each function of the folder that reads some."""
    found = {}
    for file in sorted(FOLDER.glob("*.py")):
        for node in ast.parse(file.read_text()).body:
            names = names_in(node)
            if names:
                found[f"{file.name}: {getattr(node, 'name', 'the module')}"] = names
    return found


FUNCTIONS = functions()
_IN_TURN = [name for place, names in FUNCTIONS.items() if "kept" in place for name in names]
KEPT = list(dict.fromkeys(_IN_TURN))
# Without it, no part of the library has its turn when a program is compiled.
COMPILING = sorted({name for place, names in FUNCTIONS.items() if "compiling" in place
                    for name in names})  # fmt: skip
_OTHERS = [names for place, names in FUNCTIONS.items()
           if "kept" not in place and "compiling" not in place]  # fmt: skip
# Each group has one name of each function at most, so that no fallback hides another. Of the
# functions of the first, one alone reads several names.
GROUPS = [sorted({names[0] for names in [*_OTHERS, KEPT]}), COMPILING]
(GENERATOR,) = (names for names in _OTHERS if len(names) > 1)


def test_private_names_are_read_inside_functions():
    assert len(FUNCTIONS) >= 8
    assert [place for place in FUNCTIONS if place.endswith("the module")] == []


def found_without(names, folder, num_processes):
    """Returns what each process of a job wrote that trained without names."""
    folder.mkdir(exist_ok=True)
    # Each job compiles anew.
    done = launch(
        num_processes, SCRIPTS / "train_without_names.py", folder, *names,
        JAX_COMPILATION_CACHE_DIR=str(folder / "kept"),
        JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS="0",
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return [json.loads((folder / f"rank{rank}").read_text()) for rank in range(num_processes)]


@functools.cache
def on_one_device(module):
    tnt.shutdown()
    tnt.init(devices=[0])
    return train(tnt, module)


@pytest.mark.multiprocess
@pytest.mark.slow
@pytest.mark.parametrize("names", GROUPS, ids=lambda names: names[-1])
def test_a_job_trains_without_each_private_name(names, use_ranks, tmp_path):
    losses, dropout = on_one_device(Plain()), on_one_device(Drops())
    if any(name.startswith("jax.extend.random.") for name in names):
        # JAX's own numbers, by the compiler's step.
        (alone,) = found_without(names, tmp_path / "alone", 1)
        assert not np.allclose(alone["dropout"], dropout, rtol=1e-3)
        dropout = alone["dropout"]
    for found in found_without(names, tmp_path, 2):
        np.testing.assert_allclose(found["losses"], [losses] * 2, rtol=1e-5)
        warned = [text for text in found["warnings"] if "differs from the versions" in text]
        assert len(warned) == len(set(warned))
        lacking = {name.split(".")[-1] for name in names}
        assert {name for name in lacking if not any(name in text for text in warned)} == set()
        # Nothing else differs.
        assert [text for text in warned if not any(name in text for name in lacking)] == []
        assert found["planes"] > 0
        assert found["listens"]
        np.testing.assert_allclose(found["dropout"], dropout, rtol=1e-5)


@pytest.mark.parametrize("name", KEPT)
def test_programs_are_compiled_where_a_name_that_keeps_them_is_missing(name, tmp_path, caplog):
    copy = importlib.util.module_from_spec(importlib.util.find_spec(kept_programs.__name__))
    settings = {
        "jax_compilation_cache_dir": str(tmp_path),
        "jax_persistent_cache_min_compile_time_secs": 0,
    }
    before = {setting: getattr(jax.config, setting) for setting in settings}
    for setting, value in settings.items():
        jax.config.update(setting, value)
    compilation_cache.reset_cache()
    try:
        with missing({name}), caplog.at_level(logging.WARNING, "tnt_jax"):
            copy.__spec__.loader.exec_module(copy)
            copy.keep_programs_of_each_process("")
            results = [float(jax.jit(lambda x, y=y: jnp.sin(x) + y)(1.0)) for y in range(3)]
        tnt.shutdown()
    finally:
        for setting, value in before.items():
            jax.config.update(setting, value)
        compilation_cache.reset_cache()
    np.testing.assert_allclose(results, np.sin(1.0) + np.arange(3), rtol=1e-6)
    (text,) = [record.getMessage() for record in caplog.records]
    assert name.rpartition(".")[2] in text


@pytest.mark.parametrize("name", GENERATOR)
def test_a_generator_without_one_of_its_parts_is_none(name, caplog):
    parts = fallbacks.or_plain(programs._parts.plain, lost="Speed is lost.")(
        programs._parts.__wrapped__
    )
    with missing({name}), caplog.at_level(logging.WARNING, "tnt_jax"):
        define, *others = parts()
    assert [define(), *others] == [None] * 3
    (record,) = caplog.records
    assert name.rpartition(".")[2] in record.getMessage()


MESH = _jax.make_data_mesh(jax.devices()[:4])


def test_arrays_are_taken_apart_and_put_together_by_documented_functions():
    sharding = NamedSharding(MESH, PartitionSpec(_jax.DATA_AXIS))
    x = jax.device_put(np.arange(8.0), sharding)
    parts = arrays._parts.plain(x)
    for part, expected in zip(parts, arrays._parts(x), strict=True):
        np.testing.assert_array_equal(part, expected)
    whole = arrays._joined.plain(x.aval, sharding, parts)
    assert whole.sharding == sharding
    np.testing.assert_array_equal(whole, x)


def test_axes_and_varying_types_are_found_by_what_is_documented():
    found = []

    def look(x, y):
        for value in (x, y, x + y, jnp.zeros(())):
            aval = jax.typeof(value)
            found.append([f(aval) for f in (arrays.varying_axes_of, arrays.varying_axes_of.plain)])
        found.append([arrays.mapped_sizes(), arrays.mapped_sizes.plain()])
        return x + y

    mesh = jax.sharding.Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("data", "fsdp"))
    specs = (PartitionSpec("data"), PartitionSpec(("data", "fsdp")))
    jax.make_jaxpr(jax.shard_map(look, mesh=mesh, in_specs=specs, out_specs=specs[1]))(
        np.ones((2, 2)), np.ones((4, 2))
    )
    assert len(found) == 5
    assert [own for own, _ in found] == [plain for _, plain in found]
    assert found[-1][0] == {"data": 2, "fsdp": 2}


@jax.custom_jvp
def doubled(x):
    return 2 * x


doubled.defjvp(lambda primals, tangents: (doubled(*primals), 2 * tangents[0]))


def test_programs_are_cut_and_run_by_what_is_documented():
    weights = jnp.arange(3.0)

    def function(x, y, z):
        jax.debug.callback(lambda _: None, z)
        return doubled(x) * weights, jax.lax.scan(lambda c, _: (c + y, c), y, None, length=3)

    program = jax.make_jaxpr(function)(*np.ones((3, 3)))
    for results in ([True, False, False], [False, True, True], [False] * 3):
        eliminated = programs._eliminated(program.jaxpr, results)
        plain = programs._eliminated.plain(program.jaxpr, results)
        assert plain[1] == eliminated[1]
        assert [e.primitive for e in plain[0].eqns] == [e.primitive for e in eliminated[0].eqns]
    for found, expected in zip(
        programs.jaxpr_as_fun.plain(program)(*np.ones((3, 3))),
        jax.tree.leaves(function(*np.ones((3, 3)))),
        strict=True,
    ):
        np.testing.assert_array_equal(found, expected)


def test_files_that_compile_are_known(monkeypatch):
    files = compiling._compiling()
    assert len(files) == 4
    assert compiling._compiling.__wrapped__.plain() == files[-1:]
    monkeypatch.setattr(compiling, "_FOLDER", "/nowhere/")
    with pytest.raises(ImportError, match="nowhere"):
        compiling._compiling.__wrapped__.__wrapped__()


def test_random_numbers_are_refused_on_several_devices_without_a_generator(monkeypatch):
    monkeypatch.setattr(programs, "threefry2x32_p", None)
    keys = (jax.random.key(0), PartitionSpec()), (np.ones(4), PartitionSpec("data"))
    args, specs = zip(*keys, strict=True)

    def run(function, mesh):
        return _jax.shard_map(function, mesh=mesh, in_specs=specs, out_specs=specs[1])(*args)

    def draw(key, x):
        return x * jax.jit(lambda key: jax.random.uniform(jax.random.fold_in(key, 1)))(key)

    with pytest.raises(ValueError, match=r"draws random numbers.*Install a version"):
        run(draw, MESH)
    assert run(draw, _jax.make_data_mesh(jax.devices()[:1])).shape == (4,)
    np.testing.assert_array_equal(run(lambda key, x: x + 1, MESH), 2)


def test_arguments_that_fail_in_both_ways_are_no_change_of_jax(caplog):
    def fail(_):
        raise TypeError("Wrong arguments.")

    decorated = fallbacks.or_plain(lambda x: x + 1, lost="Speed is lost.")(fail)
    with pytest.raises(TypeError, match="str"):
        decorated("a")
    assert caplog.text == ""
    assert [decorated(1), decorated(2)] == [2, 3]
    (record,) = caplog.records
    assert "(TypeError: Wrong arguments.). Speed is lost." in record.getMessage()
