"""Programs of several CPU processes are found at the next start."""

import gc
import logging
import subprocess
import sys
import threading
import zlib
from collections import Counter
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src import compilation_cache, compiler
from jax.sharding import NamedSharding, PartitionSpec
from processes import SCRIPTS, launch

import tnt_jax as tnt
from tnt_jax import _jax
from tnt_jax._jax import kept_programs
from tnt_jax._jax.kept_programs import _turn

X = np.arange(8, dtype=np.float32).reshape(4, 2)
SETTINGS = {
    "jax_persistent_cache_min_compile_time_secs": 0,
    "jax_persistent_cache_min_entry_size_bytes": -1,
    "jax_raise_persistent_cache_errors": False,
}


@pytest.fixture
def use_folder():
    """Returns a function that has this process keep its programs in a folder, for this test."""
    before = {}

    def use(folder, *, turns=None, **settings):
        directory = None if folder is None else str(folder)
        chosen = {**SETTINGS, "jax_compilation_cache_dir": directory, **settings}
        for name, value in chosen.items():
            before.setdefault(name, getattr(jax.config, name))
            jax.config.update(name, value)
        compilation_cache.reset_cache()
        _jax.keep_programs_of_each_process("", turns=turns)

    tnt.shutdown()
    yield use
    tnt.shutdown()
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()


@pytest.fixture
def counts():
    """Counts JAX's events, such as `cache_hits`."""
    found = Counter()

    def count(event, **_):
        found[event.rpartition("/")[2]] += 1

    jax.monitoring.register_event_listener(count)
    yield found
    jax.monitoring.unregister_event_listener(count)


def make_program(function=jnp.sin, factor=1):
    """Returns a program of four devices, which has the same text each time, and its argument."""
    mesh = _jax.make_data_mesh(jax.devices()[:4])
    rows = PartitionSpec(_jax.DATA_AXIS)

    def call(x):
        return jnp.exp(function(x))

    jitted = jax.jit(jax.shard_map(call, mesh=mesh, in_specs=rows, out_specs=rows, check_vma=False))
    return jitted, jax.device_put(X * np.float32(factor), NamedSharding(mesh, rows))


def run(factor):
    """Returns a call of a new program with `X` times `factor`, and its result."""
    program, x = make_program(factor=factor)
    return lambda: np.asarray(program(x)), np.asarray(program(x))


def expected(factor):
    return np.exp(np.sin(X * np.float32(factor)))


def test_programs_that_are_alike_share_a_file(use_folder, counts, tmp_path):
    use_folder(tmp_path)
    first, result = run(2)
    assert counts["cache_hits"] == 0
    (file,) = tmp_path.glob("jit_call-*-cache")
    second, other = run(3)
    assert counts["cache_hits"] == 1
    gc.collect()
    np.testing.assert_allclose(result, expected(2), rtol=1e-6)
    np.testing.assert_allclose(other, expected(3), rtol=1e-6)
    np.testing.assert_array_equal(first(), result)
    np.testing.assert_array_equal(second(), other)
    assert list(tmp_path.glob("jit_call-*")) == [file]


def test_a_program_that_was_found_gives_the_bits_of_a_compiled_one(use_folder, counts, tmp_path):
    use_folder(None)
    _, compiled = run(2)
    use_folder(tmp_path)
    run(1)
    _, found = run(2)
    assert counts["cache_hits"] == 1
    np.testing.assert_array_equal(found, compiled)


def test_devices_share_a_program(use_folder, counts, tmp_path):
    use_folder(tmp_path)
    found = [jax.jit(jnp.tan)(jax.device_put(X, device)) for device in jax.devices()[:2]]
    assert counts["cache_hits"] == 1
    assert [x.device for x in found] == jax.devices()[:2]
    np.testing.assert_array_equal(found[0], found[1])
    assert len(list(tmp_path.glob("jit_tan-*-cache"))) == 1


