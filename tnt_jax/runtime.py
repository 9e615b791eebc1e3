"""The process's place in the job: which devices, which rank, who is master.

`init()` joins the job that the environment names and builds the mesh; everything that needs it calls it lazily, so a
script that never mentions it works.
"""

import os
import re
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from types import TracebackType
from typing import Any

import jax
from jax.sharding import Mesh

from tnt_jax import _jax
from tnt_jax.host_memory import keep_freed_memory
from tnt_jax.launch.clusters import Job, detect_job
from tnt_jax.log import configure_logging, logger
from tnt_jax.settings import Settings, default_init_timeout_s, read_settings

_HOST_KEY = "tnt_jax/host"
# Seconds that JAX waits longer than tnt_jax, whose message is the clearer one.
_GRACE_S = 30
_CONSEQUENCE_DELAY_S = 1.0


@dataclass(frozen=True)
class Runtime:
    """The mesh and this process's place on it.

    Attributes:
        mesh: One axis, `data`, over all ranks; the ranks of one process are neighbours.
        settings: What the environment said at `init`.
    """

    mesh: Mesh
    settings: Settings

    @property
    def num_ranks(self) -> int:
        """Number of devices on the data axis, over all processes."""
        return self.mesh.size

    @property
    def local_ranks(self) -> list[int]:
        """Ranks whose device belongs to this process, in order."""
        here = jax.process_index()
        return [rank for rank, device in enumerate(self.mesh.devices.flat) if device.process_index == here]

    @property
    def platform(self) -> str:
        """Kind of the devices: `cpu`, `gpu` or `tpu`."""
        return self.mesh.devices.flat[0].platform


_runtime: Runtime | None = None
_barriers = count()


def init(devices: Sequence[int] | None = None) -> Runtime:
    """Joins the job named by the environment, if any, and builds the mesh over the chosen devices.

    A job is named by `TNT_COORDINATOR_ADDRESS`, `TNT_NUM_PROCESSES` and `TNT_PROCESS_ID`, by `TF_CONFIG`, or by SLURM, Open MPI
    or Kubernetes. Without one, the process trains alone on its own devices. Calling it again returns the same runtime.

    Args:
        devices: Indices into this process's local devices; all of them by default.

    Returns:
        The runtime of this process.

    Raises:
        ValueError: If a variable is invalid, if `devices` names a device that is not there, or differs from an earlier call.
        RuntimeError: If the environment names a job of several processes but JAX was used before, or if hosts of the job
            resolve their own name to a loopback address.
    """
    global _runtime
    if _runtime is None:
        settings = read_settings()
        _make_threads_for_virtual_devices()
        job = detect_job(os.environ)
        if job is not None and job.num_processes > 1:
            _join(job, settings)
        configure_logging(settings, rank=jax.process_index(), is_master=jax.process_index() == 0)
        _runtime = Runtime(_jax.make_data_mesh(_choose_devices(devices)), settings)
        configure_logging(settings, rank=_runtime.local_ranks[0], is_master=jax.process_index() == 0)
        if _runtime.platform == "cpu":
            keep_freed_memory(os.environ)
        logger.info(
            "%d rank(s) on %s in %d process(es) on %s.",
            _runtime.num_ranks, _runtime.platform, jax.process_count(), socket.gethostname(),
        )  # fmt: skip
        log_start_phase("devices open")
    elif devices is not None and _chosen_ids(devices) != _own_device_ids(_runtime):
        raise ValueError(
            f"init(devices={list(devices)}) came after an init with the devices {_own_device_ids(_runtime)}. "
            "Choose the devices in the first call, or call shutdown() before."
        )
    return _runtime


def shutdown() -> None:
    """Leaves the job and forgets the mesh; does nothing without an earlier `init`.

    In a job of several processes every process must call it; it waits for the others. JAX's devices stay open, so a process that
    has left a job of several processes cannot join another.
    """
    global _runtime
    _runtime = None
    if _jax.is_distributed():
        jax.distributed.shutdown()


def get_rank() -> int:
    """Returns the rank of this process's first device, from 0 to `get_size() - 1`."""
    return init().local_ranks[0]


def get_size() -> int:
    """Returns the number of ranks: devices on the data axis, over all processes."""
    return init().num_ranks


def get_master_rank() -> int:
    """Returns the master's rank, which is 0 (Tarantella's master is its last rank)."""
    return 0


def is_master_rank() -> bool:
    """Tells whether this process is the master: the one that prints, logs and writes files."""
    return get_process_index() == 0


