"""Joins the job that the environment names.

It also checks that the job's hosts can reach one another. It opens no device.
"""

import ctypes
import hashlib
import os
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from importlib.metadata import entry_points

import jax

from tnt_jax import _jax
from tnt_jax.cluster.clusters import (
    RAY_TRAIN,
    Job,
    detect_job,
    is_started_by_script,
    train_secret,
)
from tnt_jax.cluster.devices import count_gpus, cpu_kind, machine_id
from tnt_jax.distributed import leaving
from tnt_jax.distributed.elastic import link, unless_ended
from tnt_jax.distributed.liveness import table
from tnt_jax.job import secret
from tnt_jax.log import logger
from tnt_jax.settings import Settings, default_init_timeout_s, read_settings

# glibc's malloc.h.
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD = -1, -2, -3
_LARGEST = 2**31 - 1
_GROWTH_BYTES = 64 * 2**20


def keep_freed_memory(environ: Mapping[str, str]) -> bool:
    """Makes the C library keep freed memory for later allocations; returns whether it does.

    XLA allocates the intermediate results of every step on CPUs anew. By default glibc returns such
    large blocks to the system, which clears them page by page for the next step. For a small
    Transformer that is a third of the step time (benchmarks/README.md). Does nothing if the C
    library is not glibc, or if the user has configured it by `MALLOC_*` in the environment.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None or any(name.startswith("MALLOC_") for name in environ):
        return False
    chosen = {_M_MMAP_THRESHOLD: _LARGEST, _M_TRIM_THRESHOLD: _LARGEST, _M_TOP_PAD: _GROWTH_BYTES}
    return [mallopt(name, value) for name, value in chosen.items()] == [1, 1, 1]


# Seconds that JAX waits longer than tnt_jax, whose message is the clearer one.
_GRACE_S = 30
# A process may read and prepare its data for long before it needs the others.
_FIRST_MEETING_S = 3600
# The same for a later generation of an elastic job.
_NEXT_MEETING_S = 60
# In an elastic job the launcher notices who is silent.
_WEEK_S = 7 * 24 * 3600
# The longest time in which a process asks often whether the coordinator listens. After it, the
# second that JAX's client waits between two questions is short.
_ASKING_S, _SHORTEST_TICK_S, _LATER = 10.0, 0.005, 1 / 8


def join_job() -> Settings:
    """Joins the job named by the environment, if any, opens no device, and returns the settings."""
    settings = read_settings()
    _make_threads_for_virtual_devices()
    own_link = link()
    if own_link is not None:
        _jax.call_service_by(unless_ended)
        _jax.stop_threads_that_fail()
    joins_later = own_link is not None and not own_link.has_joined
    job = None if joins_later else detect_job(os.environ)
    is_worker = job is not None and job.source == RAY_TRAIN
    secret.set(train_secret() if is_worker else settings.job_secret.encode())
    turns = _join(job, settings) if job is not None and job.num_processes > 1 else None
    if jax.distributed.is_initialized():
        _jax.keep_programs_of_each_process(cpu_kind(), turns=turns)
    return settings


def _make_threads_for_virtual_devices() -> None:
    """Gives XLA's thread pool enough threads for the virtual CPU devices of `XLA_FLAGS`."""
    counts = re.findall(
        r"--xla_force_host_platform_device_count=(\d+)", os.environ.get("XLA_FLAGS", "")
    )
    if not counts or "PJRT_NPROC" in os.environ or "NPROC" in os.environ:
        return
    # The pool has as many threads as cores; below twice the number of devices their collectives
    # deadlocked.
    threads = max(os.cpu_count() or 1, 4 * int(counts[-1]))
    if not _jax.backends_are_initialized():
        os.environ["PJRT_NPROC"] = str(threads)
    elif (os.cpu_count() or 1) < 2 * int(counts[-1]):
        logger.warning(
            "%s virtual CPU devices share %s threads, and their collectives may deadlock. Set "
            "PJRT_NPROC=%d before JAX starts, or call tnt_jax.init() before JAX is used.",
            counts[-1],
            os.cpu_count(),
            threads,
        )


