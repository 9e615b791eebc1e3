"""Joins the processes of a job on one machine for sums in memory that they share.

The memory has no name: the first process makes it by `memfd_create`, the others open it through the
first one's entry in `/proc`, which only processes of the same user can do. Nothing is left of it
when the last of them ends, however it ends.
"""

import ctypes
import os
import secrets
from collections.abc import Sequence
from typing import Any

import jax

from tnt_jax import _jax
from tnt_jax.cluster.machine import machine_id
from tnt_jax.distributed.liveness.rendezvous import read_key
from tnt_jax.distributed.shared_sums.library import load_library
from tnt_jax.job import Slot
from tnt_jax.log import logger

_TARGET = "tnt_jax_sum"
_KEY = "tnt_jax/shared_sums"
_TOKEN_BYTES = 32
# Microseconds that a sum looks for the others' values before it lets its thread go. No time, where
# they may need this core to compute them.
_LOOKING_US = 50
_MOST_RANKS = 64  # As in sums.c.


def _close(library: ctypes.CDLL | None) -> None:
    if library is not None:
        library.tnt_jax_sums_close()


_library = Slot[ctypes.CDLL | None](lambda: None, close=_close)
# The number of hosts whose processes share memory.
_open = Slot[int](int)


def are_open() -> bool:
    """Returns whether all sums over all ranks go through memory that the processes share.

    Not so with several hosts, whose sums XLA adds up.
    """
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
    machines = _told(f"{machine_id('net')} {machine_id('pid')}", "machine")
    members = [other for other, machine in enumerate(machines) if machine == machines[process]]
    hosts = [
        [x.id for x in devices if machines[x.process_index] == machine]
        for machine in dict.fromkeys(machines)
    ]
    own = [x.id for x in devices if x.process_index in members]
    if len(set(machines)) == len(machines):
        return
    library, place, problem = None, "", ""
    if not is_wanted:
        problem = f"TNT_SHARED_MEMORY is 0 in process {process}"
    elif len(own) > _MOST_RANKS:
        problem = f"a machine has {len(own)} ranks, more than {_MOST_RANKS}"
    else:
        library, place, problem = _prepared(is_first=process == members[0])
    cores = ",".join(map(str, os.sched_getaffinity(0)))
    told = [text.split("|", 2) for text in _told(f"{place}|{cores}|{problem}", "prepared")]
    problems = [problem for _, _, problem in told if problem]
    if library is not None and not problems:
        num_cores = len({core for other in members for core in told[other][1].split(",")})
        looking_us = _LOOKING_US if len(own) <= num_cores else 0
        problem = _opened(library, told[members[0]][0], members, own, looking_us)
        problems = [text for text in _told(problem, "opened") if text]
        handler = jax.ffi.pycapsule(library.tnt_jax_sum)
        if not problems and _jax.replace_sums(_TARGET, handler, hosts):
            _library.set(library)
            _open.set(len(hosts))
        else:
            library.tnt_jax_sums_close()
    if problems and process == 0:
        logger.info("Processes of one machine sum through sockets, because %s.", problems[0])


def _prepared(*, is_first: bool) -> tuple[ctypes.CDLL | None, str, str]:
    """Returns the library, the place of a first process's memory, and what is in the way."""
    try:
        library = load_library()
        if not is_first:
            return library, "", ""
        memory = os.memfd_create("tnt_jax_sums")
        token = secrets.token_bytes(_TOKEN_BYTES)
        os.write(memory, token)
        return library, f"{os.getpid()} {memory} {token.hex()}", ""
    except OSError as error:
        return None, "", str(error)


def _opened(
    library: ctypes.CDLL,
    place: str,
    members: Sequence[int],
    device_ids: Sequence[int],
    looking_us: int,
) -> str:
    """Returns why this process cannot take part, `""` if it does."""
    pid, number, token = place.split(" ")
    is_own = int(pid) == os.getpid()
    try:
        memory = (
            int(number) if is_own else os.open(f"/proc/{pid}/fd/{number}", os.O_RDWR | os.O_CLOEXEC)
        )
        if os.pread(memory, _TOKEN_BYTES, 0).hex() != token:
            return f"the memory of process id {pid} is not that of this job"
    except OSError as error:
        return f"a process cannot open the memory of another: {error}"
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
    return f"shared memory cannot be used: {os.strerror(failed)}" if failed else ""


def _told(text: str, what: str) -> list[str]:
    """Returns the texts of all processes, each of which must call it."""
    _jax.coordination_client().key_value_set(f"{_KEY}/{what}/{jax.process_index()}", text)
    return [
        read_key(f"{_KEY}/{what}/{process}", "shared memory") or ""
        for process in range(jax.process_count())
    ]
