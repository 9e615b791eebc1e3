"""Identifies this host, and counts its GPUs, processors and memory nodes, without JAX."""

import hashlib
import os
import platform
import re
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

_DRIVER_GPUS = Path("/proc/driver/nvidia/gpus")
_CPU_INFO = Path("/proc/cpuinfo")
_NUMA_NODES = Path("/sys/devices/system/node")
_PROCESSORS = Path("/sys/devices/system/cpu")


def count_gpus(environ: Mapping[str, str]) -> int:
    """Returns the number of NVIDIA GPUs that this environment allows; see `list_gpus`."""
    return len(list_gpus(environ))


def list_gpus(environ: Mapping[str, str]) -> list[str]:
    """Returns the NVIDIA GPUs that this environment allows, spelled as in `CUDA_VISIBLE_DEVICES`.

    The sources are `nvidia-smi`, which respects the device limits of containers and SLURM steps,
    and then the driver's list of devices. `CUDA_VISIBLE_DEVICES` restricts both.
    """
    physical = _count_with_nvidia_smi()
    if physical is None:
        physical = len(list(_DRIVER_GPUS.iterdir())) if _DRIVER_GPUS.is_dir() else 0
    return visible_gpus(physical, environ.get("CUDA_VISIBLE_DEVICES"))


def visible_gpus(physical: int, visible_devices: str | None) -> list[str]:
    """Returns which of `physical` GPUs are visible with this value of `CUDA_VISIBLE_DEVICES`.

    As in CUDA, the first invalid entry hides itself and all entries after it.

    Example:
        >>> [visible_gpus(4, chosen) for chosen in ("2,3", "0,-1,1", "", None)]
        [['2', '3'], ['0'], [], ['0', '1', '2', '3']]
    """
    if visible_devices is None:
        return [str(number) for number in range(physical)]
    visible: list[str] = []
    for entry in visible_devices.split(","):
        name = entry.strip()
        if not (name.startswith(("GPU-", "MIG-")) or (name.isdigit() and int(name) < physical)):
            break
        visible.append(name)
    return visible if physical else []


def _count_with_nvidia_smi() -> int | None:
    command = ["nvidia-smi", "-L"]
    try:
        # The driver can take many seconds to wake up where persistence mode is off.
        listed = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=30
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    found = re.findall(r"^GPU \d+:", listed.stdout, flags=re.MULTILINE)
    return None if listed.returncode else len(found)


def count_cores() -> int:
    """Returns the number of processors that this process may run on."""
    return len(os.sched_getaffinity(0))


def list_processors() -> list[int]:
    """Returns the processors that this process may run on, those of a core together."""
    return sorted(os.sched_getaffinity(0), key=lambda number: (_core_of(number), number))


def _core_of(processor: int) -> tuple[int, ...]:
    """Returns a processor's socket and core; zeros where the kernel does not say."""
    topology = _PROCESSORS / f"cpu{processor}" / "topology"
    try:
        return tuple(
            int((topology / name).read_text()) for name in ("physical_package_id", "core_id")
        )
    except (OSError, ValueError):
        return (0, 0)


def cpu_kind() -> str:
    """Returns eight hexadecimal digits that identify the instruction set of the processor."""
    # The line is called flags on x86 and Features on ARM.
    found = re.search(r"^(?:flags|Features)\s*:.*$", _CPU_INFO.read_text(), flags=re.MULTILINE)
    known = " ".join(sorted(found[0].split())) if found else ""
    return hashlib.sha256(f"{platform.machine()} {known}".encode()).hexdigest()[:8]


def numa_nodes() -> list[int]:
    """Returns the host's NUMA nodes, the command line's sockets; empty if the kernel shows none."""
    return sorted(int(path.name[4:]) for path in _NUMA_NODES.glob("node[0-9]*"))


def machine_id(namespace: Literal["net", "pid"]) -> str:
    """Returns an identifier that processes of one machine have in common.

    Hosts that share a kernel, such as containers, are told apart by their namespaces: `"net"` for
    processes that share addresses, `"pid"` for those that can see one another's process ids.
    """
    boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot_id}-{os.stat(f'/proc/self/ns/{namespace}').st_ino}"