def _join(job: Job, settings: Settings) -> str | None:
    """Connects to the coordinator; returns a name that this machine's processes share, or None."""
    if jax.distributed.is_initialized():
        if job.source == RAY_TRAIN:
            # Ray has connected this process, and disconnects it.
            return _take_part(job, settings, disconnects=False)
        return None
    member = f"{job.coordinator_address} {job.process_id}"
    _check_that_it_can_join(job, member)
    if "JAX_ENABLE_PREEMPTION_SERVICE" not in os.environ:
        # JAX's service catches SIGTERM and then waits to be polled: a process that nobody polls
        # could not be ended.
        jax.config.update("jax_enable_preemption_service", False)
    timeout_s = _first_meeting_s(job, settings)
    with _ending_after(timeout_s, lambda: _missing_processes(job, timeout_s)):
        if job.process_id > 0:
            await_listener(job.coordinator_address)
        connect = partial(
            jax.distributed.initialize,
            coordinator_address=job.coordinator_address,
            num_processes=job.num_processes,
            process_id=job.process_id,
            local_device_ids=job.local_device_ids,
            cluster_detection_method="deactivate",
            initialization_timeout=timeout_s + _GRACE_S,
            heartbeat_timeout_seconds=settings.heartbeat_timeout_s if link() is None else _WEEK_S,
            # Each process disconnects for itself; `leaving` lets the coordinator be the last.
            shutdown_timeout_seconds=0,
        )
        if link() is None:
            connect()
        else:
            _jax.outlive_service()
            unless_ended(connect)
    os.environ["TNT_JOINED"] = f"{member} {os.getpid()}"
    return _take_part(job, settings)


def await_listener(address: str, *, most_s: float = _ASKING_S) -> None:
    """Waits while `host:port` refuses connections, as long as `most_s` seconds.

    A coordinator does so until its process has come so far. JAX's client, once it was refused, asks
    again after a second. What is wrong with an address is left to JAX.
    """
    host, _, port = address.rpartition(":")
    began_at = time.monotonic()
    while (waited_s := time.monotonic() - began_at) < most_s:
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=1).close()
            return
        except ConnectionRefusedError:
            time.sleep(max(_SHORTEST_TICK_S, _LATER * waited_s))
        except (OSError, ValueError):
            return


def _take_part(job: Job, settings: Settings, *, disconnects: bool = True) -> str | None:
    """Makes this process, which JAX has connected, and the others known to one another."""
    membership = leaving.introduce(job.process_id, job.num_processes, disconnects=disconnects)
    here = machine_id("net")
    own = f"{here} {socket.gethostname()} {own_address() or 'unresolved'}"
    timeout_s = _first_meeting_s(job, settings)
    told = table.exchange("host", own, job.process_id, job.num_processes, timeout_s=timeout_s)
    # Of each process the machine, and the machine's name and address.
    hosts = [(machine, name, address) for machine, name, address in map(str.split, told)]
    _check_host_names(set(hosts))
    if link() is None:
        membership.watch()
    if job.source == RAY_TRAIN:
        membership.leave_after(threading.current_thread())
    num_here = sum(machine == here for machine, _, _ in hosts)
    name = hashlib.sha256(f"{here} {job.coordinator_address}".encode()).hexdigest()[:16]
    return name if num_here > 1 else None


def _first_meeting_s(job: Job, settings: Settings) -> int:
    # The launcher has seen that the hosts reach one another, and sees processes that fail; the
    # others may be reading their data.
    is_launched = "TNT_JOB_ID" in os.environ
    own = link()
    if own is not None and own.generation.number:
        return _NEXT_MEETING_S  # All of them are ready.
    default_s = _FIRST_MEETING_S if is_launched else default_init_timeout_s(job.num_processes)
    return settings.init_timeout_s or default_s


