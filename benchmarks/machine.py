"""Which devices a benchmark runs on, what the machine is, and what works beside the benchmark.

Imports no library that chooses devices when it is imported: scripts call `choose_devices` first.
"""

import argparse
import contextlib
import os
import platform
import socket
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from tnt_jax.cluster.devices import count_gpus

LIBRARIES = (
    "jax", "flax", "optax", "numpy", "torch", "tensorflow", "tensorflow-cpu", "keras", "grain",
    "pillow", "horovod", "ray",
)  # fmt: skip


def add_platform(parser: argparse.ArgumentParser) -> None:
    """Adds the option `--platform`."""
    parser.add_argument(
        "--platform",
        choices=("cpu", "cuda", "rocm", "tpu"),
        help="devices to run on (default: those that JAX finds, CPUs if there are no others)",
    )


def choose_devices(wanted: str | None, *, num_cpu_devices: int = 1) -> None:
    """Sets the environment of a process whose JAX has not started.

    Args:
        wanted: Value of `--platform`. Without it `JAX_PLATFORMS` decides, or JAX.
        num_cpu_devices: Virtual devices, if JAX then runs on CPUs; other devices are not divided.
    """
    if wanted is not None:
        os.environ["JAX_PLATFORMS"] = wanted
    if wanted == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = "-1"  # Of PyTorch and TensorFlow, too.
    flags = os.environ.get("XLA_FLAGS", "")
    os.environ["XLA_FLAGS"] = f"{flags} --xla_force_host_platform_device_count={num_cpu_devices}"
    # Collectives of virtual devices deadlock with fewer threads.
    os.environ.setdefault("PJRT_NPROC", str(max(os.cpu_count() or 1, 4 * num_cpu_devices)))


def on_cpus(platform: str | None) -> bool:
    """Returns whether JAX will run on CPUs, without starting it.

    Args:
        platform: Value of `--platform`.
    """
    chosen = platform or os.environ.get("JAX_PLATFORMS", "")
    return chosen == "cpu" or (not chosen and count_gpus(os.environ) == 0)


def free_addresses(host: str, count: int) -> list[str]:
    """Returns addresses of this host with ports that nobody uses."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind((host, 0))
        return [f"{host}:{one.getsockname()[1]}" for one in sockets]


@contextlib.contextmanager
def busy_processes(count: int) -> Iterator[None]:
    """Runs processes that compute without end, one on each core in turn, within the block."""
    cores = sorted(os.sched_getaffinity(0))
    started = []
    try:
        for number in range(count):
            spin = f"import os; os.sched_setaffinity(0, [{cores[number % len(cores)]}])\nwhile 1: 0"
            started.append(subprocess.Popen([sys.executable, "-S", "-c", spin]))
        yield
    finally:
        for process in started:
            process.kill()
        for process in started:
            process.wait()


def environment() -> dict[str, Any]:
    """Returns machine, load, versions, command and commit, for the file of results."""
    return {
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)),
        "machine": platform.machine(),
        "load": os.getloadavg(),
        "versions": versions(),
        "command": " ".join(["python", *map(_relative, sys.argv)]),
        "commit": commit(),
    }


def versions() -> dict[str, str]:
    """Returns the versions of Python and of the libraries that are installed."""
    found = {"python": platform.python_version()}
    for name in LIBRARIES:
        with contextlib.suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def _processor() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":")[1].strip()
    return platform.processor()


def _relative(argument: str) -> str:
    here = Path(__file__).parent.parent
    path = Path(argument)
    return str(path.relative_to(here)) if path.is_absolute() and here in path.parents else argument


def commit() -> str:
    """Returns the commit of the code that runs, or ""."""
    command = ["git", "describe", "--always", "--dirty"]
    with contextlib.suppress(OSError):
        found = subprocess.run(
            command, capture_output=True, text=True, cwd=Path(__file__).parent, check=False
        )
        return found.stdout.strip()
    return ""
