"""The process's place in the job: which devices, which rank, who is master.

`init()` joins the job that the environment names and builds the mesh; everything that needs it
calls it lazily, so a script that never mentions it works.
"""

import os
import socket
import time
from collections.abc import Sequence, Set
from dataclasses import dataclass, replace
from typing import Any

import jax
from jax.sharding import Mesh

from tnt_jax import _jax
from tnt_jax.distributed import elastic, goodput, leaving, timeline
from tnt_jax.distributed.elastic import Generation, link
from tnt_jax.distributed.joining.join import join_job, keep_freed_memory
from tnt_jax.distributed.liveness import table
from tnt_jax.distributed.liveness.table import ExitNotice
from tnt_jax.distributed.liveness.watch import Patience, start_watching
from tnt_jax.distributed.shared_sums import joining as shared_sums
from tnt_jax.job import Slot, end_generation, end_job
from tnt_jax.log import configure_logging, logger
from tnt_jax.settings import Settings


@dataclass(frozen=True)
class Runtime:
    """The mesh and this process's place on it.

    Attributes:
        mesh: One axis, `data`, over all ranks; the ranks of one process are neighbours. A model
            that is sharded has a mesh of its own over the same devices.
        settings: What the environment said at `init`.
    """

    mesh: Mesh
    settings: Settings

    @property
    def num_ranks(self) -> int:
        """Number of parts that a global batch is split into, over all processes."""
        return _jax.num_ranks(self.mesh)

    @property
    def local_ranks(self) -> list[int]:
        """Ranks of which this process has a device, in order."""
        return _jax.local_ranks(self.mesh)

    @property
    def shares_ranks(self) -> bool:
        """Whether several processes have devices of the same rank, and need the same rows."""
        return self.mesh.size // self.num_ranks > len(self.mesh.local_devices)

    @property
    def platform(self) -> str:
        """Kind of the devices: `cpu`, `gpu` or `tpu`."""
        return self.mesh.devices.flat[0].platform

    def without_a_process(self) -> "Runtime | None":
        """Returns the job without the last other process; None if this one is alone."""
        devices, own = [*self.mesh.devices.flat], jax.process_index()
        last = max((x.process_index for x in devices if x.process_index != own), default=None)
        if last is None:
            return None
        left = [x for x in devices if x.process_index != last]
        return replace(self, mesh=_jax.make_data_mesh(left))


_runtime = Slot[Runtime | None](lambda: None)
# The devices that `init` was given.
_chosen = Slot[Sequence[int] | None](lambda: None, lasts=True)


def init(devices: Sequence[int] | None = None) -> Runtime:
    """Joins the job named by the environment, if any, and builds the mesh over the chosen devices.

    A job is named by `TNT_COORDINATOR_ADDRESS`, `TNT_NUM_PROCESSES` and `TNT_PROCESS_ID`, by
    `TF_CONFIG`, or by SLURM, Open MPI or Kubernetes. Without one, the process trains alone on its
    own devices. Calling it again returns the same runtime.

    Args:
        devices: Indices into this process's local devices; all of them by default.

    Returns:
        The runtime of this process.

    Raises:
        ValueError: If a variable is invalid, if `devices` names a device that is not there, or
            differs from an earlier call.
        RuntimeError: If the environment names a job of several processes but JAX was used before,
            or if hosts of the job resolve their own name to a loopback address.
    """
    runtime = _runtime.get()
    if runtime is None:
        return _start(devices)
    if devices is not None and _chosen_ids(devices) != _own_device_ids(runtime):
        raise ValueError(
            f"init(devices={list(devices)}) came after an init with the devices "
            f"{_own_device_ids(runtime)}. Choose the devices in the first call, or call "
            "shutdown() before."
        )
    return runtime


def _start(devices: Sequence[int] | None) -> Runtime:
    before = set() if link() is None else elastic.listening_ports()
    settings = join_job()
    process, num_processes = jax.process_index(), jax.process_count()
    is_master = process == 0 and not is_to_join()
    configure_logging(settings, rank=process, is_master=is_master)
    runtime = Runtime(_jax.make_data_mesh(_choose_devices(devices)), settings)
    configure_logging(settings, rank=runtime.local_ranks[0], is_master=is_master)
    if settings.timeline is not None and timeline.current() is None:
        timeline.start(settings.timeline, process)
    goodput.open_account(
        path=settings.goodput, launched_at=settings.launched_at, is_master=is_master
    )
    if num_processes > 1:
        patience = Patience(settings.stall_warning_s, settings.stall_timeout_s)
        end = leaving.end_job if link() is None else _report_stuck
        start_watching(patience, end, shared_sums.is_waiting)
    if runtime.platform == "cpu":
        keep_freed_memory(os.environ)
        if num_processes > 1:
            shared_sums.join(list(runtime.mesh.devices.flat), is_wanted=settings.shared_memory)
    if link() is not None:
        _end_sums_with_generation(before)
    # At last: an error before is raised again by the next call.
    _runtime.set(runtime)
    _chosen.set(devices)
    logger.info(
        "%d rank(s) on %s in %d process(es) on %s.",
        runtime.num_ranks,
        runtime.platform,
        num_processes,
        socket.gethostname(),
    )
    log_start_phase("devices open")
    return runtime


