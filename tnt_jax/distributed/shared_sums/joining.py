"""Joins the processes of a job on one machine for sums in memory that they share.

The memory has no name: the first process makes it by `memfd_create`, the others open it through the
first one's entry in `/proc`, which only processes of the same user can do. Nothing is left of it
when the last of them ends, however it ends.
"""

import ctypes
import fcntl
import hashlib
import importlib.metadata
import json
import os
import platform
import secrets
import shutil
import stat
import subprocess
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

from tnt_jax import _jax
from tnt_jax.cluster.devices import machine_id
from tnt_jax.distributed.liveness.rendezvous import meet
from tnt_jax.files import is_own
from tnt_jax.job import Slot
from tnt_jax.log import logger

_SOURCE = Path(__file__).with_name("sums.c")
_OPTIONS = ("-std=gnu11", "-O3", "-shared", "-fPIC", "-pthread")
_COMPILE_S = 60
TARGET = "tnt_jax_sum"
"""Name of the call that stands for a sum in programs."""
_CALL = "shared memory"
_TOKEN_BYTES = 32
# Microseconds that a sum looks for the others' values before it lets its thread go. No time, where
# they may need this core to compute them.
_LOOKING_US = 50
_MOST_RANKS = 64  # As in sums.c.


# A thread may close the sums of a generation that has ended, while the main thread leaves it.
_closing = Slot(threading.Lock, lasts=True)


def _close(library: ctypes.CDLL) -> None:
    with _closing.get():
        library.tnt_jax_sums_close()


def interrupt() -> None:
    """Ends the sums of this process, and those that wait for it, by an error."""
    _library.close(_library.get())


_library = Slot[ctypes.CDLL | None](lambda: None, close=_close)
# The number of hosts whose processes share memory.
_open = Slot[int](int)


def are_open() -> bool:
    """Returns whether all sums over all ranks go through shared memory: on one host alone."""
    return _open.get() == 1


def is_waiting() -> bool:
    """Returns whether a sum of this process waits for the values of another one."""
    library = _library.get()
    return library is not None and library.tnt_jax_sums_waiting() > 0


def join(devices: Sequence[Any], *, is_wanted: bool = True) -> None:
    """Has the processes of a machine sum over all ranks in shared memory, if `is_wanted` by all.

    All processes must call it, with the job's devices by rank, before they compile a program. Where
    one cannot share memory, all leave their sums to XLA, and a line says why. So do they if each is
    alone on its machine.
    """
    process = jax.process_index()
    # That of the first process of a machine will be in use.
    memory, place, why_not = _offered()
    if not is_wanted:
        why_not = f"TNT_SHARED_MEMORY is 0 in process {process}"
    try:
        cores = ",".join(map(str, os.sched_getaffinity(0)))
        own = [f"{machine_id('net')} {machine_id('pid')}", place, cores, why_not]
        machines, places, all_cores, problems = zip(
            *map(json.loads, meet(_CALL, json.dumps(own))), strict=True
        )
        ranks_of: dict[str, list[int]] = {machine: [] for machine in machines}
        for device in devices:
            ranks_of[machines[device.process_index]].append(device.id)
        if len(ranks_of) == len(machines):
            return
        problems = [*filter(None, problems)]
        if (most := max(map(len, ranks_of.values()))) > _MOST_RANKS:
            problems.append(f"a machine has {most} ranks, more than {_MOST_RANKS}")
        if not problems:
            members = [i for i, machine in enumerate(machines) if machine == machines[process]]
            ranks = ranks_of[machines[process]]
            num_cores = len({core for i in members for core in all_cores[i].split(",")})
            looking_us = _LOOKING_US if len(ranks) <= num_cores else 0
            library, problem = _opened(places[members[0]], members, ranks, looking_us)
            _library.set(library)
            if library is not None and process == members[0]:
                memory = None
            problems = [*filter(None, meet(_CALL, problem))]
            if library is not None and not problems:
                handler = jax.ffi.pycapsule(library.tnt_jax_sum)
                if _jax.replace_sums(TARGET, handler, list(ranks_of.values())):
                    _open.set(len(ranks_of))
                    return
            if library is not None:
                _close(library)
            _library.set(None)
    finally:
        if memory is not None:
            os.close(memory)
    if problems and process == 0:
        logger.info("Processes of one machine sum through sockets, because %s.", problems[0])


