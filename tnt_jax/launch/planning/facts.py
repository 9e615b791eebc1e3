"""Facts about a host: the launcher asks before anything starts, the supervisor answers."""

import importlib.metadata
import os
import shutil
import socket
import stat
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tnt_jax.cluster.devices import cpu_kind, list_gpus, list_processors, machine_id, numa_nodes
from tnt_jax.files import UnsafeFolder, is_own, private_folder

_CUDA_PLUGINS = ("jax-cuda12-plugin", "jax-cuda13-plugin")


def cache_dir(environ: Mapping[str, str]) -> str:
    """Returns the user's cache directory (XDG base directory specification).

    A compiled program in the cache is executed, so whoever can write to the cache decides what
    runs. For a user without a home directory it is a private folder in /tmp.
    """
    if environ.get("XDG_CACHE_HOME"):
        return environ["XDG_CACHE_HOME"]
    home = environ.get("HOME") or ""
    if (
        os.path.isdir(home)
        and os.access(home, os.W_OK)
        and is_own(os.stat(home), writable=stat.S_IWOTH)
    ):
        return os.path.join(home, ".cache")
    return private_folder(f"/tmp/tnt_jax-{os.geteuid()}")


@dataclass(frozen=True)
class Facts:
    """Facts about a host, which calls itself `hostname`.

    Attributes:
        machine: Identifies the machine, or the container that has a network of its own.
        own_addresses: The addresses to which that name resolves on the host itself.
        ssh_address: Address at which the launcher reached the host by ssh, or None.
        versions: Installed version by package name (tnt-jax, jax, jaxlib); None if not installed.
        cpu_kind: Identifies the instruction set of the processors.
        processors: Numbers of the processors that the processes may use, those of a core together.
        gpus: GPUs that the processes may use, spelled as in `CUDA_VISIBLE_DEVICES`.
        numactl: Path of numactl, or None.
        cache_dir: Directory for the user's caches; empty if there is no safe one.
        package_root: Directory that scripts need in their path to find tnt_jax; None if it is
            installed.
        missing: Descriptions of what is missing on the host; empty if nothing is.
    """

    hostname: str
    machine: str
    own_addresses: tuple[str, ...]
    ssh_address: str | None
    python: str
    versions: dict[str, str | None]
    cpu_kind: str
    processors: tuple[int, ...]
    gpus: tuple[str, ...]
    has_cuda_jax: bool
    numa_nodes: tuple[int, ...]
    numactl: str | None
    cache_dir: str
    no_cache_because: str
    package_root: str | None
    missing: tuple[str, ...]

    @property
    def num_cores(self) -> int:
        """Number of processors that the processes may use."""
        return len(self.processors)

    @property
    def num_gpus(self) -> int:
        """Number of GPUs that the processes may use."""
        return len(self.gpus)

    def addresses(self, name: str) -> list[str]:
        """Returns the names and addresses at which others may reach this host, the user's first."""
        found = [name.rpartition("@")[2], self.ssh_address, *self.own_addresses]
        return [address for address in dict.fromkeys(found) if address and not is_loopback(address)]

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> "Facts":
        """Returns the facts from plain data."""
        names = ("own_addresses", "processors", "gpus", "numa_nodes", "missing")
        tuples = {name: tuple(fields[name]) for name in names}
        return cls(**{**fields, **tuples})


def inspect_host(
    cwd: str, script: str, interpreter: str, environment: Mapping[str, str]
) -> dict[str, Any]:
    """Returns this host's `Facts` as plain data.

    Args:
        cwd: Directory in which the processes will run.
        script: The user's script, as given on the command line, or "-m" for a module.
        interpreter: First word of the command that runs it; empty if the script is itself a
            program.
        environment: Variables that the processes will get in addition to those of the host.
    """
    environ = {**os.environ, **environment}
    hostname = socket.gethostname()
    found_cache = no_cache_because = ""
    try:
        found_cache = cache_dir(environ)
    except UnsafeFolder as error:
        no_cache_because = str(error)
    facts = Facts(
        hostname=hostname,
        machine=machine_id("net"),
        own_addresses=resolve(hostname),
        ssh_address=ssh_address(environ),
        python=".".join(map(str, sys.version_info[:3])),
        versions={name: package_version(name) for name in ("tnt-jax", "jax", "jaxlib")},
        cpu_kind=cpu_kind(),
        processors=tuple(list_processors()),
        gpus=tuple(list_gpus(environ)),
        has_cuda_jax=any(package_version(name) for name in _CUDA_PLUGINS),
        numa_nodes=tuple(numa_nodes()),
        numactl=shutil.which("numactl", path=environ.get("PATH")),
        cache_dir=found_cache,
        no_cache_because=no_cache_because,
        package_root=None if package_version("tnt-jax") else str(Path(__file__).parents[3]),
        missing=tuple(_missing(cwd, script, interpreter, environ)),
    )
    return asdict(facts)


def resolve(name: str) -> tuple[str, ...]:
    """Returns the distinct addresses of a host name on this host; none if it is unknown."""
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except socket.gaierror:
        return ()
    return tuple(dict.fromkeys(str(address[0]) for *_, address in found))


def is_loopback(address: str) -> bool:
    """Returns whether an address always means the host itself."""
    return address.startswith("127.") or address in ("::1", "localhost")


def ssh_address(environ: Mapping[str, str]) -> str | None:
    """Returns the address at which an ssh client reached this host."""
    words = environ.get("SSH_CONNECTION", "").split()
    return words[2] if len(words) == 4 else None


def package_version(name: str) -> str | None:
    """Returns the installed version of a package without importing it."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _missing(cwd: str, script: str, interpreter: str, environ: Mapping[str, str]) -> list[str]:
    if not os.path.isdir(cwd):
        return [f"directory {cwd}"]
    missing = []
    path = os.path.join(cwd, script)
    if script == "-m":
        pass  # The interpreter searches for the module in its own path.
    elif not os.path.isfile(path):
        missing.append(f"script {path}")
    elif not interpreter and not os.access(path, os.X_OK):
        missing.append(f"permission to execute {path}")
    if interpreter and shutil.which(interpreter, path=environ.get("PATH")) is None:
        missing.append(f"interpreter {interpreter}")
    return missing
