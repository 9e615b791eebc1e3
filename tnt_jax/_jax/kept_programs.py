"""Compiled programs for CPUs that jobs of several processes find again at their next start.

JAX's compilation cache leaves out the programs of all processes but the first. On other devices the
processes share what the first one writes; on CPUs JAX gives each of them keys of its own, because a
key contains the devices of the process. Here the processes share their programs, in JAX's own cache
with its limits, under keys without devices. One process of a machine compiles a program that
several of them need, and the others wait for it. Programs that call Python are left to JAX.
"""

import fcntl
import hashlib
import importlib.metadata
import os
import secrets
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import jax

from tnt_jax._jax.compiling import stand_around
from tnt_jax._jax.fallbacks import CHANGED, or_plain
from tnt_jax.job import Slot
from tnt_jax.log import logger

# Programs that are compiled in less time are not worth waiting for.
_SHORT_S = 0.1
# What a file holds: a checksum, and the seconds of the compilation and the program, compressed.
_FORMAT = "blake2b, zlib"
_EVENTS = "/jax/compilation_cache/"
_is_on = Slot[bool](bool)
# Its settings have no types.
_config: Any = jax.config
_LOST = "Programs of other processes than the first are compiled at every start."


@or_plain(lambda processor, *, turns=None: None, lost=_LOST)
def keep_programs_of_each_process(processor: str, *, turns: str | None = None) -> None:
    """Has this process keep all programs that it compiles for CPUs, until its job ends.

    JAX's settings of the compilation cache say which, and where. `processor` says what processors
    that run the same programs have in common. One of the processes with the same `turns` compiles a
    program for all; with None each does.
    """
    if not _is_on.get():
        _is_on.set(True)
        stand_around(partial(_find_or_compile, processor, turns))


@or_plain(lambda processor, turns, before, *args, **named: before(*args, **named), lost=_LOST)
def _find_or_compile(
    processor: str, turns: str | None, compile_before: Callable, *arguments: Any
) -> Any:
    """Stands for JAX's function, of which `arguments` are; see `stand_around`."""
    # Private. Checked with JAX 0.10.0, 0.10.2 and 0.12.0.
    from jax._src import compiler

    backend, computation, _, compile_options, host_callbacks, executable_devices, *_ = arguments

    how = (executable_devices, compile_options, host_callbacks)

    def compile_it() -> Any:
        return compiler.backend_compile_and_load(backend, computation, *how)

    def load(serialized: bytes) -> Any:
        return backend.deserialize_executable(serialized, *how)

    is_kept = _is_to_be_kept(backend) and not host_callbacks
    cache = _open_cache(backend) if is_kept else None
    if cache is None:
        return compile_before(*arguments)
    key = _key_of(computation, compile_options, backend, processor)
    jax.monitoring.record_event(_EVENTS + "compile_requests_use_cache")
    program = _find(cache, key, load)
    # A process that waits for a program finds it then, unless it is a short one.
    waits = _config.jax_persistent_cache_min_compile_time_secs <= _SHORT_S
    if program is None and turns is not None and waits:
        with _turn(cache, key, turns):
            return _find(cache, key, load) or _compile_and_keep(cache, key, compile_it)
    return program or _compile_and_keep(cache, key, compile_it)


def _is_to_be_kept(backend: Any) -> bool:
    return (
        backend.platform == "cpu"
        and _config.jax_enable_compilation_cache
        and _config.jax_compilation_cache_dir is not None
        # Then a process may wait for what another one compiles.
        and not _config.jax_share_binary_between_hosts
        # JAX's function writes the text.
        and not _config.read("jax_dump_ir_to")
    )


def _key_of(computation: Any, compile_options: Any, backend: Any, processor: str) -> str:
    """Returns a key like those of JAX, but the same for all processes of a job."""
    # Private. Checked with JAX 0.10.0, 0.10.2 and 0.12.0. No public function makes keys.
    from jax._src import cache_key

    found = hashlib.sha256()
    # Differs by version: False in JAX 0.12, in 0.10 a value of an enumeration.
    choices = getattr(cache_key, "IgnoreCallbacks", None)
    cache_key._hash_computation(found, computation, choices.NO if choices else False)
    cache_key._hash_serialized_compile_options(found, compile_options, strip_device_assignment=True)
    cache_key._hash_xla_flags(found, cache_key.get_flag_prefixes())
    versions = (importlib.metadata.version("jaxlib"), backend.platform, backend.platform_version)
    found.update(repr((*versions, _FORMAT, processor, cache_key.custom_hook())).encode())
    name = str(computation.operation.attributes["sym_name"]).strip('"')
    return f"{name}-{found.hexdigest()}"