def get_process_index() -> int:
    """Returns the number of this process in the job, from 0 to `get_process_count() - 1`."""
    init()
    return jax.process_index()


def get_process_count() -> int:
    """Returns the number of processes in the job."""
    init()
    return jax.process_count()


def log_start_phase(phase: str) -> None:
    """Logs at DEBUG how long after its launch, by `tnt-jax`, this process has reached a phase of its start."""
    launched_at = init().settings.launched_at
    if launched_at is not None:
        logger.debug("Start-up: %s %.2f s after the launch.", phase, time.time() - launched_at)


def barrier(*, timeout_s: int = 300) -> None:
    """Waits until every process of the job has called it the same number of times.

    Args:
        timeout_s: Seconds to wait.

    Raises:
        RuntimeError: If a process has not arrived in time.
    """
    if get_process_count() == 1:
        return
    name = f"tnt_jax/barrier/{next(_barriers)}"
    try:
        _jax.coordination_client().wait_at_barrier(name, timeout_s * 1000)
    except jax.errors.JaxRuntimeError as error:
        raise RuntimeError(
            f"Process {jax.process_index()} waited {timeout_s} s at a barrier that not all {jax.process_count()} processes reached. "
            "Every process must call barrier() equally often; look for a process that failed or took another branch."
        ) from error


def _make_threads_for_virtual_devices() -> None:
    """Gives XLA's thread pool enough threads for the virtual CPU devices that `XLA_FLAGS` asks for."""
    counts = re.findall(r"--xla_force_host_platform_device_count=(\d+)", os.environ.get("XLA_FLAGS", ""))
    if not counts or "PJRT_NPROC" in os.environ or "NPROC" in os.environ:
        return
    # The pool has as many threads as cores; below twice the number of devices their collectives deadlocked.
    threads = max(os.cpu_count() or 1, 4 * int(counts[-1]))
    if not _jax.backends_are_initialized():
        os.environ["PJRT_NPROC"] = str(threads)
    elif (os.cpu_count() or 1) < 2 * int(counts[-1]):
        logger.warning(
            "%s virtual CPU devices share %s threads, and their collectives may deadlock. Set PJRT_NPROC=%d before JAX starts, or call "
            "tnt_jax.init() before JAX is used.", counts[-1], os.cpu_count(), threads,
        )  # fmt: skip


def _join(job: Job, settings: Settings) -> None:
    """Connects to the job's coordinator and checks that its hosts can reach one another."""
    if _jax.is_distributed():
        return
    if _jax.backends_are_initialized():
        raise RuntimeError(
            f"{job.source} names a job of {job.num_processes} processes, but JAX was used before tnt_jax could join it, so this "
            "process would train alone. Call tnt_jax.init() at the top of the script, before jax.devices(), jax.random or any array."
        )
    if "JAX_ENABLE_PREEMPTION_SERVICE" not in os.environ:
        # JAX's service catches SIGTERM and then waits to be polled: a process that nobody polls could not be ended.
        jax.config.update("jax_enable_preemption_service", False)
    _exit_at_uncaught_exceptions()
    timeout_s = settings.init_timeout_s or default_init_timeout_s(job.num_processes)
    with _ending_after(timeout_s, lambda: _missing_processes(job, timeout_s)):
        jax.distributed.initialize(
            coordinator_address=job.coordinator_address,
            num_processes=job.num_processes,
            process_id=job.process_id,
            local_device_ids=job.local_device_ids,
            cluster_detection_method="deactivate",
            initialization_timeout=timeout_s + _GRACE_S,
            heartbeat_timeout_seconds=settings.heartbeat_timeout_s,
        )
    _check_host_names(job, timeout_s=timeout_s)


@contextmanager
def _ending_after(timeout_s: int, explain: Callable[[], str]) -> Iterator[None]:
    """Ends the process with an explanation if the block takes longer than `timeout_s`."""

    def end() -> None:
        sys.stdout.flush()
        print(f"[tnt_jax] ERROR: {explain()}", file=sys.stderr, flush=True)
        os._exit(1)

    # JAX's own timeout aborts the process with a stack trace of C++ and raises nothing that could be caught.
    timer = threading.Timer(timeout_s, end)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _missing_processes(job: Job, timeout_s: int) -> str:
    proxies = sorted(name for name in os.environ if name.lower().endswith("_proxy") and name.lower() != "no_proxy")
    hint = f" The proxy variables {', '.join(proxies)} are set; unset them or add the hosts to no_proxy." if proxies else ""
    return (
        f"Process {job.process_id} of {job.num_processes} could not start with the others within {timeout_s} s "
        f"(coordinator {job.coordinator_address}, from {job.source}). Check that all {job.num_processes} processes were started, "
        f"that the coordinator's host and port can be reached from here, and that nothing else listens there; a job that starts more "
        f"slowly needs a larger TNT_INIT_TIMEOUT_S.{hint}"
    )