def _offered() -> tuple[int | None, str, str]:
    """Returns the descriptor of new memory, where others find it, and what is in the way."""
    try:
        memory, token = os.memfd_create("tnt_jax_sums"), secrets.token_bytes(_TOKEN_BYTES)
        os.write(memory, token)
        return memory, f"{os.getpid()} {memory} {token.hex()}", ""
    except OSError as error:
        return None, "", str(error)


def _opened(
    place: str, members: Sequence[int], device_ids: Sequence[int], looking_us: int
) -> tuple[ctypes.CDLL | None, str]:
    """Returns the library, with the memory at `place` open, and what is in the way."""
    pid, number, token = place.split(" ")
    memory = int(number)
    try:
        library = load_library()
    except OSError as error:
        return None, str(error)
    try:
        # To close another descriptor of its own memory would end this process's lock on it.
        if int(pid) != os.getpid():
            memory = os.open(f"/proc/{pid}/fd/{number}", os.O_RDWR | os.O_CLOEXEC)
        if os.pread(memory, _TOKEN_BYTES, 0).hex() != token:
            return None, f"the memory of process id {pid} is not that of this job"
    except OSError as error:
        return None, f"a process cannot open the memory of another: {error}"
    processes = (ctypes.c_int32 * len(members))(*members)
    numbers = (ctypes.c_int32 * len(device_ids))(*device_ids)
    failed = library.tnt_jax_sums_open(
        memory,
        members.index(jax.process_index()),
        len(members),
        processes,
        len(device_ids),
        numbers,
        looking_us,
    )
    if failed:
        return None, f"shared memory cannot be used: {os.strerror(failed)}"
    return library, ""


def load_library() -> ctypes.CDLL:
    """Returns the library, which is compiled first if need be; raises an OSError."""
    compiler = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc")
    if not compiler:
        raise OSError("there is no C compiler (cc)")
    jaxlib = importlib.metadata.version("jaxlib")
    known = (_SOURCE.read_bytes(), jaxlib, platform.machine(), compiler, _OPTIONS)
    name = f"sums-{_digest(repr(known).encode())}"
    folder = _own_folder()
    if folder is None:
        with tempfile.TemporaryDirectory(prefix="tnt_jax-") as temporary:
            return _compiled(compiler, Path(temporary), name)
    with open(folder / "sums.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for file in folder.glob(f"{name}-*.so"):
            # A process dies that loads a file which was cut short.
            if file.stem == f"{name}-{_digest(file.read_bytes())}":
                return ctypes.CDLL(str(file))
            file.unlink()
        return _compiled(compiler, folder, name)


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


def _own_folder() -> Path | None:
    """Returns a folder that only this user can write to, or None if there is none."""
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    folder = Path(cache) / "tnt_jax" / "native"
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        is_safe = is_own(folder.stat(), writable=stat.S_IWGRP | stat.S_IWOTH)
    except OSError:
        return None
    return folder if is_safe and os.access(folder, os.W_OK) else None


def _compiled(compiler: str, folder: Path, name: str) -> ctypes.CDLL:
    partial = folder / f"{name}.{os.getpid()}"
    include = f"-I{jax.ffi.include_dir()}"
    command = [*compiler.split(), *_OPTIONS, include, _SOURCE, "-o", partial]
    try:
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=_COMPILE_S)
        path = partial.replace(folder / f"{name}-{_digest(partial.read_bytes())}.so")
    except subprocess.CalledProcessError as error:
        reasons = [line for line in error.stderr.splitlines() if "error" in line]
        reason = reasons[0] if reasons else f"exit status {error.returncode}"
        raise OSError(f"the C compiler ({compiler}) failed: {reason}") from error
    except subprocess.TimeoutExpired as error:
        raise OSError(f"the C compiler took longer than {_COMPILE_S} s") from error
    finally:
        partial.unlink(missing_ok=True)
    return ctypes.CDLL(str(path))