def _end_sums_with_generation(listening_before: Set[int]) -> None:
    """Has all that waits for other processes fail once their generation has ended."""
    own = link()
    assert own is not None
    ports = elastic.listening_ports() - listening_before
    others = _of_all_processes("ports", ports) if jax.process_count() > 1 else set()

    def end() -> None:
        shared_sums.interrupt()
        elastic.cut(ports, others)

    own.when_ended(end)


def _report_stuck(stalled: ExitNotice, service_answers: bool) -> None:
    """Reports a process that makes no progress to the launcher of an elastic job."""
    own = link()
    if own is not None and service_answers:
        own.report_stuck(stalled.process, stalled.how.splitlines()[0])


def rejoin(generation: Generation) -> Runtime:
    """Leaves the devices and the processes of one generation of an elastic job for the next.

    What was on the devices is lost.
    """
    leaving.forget_generation()
    end_generation()
    _jax.leave_job()
    os.environ |= {
        "TNT_COORDINATOR_ADDRESS": generation.address,
        "TNT_NUM_PROCESSES": str(generation.size),
        "TNT_PROCESS_ID": str(generation.index),
        "JAX_COORDINATOR_BIND_ADDRESS": generation.address,
    }
    return init(_chosen.get())


def shutdown() -> None:
    """Leaves the job and forgets the mesh, the seed of `set_seed`, and which warnings were given.

    It waits until open checkpoints are written. A later `init` begins a new job, which may have
    other devices; models that were trained before stay with the old ones, so make new models. In a
    job of several processes every process must call it; it waits for the others. JAX's devices stay
    open, so a process that has left a job of several processes cannot join another.
    """
    try:
        end_job()
    finally:
        if jax.distributed.is_initialized():
            jax.distributed.shutdown()


def get_rank() -> int:
    """Returns the rank of this process's first device, from 0 to `get_size() - 1`."""
    own, line = init(), link()
    if line is None or line.has_joined:
        return own.local_ranks[0]
    return line.rank * own.num_ranks


def get_size() -> int:
    """Returns the number of ranks: devices on the data axis, over all processes."""
    own, line = init(), link()
    return own.num_ranks * (1 if line is None or line.has_joined else line.planned)


def first_rank_of(process: int) -> int:
    """Returns the first rank of which a process has the device."""
    return _jax.local_ranks(init().mesh, process)[0]


def is_to_join() -> bool:
    """Returns whether this process has still to join an elastic job."""
    own = link()
    return own is not None and not own.has_joined


def get_master_rank() -> int:
    """Returns the master's rank, which is 0 (Tarantella's master is its last rank)."""
    return 0


def is_master_rank() -> bool:
    """Returns whether this process is the master: the one that prints, logs and writes files."""
    return get_process_index() == 0 and not is_to_join()


def get_process_index() -> int:
    """Returns the number of this process in the job, from 0 to `get_process_count() - 1`."""
    init()
    return jax.process_index()


def get_process_count() -> int:
    """Returns the number of processes in the job."""
    init()
    return jax.process_count()


def log_start_phase(phase: str) -> None:
    """Logs at DEBUG the time from this process's launch by `tnt-jax` to a phase of its start."""
    launched_at = init().settings.launched_at
    if launched_at is not None:
        logger.debug("Start-up: %s %.2f s after the launch.", phase, time.time() - launched_at)


def _choose_devices(indices: Sequence[int] | None) -> list[Any]:
    """Returns the devices of the job, process by process; of this process's, those at `indices`."""
    own = [device.id for device in jax.local_devices()]
    wanted = set(own if indices is None else _chosen_ids(indices))
    if jax.process_count() > 1:
        wanted = _of_all_processes("devices", wanted)
    # Sorted by process and then by id, so that the ranks of a process are neighbours on the mesh.
    return [
        d for d in sorted(jax.devices(), key=lambda d: (d.process_index, d.id)) if d.id in wanted
    ]


def _of_all_processes(name: str, own: Set[int]) -> set[int]:
    text, process = ",".join(map(str, own)), jax.process_index()
    lists = table.exchange(name, text, process, jax.process_count(), timeout_s=300)
    return {int(number) for item in lists for number in item.split(",") if number}


def _own_device_ids(runtime: Runtime) -> list[int]:
    devices = list(runtime.mesh.devices.flat)
    return [devices[rank].id for rank in runtime.local_ranks]


def _chosen_ids(indices: Sequence[int]) -> list[int]:
    own = jax.local_devices()
    are_distinct = indices and len(set(indices)) == len(indices)
    if not are_distinct or not all(0 <= index < len(own) for index in indices):
        raise ValueError(
            f"devices must be distinct indices from 0 to {len(own) - 1} into this process's "
            f"{len(own)} local device(s), but is {list(indices)}."
        )
    return sorted(own[index].id for index in indices)