def _check_host_names(job: Job, *, timeout_s: int) -> None:
    """Raises the same error on every process if hosts of the job resolve their own name to a loopback address."""
    # Gloo, which carries CPU collectives, listens on the address of the machine's own name: 127.x is out of the others' reach.
    client = _jax.coordination_client()
    client.key_value_set(f"{_HOST_KEY}/{job.process_id}", f"{_machine()} {socket.gethostname()} {own_address() or 'unresolved'}")
    keys = [f"{_HOST_KEY}/{process}" for process in range(job.num_processes)]
    hosts = sorted({tuple(client.blocking_key_value_get(key, timeout_s * 1000).split(" ")) for key in keys})
    looped = [f"{name} ({address})" for _, name, address in hosts if address.startswith("127.") or address == "::1"]
    if len({machine for machine, _, _ in hosts}) > 1 and looped and _cpu_collectives_are_needed():
        raise RuntimeError(
            f"Host(s) {', '.join(looped)} resolve their own name to a loopback address, so the other hosts of the job cannot reach "
            "them. Give each host name its network address in /etc/hosts (Debian writes '127.0.1.1 NAME' there) or in DNS."
        )


def _machine() -> str:
    """Returns what tells two hosts apart, also two hosts that share a kernel: the network namespace and the boot."""
    with open("/proc/sys/kernel/random/boot_id") as file:
        return f"{file.read().strip()}/{os.stat('/proc/self/ns/net').st_ino}"


def own_address() -> str | None:
    """Returns the address of the machine's own name, under which the other hosts of a job reach it; None if it has none."""
    try:
        return str(socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)[0][4][0])
    except OSError:
        return None


def _cpu_collectives_are_needed() -> bool:
    return (jax.config.jax_platforms or "cpu").split(",")[0] == "cpu"  # type: ignore[attr-defined]


def _choose_devices(indices: Sequence[int] | None) -> list[Any]:
    """Returns the devices of the job, process by process; of this process's own only those at `indices`."""
    own = jax.local_devices()
    if indices is None:
        chosen = [device.id for device in own]
    else:
        chosen = [own[index].id for index in _checked_indices(indices, len(own))]
    wanted = set(_gather_ids(chosen))
    # Sorted by process and then by id, so that the ranks of a process are neighbours on the mesh.
    return [d for d in sorted(jax.devices(), key=lambda d: (d.process_index, d.id)) if d.id in wanted]


def _checked_indices(indices: Sequence[int], available: int) -> Sequence[int]:
    if not indices or len(set(indices)) != len(indices) or not all(0 <= index < available for index in indices):
        raise ValueError(
            f"devices must be distinct indices from 0 to {available - 1} into this process's {available} local device(s), "
            f"but is {list(indices)}."
        )
    return indices


def _gather_ids(own: list[int]) -> list[int]:
    """Returns the device ids that all processes chose."""
    if jax.process_count() == 1:
        return own
    client = _jax.coordination_client()
    client.key_value_set(f"tnt_jax/devices/{jax.process_index()}", ",".join(map(str, own)))
    lists = [client.blocking_key_value_get(f"tnt_jax/devices/{process}", 300_000) for process in range(jax.process_count())]
    return [int(part) for text in lists for part in text.split(",")]


def _own_device_ids(runtime: Runtime) -> list[int]:
    devices = list(runtime.mesh.devices.flat)
    return [devices[rank].id for rank in runtime.local_ranks]


def _chosen_ids(indices: Sequence[int]) -> list[int]:
    own = jax.local_devices()
    return sorted(own[index].id for index in _checked_indices(indices, len(own)))


def _exit_at_uncaught_exceptions() -> None:
    """Makes an uncaught exception end the process at once, with status 1.

    At a normal exit JAX waits at a barrier for the other processes, and they may be waiting for this one in a collective.
    """
    report = sys.excepthook

    def report_and_exit(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        report(kind, error, trace)
        sys.stdout.flush()
        sys.stderr.flush()
        if isinstance(error, jax.errors.JaxRuntimeError):
            # A collective whose peer died: the peer is still on its way out, and whoever watches should see it end first.
            time.sleep(_CONSEQUENCE_DELAY_S)
        os._exit(1)

    sys.excepthook = report_and_exit