def _check_that_it_can_join(job: Job, member: str) -> None:
    """Raises a RuntimeError if it was in the job or is none of its, or JAX was used before."""
    if os.environ.get("TNT_JOINED") == f"{member} {os.getpid()}":
        raise RuntimeError(
            f"This process has left the job of {job.num_processes} processes by "
            "tnt_jax.shutdown(), and cannot join it again, because JAX's devices stay open. Call "
            "shutdown() after the last use of tnt_jax, or leave it out."
        )
    has_joined = os.environ.get("TNT_JOINED", "").startswith(f"{member} ")
    if has_joined or (job.source == "TNT_*" and is_started_by_script()):
        raise RuntimeError(
            f"This process was started by process {job.process_id} of the job, and cannot join in "
            "its place. Where multiprocessing starts processes by 'spawn', they run the script "
            "anew: put what it does under if __name__ == '__main__':. Another script needs "
            "TNT_NUM_PROCESSES=1 and TNT_PROCESS_ID=0 in its environment, and computes alone."
        )
    if _jax.backends_are_initialized():
        raise RuntimeError(
            f"{job.source} names a job of {job.num_processes} processes, but JAX was used before "
            "tnt_jax could join it, so this process would train alone. Call tnt_jax.init() at the "
            "top of the script, before jax.devices(), jax.random or any array. See "
            "docs/faq.md#a-process-cannot-join-the-job."
        )


@contextmanager
def _ending_after(timeout_s: int, explain: Callable[[], str]) -> Iterator[None]:
    """Ends the process with an explanation if the block takes longer than `timeout_s`."""

    def end() -> None:
        leaving.say(explain())
        os._exit(1)

    # JAX's own timeout aborts the process with a stack trace of C++ and raises nothing that could
    # be caught.
    timer = threading.Timer(timeout_s, end)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _missing_processes(job: Job, timeout_s: int) -> str:
    set_names = (name for name in os.environ if name.lower().endswith("_proxy"))
    proxies = ", ".join(sorted(name for name in set_names if name.lower() != "no_proxy"))
    hint = f" The proxy variables {proxies} are set; unset them or add the hosts to no_proxy."
    return (
        f"Process {job.process_id} of {job.num_processes} could not start with the others within "
        f"{timeout_s} s (coordinator {job.coordinator_address}, from {job.source}). Check that all "
        f"{job.num_processes} processes were started, that the coordinator's host and port can be "
        "reached from here, and that nothing else listens there; a job that starts more slowly "
        f"needs a larger TNT_INIT_TIMEOUT_S.{hint if proxies else ''}"
    )


def _check_host_names(hosts: set[tuple[str, str, str]]) -> None:
    """Raises the same error on every process if host names resolve to loopback addresses."""
    # Gloo, which carries CPU collectives, listens on the address of the machine's own name: 127.x
    # is out of the others' reach.
    looped = [
        f"{name} ({address})"
        for _, name, address in sorted(hosts)
        if address.startswith("127.") or address == "::1"
    ]
    if len({machine for machine, _, _ in hosts}) > 1 and looped and not _computes_on_gpus():
        raise RuntimeError(
            f"Host(s) {', '.join(looped)} resolve their own name to a loopback address, so the "
            "other hosts of the job cannot reach them. Give each host name its network address in "
            "/etc/hosts (Debian writes '127.0.1.1 NAME' there) or in DNS."
        )


def _computes_on_gpus() -> bool:
    platforms = jax.config.jax_platforms  # type: ignore[attr-defined]
    if platforms:
        return platforms.split(",")[0] != "cpu"
    return bool(entry_points(group="jax_plugins")) and count_gpus(os.environ) > 0


def own_address() -> str | None:
    """Returns the address of the machine's own name, at which others reach it, or None."""
    try:
        return str(socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)[0][4][0])
    except OSError:
        return None