def test_programs_that_call_python_are_left_to_jax(use_folder, tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(kept_programs, "_key_of", lambda *args: asked.append(args))
    use_folder(tmp_path)
    program, x = make_program(lambda x: jax.pure_callback(np.sin, x, x))
    np.testing.assert_allclose(program(x), expected(1), rtol=1e-6)
    assert asked == []


@pytest.mark.parametrize(
    "damage",
    [
        lambda file: file.write_bytes(file.read_bytes()[:-100]),
        lambda file: file.write_bytes(b""),
        lambda file: file.write_text("A note of somebody else."),
        lambda file: file.write_bytes(zlib.compress(bytes(1000))),
    ],
    ids=["truncated", "empty", "a text", "another content"],
)
def test_a_file_that_cannot_be_read_is_replaced(use_folder, counts, tmp_path, caplog, damage):
    use_folder(tmp_path)
    run(2)
    (file,) = tmp_path.glob("jit_call-*-cache")
    damage(file)
    with caplog.at_level(logging.WARNING, "tnt_jax"):
        _, result = run(2)
    assert "cannot be read, and is compiled again" in caplog.text
    assert file.name.removesuffix("-cache") in caplog.text
    np.testing.assert_allclose(result, expected(2), rtol=1e-6)
    caplog.clear()
    assert counts["cache_hits"] == 0
    run(2)
    assert counts["cache_hits"] == 1
    assert caplog.text == ""
    assert list(tmp_path.glob("jit_call-*")) == [file]


@pytest.mark.parametrize("compression", ["zlib", "none"])
def test_a_changed_bit_anywhere_is_noticed(
    use_folder, counts, tmp_path, caplog, monkeypatch, compression
):
    if compression == "none":  # It notices nothing itself.
        plain = SimpleNamespace(compress=lambda content, level: content, decompress=bytes)
        monkeypatch.setattr(kept_programs, "zlib", plain)
    use_folder(tmp_path)
    run(2)
    (file,) = tmp_path.glob("jit_call-*-cache")
    kept = file.read_bytes()
    loaded = []
    cache = compilation_cache._get_cache(jax.devices()[0].client)
    key = file.name.removesuffix("-cache")
    bits = range(0, 8 * len(kept), 8 * len(kept) // 201)
    for bit in bits:
        changed = bytearray(kept)
        changed[bit // 8] ^= 1 << bit % 8
        file.write_bytes(changed)
        with caplog.at_level(logging.WARNING, "tnt_jax"):
            assert kept_programs._find(cache, key, loaded.append) is None
        assert not file.exists()
    assert loaded == []
    assert caplog.text.count("checksum") == len(bits)
    file.write_bytes(changed)
    _, result = run(2)
    np.testing.assert_allclose(result, expected(2), rtol=1e-6)
    assert file.read_bytes() != bytes(changed)
    assert counts["cache_hits"] == 0
    run(2)
    assert counts["cache_hits"] == 1


def test_jax_can_be_asked_to_raise_the_error_instead(use_folder, tmp_path):
    use_folder(tmp_path, jax_raise_persistent_cache_errors=True)
    run(2)
    (file,) = tmp_path.glob("jit_call-*-cache")
    file.write_text("A note of somebody else.")
    with pytest.raises(ValueError, match="checksum"):
        run(2)


def test_programs_run_although_their_folder_cannot_be_used(use_folder, tmp_path, caplog):
    (tmp_path / "file").write_text("")
    use_folder(tmp_path / "file")
    with caplog.at_level(logging.WARNING, "tnt_jax"):
        _, result = run(2)
    assert "No compiled programs are kept: " in caplog.text
    np.testing.assert_allclose(result, expected(2), rtol=1e-6)


@pytest.mark.parametrize(
    "settings",
    [
        {"jax_persistent_cache_min_compile_time_secs": 1000},
        {"jax_persistent_cache_min_entry_size_bytes": 10**9},
        {"jax_enable_compilation_cache": False},
    ],
    ids=lambda settings: next(iter(settings)),
)
def test_nothing_is_kept_against_the_settings_of_jax(use_folder, tmp_path, settings):
    use_folder(tmp_path, **settings)
    run(2)
    assert list(tmp_path.glob("jit_call-*-cache")) == []


def test_the_least_recently_used_programs_make_room(use_folder, counts, tmp_path):
    pytest.importorskip("filelock", reason="JAX limits the size of its cache by filelock")
    use_folder(tmp_path, jax_compilation_cache_max_size=10**6)
    run(2)
    run(2)
    assert counts["cache_hits"] == 1
    (kept,) = tmp_path.glob("jit_call-*-cache")
    use_folder(tmp_path, jax_compilation_cache_max_size=kept.stat().st_size + 100)
    jax.jit(lambda x: jnp.cos(x) + 1)(X)
    assert not kept.exists()


def test_processes_that_share_what_one_compiles_are_left_to_jax(use_folder, tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(kept_programs, "_key_of", lambda *args: asked.append(args))
    use_folder(tmp_path, jax_share_binary_between_hosts=True)
    run(2)
    assert asked == []


def test_jax_has_its_compiler_back_after_the_job(use_folder, tmp_path):
    before = compiler.compile_or_get_cached
    use_folder(tmp_path)
    assert compiler.compile_or_get_cached is not before
    tnt.shutdown()
    assert compiler.compile_or_get_cached is before


@pytest.mark.parametrize(("seconds", "expected"), [(0, 1), (0.1, 1), (1, 0)])
def test_programs_that_may_not_be_kept_are_not_waited_for(
    use_folder, tmp_path, monkeypatch, seconds, expected
):
    taken = []
    enter = kept_programs._turn
    monkeypatch.setattr(kept_programs, "_turn", lambda *args: taken.append(args) or enter(*args))
    use_folder(tmp_path, turns="job", jax_persistent_cache_min_compile_time_secs=seconds)
    program, x = make_program()
    program(x)
    assert len(taken) == expected


def start(folder, cache):
    """Returns the lines that each of two processes of a job wrote."""
    folder.mkdir()
    done = launch(
        2, SCRIPTS / "train_kept.py", folder, JAX_COMPILATION_CACHE_DIR=str(cache),
        JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS="0",
        JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES="-1",
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return [file.read_text().split("\n") for file in sorted(folder.iterdir())]


@pytest.mark.multiprocess
@pytest.mark.slow
def test_a_job_compiles_each_program_once_and_nothing_at_its_second_start(tmp_path):
    first = start(tmp_path / "first", tmp_path / "cache")
    kept = list((tmp_path / "cache").iterdir())
    assert all(file.name.endswith(("-cache", "-atime")) for file in kept)
    programs = [file for file in kept if file.name.endswith("-cache")]
    assert sum(int(asked) - int(found) for asked, found, *_ in first) == len(programs)
    assert len({tuple(bits) for _, _, *bits in first}) == 1
    second = start(tmp_path / "second", tmp_path / "cache")
    assert len(list((tmp_path / "cache").glob("jit_step-*-cache"))) >= 2
    assert list((tmp_path / "cache").glob("*.unfinished")) == []
    for (asked, found, *bits), (asked_again, found_again, *bits_again) in zip(
        first, second, strict=True
    ):
        assert int(found) <= int(asked) == int(asked_again)
        assert found_again == asked_again
        assert bits_again == bits


class Folder:
    def __init__(self, path):
        self._path = path


@pytest.fixture
def enter(tmp_path):
    """Returns a function that takes a turn in a thread, and an event that this sets."""

    def enter():
        inside, leave = threading.Event(), threading.Event()

        def run():
            with _turn(Folder(tmp_path), "key", "job"):
                inside.set()
                leave.wait(60)

        leavers.append(leave)
        threads.append(threading.Thread(target=run))
        threads[-1].start()
        return inside, leave

    threads, leavers = [], []
    yield enter
    for leave in leavers:
        leave.set()
    for thread in threads:
        thread.join()


def test_the_others_come_in_together_when_the_first_has_left(enter, tmp_path):
    first, leave = enter()
    assert first.wait(60)
    second, third = enter()[0], enter()[0]
    assert not second.wait(0.3)
    assert not third.is_set()
    leave.set()
    assert second.wait(60)
    assert third.wait(60)
    assert list(tmp_path.iterdir()) == []


def test_a_process_that_dies_keeps_nobody_out(enter, tmp_path):
    code = (
        "import fcntl, sys, time; file = open(sys.argv[1], 'w'); fcntl.flock(file, fcntl.LOCK_EX);"
        "print('locked', flush=True); time.sleep(600)"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "key.job.turn")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as holder:
        try:
            assert holder.stdout.readline() == "locked\n"
            inside, _ = enter()
            assert not inside.wait(0.3)
        finally:
            holder.kill()
        assert inside.wait(60)


def test_locks_of_jobs_that_were_killed_are_removed(tmp_path):
    others = [tmp_path / "key.other.turn", tmp_path / "key-cache", tmp_path / "key2.other.turn"]
    for file in others:
        file.touch()
    with _turn(Folder(tmp_path), "key", "job"):
        assert (tmp_path / "key.job.turn").exists()
    assert sorted(tmp_path.iterdir()) == sorted(others[1:])


def test_an_error_leaves_no_lock(tmp_path):
    with pytest.raises(KeyError), _turn(Folder(tmp_path), "key", "job"):
        raise KeyError
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("path", ["missing", "file"])
def test_where_nothing_can_be_locked_all_come_in(tmp_path, path):
    (tmp_path / "file").write_text("")
    with _turn(Folder(tmp_path / path), "key", "job"), _turn(Folder(tmp_path / path), "key", "job"):
        assert [file.name for file in tmp_path.iterdir()] == ["file"]