@contextmanager
def _turn(cache: Any, key: str, name: str) -> Iterator[None]:
    """Lets one process in, and when it has left all that came meanwhile."""
    # The kernel opens the lock of a process that dies. Where files cannot be locked, all come in.
    file, is_first = None, False
    with suppress(OSError, TypeError):  # The folder may be one of a web service.
        path = cache._path / f"{key}.{name}.turn"
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        is_first = _lock_first(file)
    try:
        yield
    finally:
        if is_first:
            # Those of jobs that were killed, too. They may belong to other users.
            with suppress(OSError):
                for path in cache._path.glob(f"{key}.*.turn"):
                    path.unlink(missing_ok=True)
        if file is not None:
            os.close(file)


def _lock_first(file: int) -> bool:
    """Locks a file and returns True, or waits until another process has done so and closed it."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        fcntl.flock(file, fcntl.LOCK_SH)
        fcntl.flock(file, fcntl.LOCK_UN)
        return False
    return True


def _open_cache(backend: Any) -> Any:
    """Returns JAX's cache, or None if its folder cannot be used."""
    # Private. Checked with JAX 0.10.0, 0.10.2 and 0.12.0. No public function opens the cache.
    from jax._src import compilation_cache

    with _reporting("No compiled programs are kept"):
        return compilation_cache._get_cache(backend)
    return None


def _find(cache: Any, key: str, load: Callable[[bytes], Any]) -> Any:
    """Returns a kept program, ready to run, or None; one that cannot be read is removed."""
    begin = time.monotonic()
    program, content = None, b""
    with _reporting(f"The kept program {key} cannot be read, and is compiled again"):
        entry = cache.get(key)
        if entry is None:
            return None
        checksum, compressed = entry[:32], entry[32:]
        # XLA loads another program, or ends the process, where a bit of a program has changed.
        if _checksum(compressed) != checksum:
            raise ValueError("The checksum of the file is not that of its content.")
        content = zlib.decompress(compressed)
        program = load(content[4:])
    if program is None:
        with _reporting(f"The kept program {key} cannot be removed"):
            _file(cache, key).unlink(missing_ok=True)  # JAX would not overwrite it.
        return None
    took_s = time.monotonic() - begin
    saved_s = int.from_bytes(content[:4], "big") - took_s
    # As JAX counts its own.
    jax.monitoring.record_event(_EVENTS + "cache_hits")
    jax.monitoring.record_event_duration_secs(_EVENTS + "compile_time_saved_sec", saved_s)
    jax.monitoring.record_event_duration_secs(_EVENTS + "cache_retrieval_time_sec", took_s)
    return program


def _compile_and_keep(cache: Any, key: str, compile_it: Callable[[], Any]) -> Any:
    begin = time.monotonic()
    program = compile_it()
    compile_s = time.monotonic() - begin
    if compile_s < _config.jax_persistent_cache_min_compile_time_secs:
        return program
    with _reporting(f"The program {key} cannot be kept"):
        content = int(compile_s).to_bytes(4, "big") + program.serialize()
        compressed = zlib.compress(content, level=1)
        entry = _checksum(compressed) + compressed
        if len(entry) >= _config.jax_persistent_cache_min_entry_size_bytes:
            _write(cache, key, entry)
            jax.monitoring.record_event(_EVENTS + "cache_misses")
    return program


def _checksum(compressed: bytes) -> bytes:
    return hashlib.blake2b(compressed, digest_size=32).digest()


def _file(cache: Any, key: str) -> Any:
    # Private. Checked with JAX 0.10.0, 0.10.2 and 0.12.0.
    from jax._src.lru_cache import _CACHE_SUFFIX

    return cache._path / f"{key}{_CACHE_SUFFIX}"


def _write(cache: Any, key: str, entry: bytes) -> None:
    if getattr(cache, "eviction_enabled", True):
        cache.put(key, entry)  # Under a lock.
        return
    # Other jobs may read at the same time, and this process may be killed.
    path = _file(cache, key)
    unfinished = cache._path / f"{key}.{secrets.token_hex(4)}.unfinished"
    try:
        unfinished.write_bytes(entry)
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


@contextmanager
def _reporting(what: str) -> Iterator[None]:
    """Warns of an error as JAX does, and goes on after the block, unless its settings forbid it."""
    try:
        yield
    except CHANGED:
        raise
    except Exception as error:
        if _config.jax_raise_persistent_cache_errors:
            raise
        logger.warning(
            "%s: %s: %s", what, type(error).__name__, error, extra={"on_every_process": True}
        )
