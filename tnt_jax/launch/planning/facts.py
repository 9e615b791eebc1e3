"""Facts about a host: the launcher asks before anything starts, the supervisor answers.

The doctor asks for more (`examine`). What facts say against a job, pure functions find.
"""

import importlib.metadata
import os
import re
import resource
import shutil
import socket
import stat
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
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
    """Facts about a host, which calls itself `hostname`."""

    hostname: str
    machine: str  # Identifies the machine, or the container that has a network of its own.
    own_addresses: tuple[str, ...]  # Those to which that name resolves on the host itself.
    ssh_address: str | None  # That at which the launcher reached the host by ssh.
    python: str
    versions: dict[str, str | None]  # Of tnt-jax, jax and jaxlib; None for what is not installed.
    cpu_kind: str  # Identifies the instruction set of the processors.
    processors: tuple[int, ...]  # Those that the processes may use, those of a core together.
    gpus: tuple[str, ...]  # Those that they may use, spelled as in `CUDA_VISIBLE_DEVICES`.
    has_cuda_jax: bool
    numa_nodes: tuple[int, ...]
    numactl: str | None
    cache_dir: str  # For the user's caches; empty if there is no safe one.
    no_cache_because: str
    package_root: str | None  # What scripts need in their path to find tnt_jax; None if installed.
    missing: tuple[str, ...]  # Descriptions of what is missing on the host.

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

    The processes will run in the directory `cwd`, with an `environment` in addition to that of the
    host. The script is "-m" for a module, the interpreter empty if the script is itself a program.
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


def _missing(cwd: str, script: str, interpreter: str, environ: Mapping[str, str]) -> Iterator[str]:
    if not os.path.isdir(cwd):
        yield f"directory {cwd}"
        return
    path = os.path.join(cwd, script)
    # The interpreter searches for a module in its own path.
    if script != "-m" and not os.path.isfile(path):
        yield f"script {path}"
    elif script != "-m" and not interpreter and not os.access(path, os.X_OK):
        yield f"permission to execute {path}"
    if interpreter and shutil.which(interpreter, path=environ.get("PATH")) is None:
        yield f"interpreter {interpreter}"


_DRIVER_VERSION = "/proc/driver/nvidia/version"
_NCCL_PACKAGES = ("nvidia-nccl-cu13", "nvidia-nccl-cu12")
PROXIES = ("http_proxy", "https_proxy", "all_proxy", "grpc_proxy")


@dataclass(frozen=True)
class Examination:
    """The result of a host's examination, in addition to its `Facts`."""

    facts: dict[str, Any]
    driver: str | None  # Version of the NVIDIA driver.
    nccl: str | None  # Version of NCCL's Python package.
    proxies: list[str]  # Names of the proxy variables that are set.
    open_files: int | None  # Limit on what a process may open; None for no limit.
    locked_kb: int | None  # Limit on the memory that it may lock; None for no limit.
    shm_mb: int | None  # Free space of /dev/shm, in MB; None if there is no such directory.
    token: str | None  # What the launcher wrote to the working directory, if it is there.
    free_disk_mb: int  # Free space on the disk of the compilation cache, in MB.


def examine(request: Mapping[str, Any], token_file: str) -> dict[str, Any]:
    """Returns this host's `Examination` as plain data; the request is for `inspect_host`."""
    environ = {**os.environ, **request["environment"]}
    facts = inspect_host(**request)
    locked = _limit(resource.RLIMIT_MEMLOCK)
    driver = re.search(r"Kernel Module(?: for \S+)?\s+([\d.]+)", _read(_DRIVER_VERSION) or "")
    found = Examination(
        facts=facts,
        driver=driver and driver[1],
        nccl=next(filter(None, map(package_version, _NCCL_PACKAGES)), None),
        proxies=sorted(name for name in environ if name.lower() in PROXIES and environ[name]),
        open_files=_limit(resource.RLIMIT_NOFILE),
        locked_kb=None if locked is None else locked // 1024,
        shm_mb=_free_mb("/dev/shm"),
        token=_read(token_file),
        free_disk_mb=_free_mb(facts["cache_dir"]) or 0,
    )
    return asdict(found)


def _limit(kind: int) -> int | None:
    soft, _ = resource.getrlimit(kind)
    return None if soft == resource.RLIM_INFINITY else soft


def _free_mb(path: str) -> int | None:
    """Returns the free space of a directory or of its nearest existing parent."""
    here = Path(path)
    if path == "/dev/shm" and not here.is_dir():
        return None
    found = os.statvfs(next(folder for folder in (here, *here.parents) if folder.is_dir()))
    return found.f_bavail * found.f_frsize // 10**6


def _read(path: str) -> str | None:
    try:
        return Path(path).read_text()
    except OSError:
        return None


_REMEDIES = {
    "permission denied": "Let ssh log in without a password: ssh-keygen, then ssh-copy-id {host}.",
    "host key verification failed": "Log in once by hand to check and accept its key: ssh {host}.",
    "could not resolve hostname": "Check its spelling in the hostfile; it must be known to ssh "
    "here.",
    "connection refused": "No ssh server listens there; start sshd, or give its port with "
    "--ssh-args '-p PORT'.",
    "timed out": "It is switched off, cut off, or a firewall drops ssh.",
    "no route to host": "It is switched off or cut off from the network.",
    "no such file or directory": "It needs the same Python environment at the same path as this "
    "host.",
    "not found": "It needs the same Python environment at the same path as this host.",
    "no module named": "tnt_jax must be installed there at the same path as on this host.",
    "no answer within": "It may be overloaded or waiting for a file system; try: ssh {host} true",
}


def find_remedy(host: str, reason: str) -> str:
    """Returns the usual remedy if a host cannot be reached for this reason; empty if unknown."""
    return next(
        (hint.format(host=host) for sign, hint in _REMEDIES.items() if sign in reason.lower()), ""
    )


def find_obstacles(facts: Mapping[str, Facts]) -> dict[str, str]:
    """Returns reason and remedy for each host that cannot take part, compared with the first."""
    reference = next(iter(facts.values()))
    expected = _versions(reference)
    obstacles = {}
    for host, found in facts.items():
        reasons, versions = [], _versions(found)
        if found.missing:
            reasons.append(
                f"There is no {' and no '.join(found.missing)} there. Is it spelled right, and is "
                "the directory shared?"
            )
        reasons += [
            f"{name} is {versions[name] or 'not installed'} there, but "
            f"{version or 'not installed'} on {reference.hostname}; install the same."
            for name, version in expected.items()
            if versions[name] != version
        ]
        if reasons:
            obstacles[host] = " ".join(reasons)
    return obstacles


def _versions(facts: Facts) -> dict[str, str | None]:
    return {"Python": facts.python.rpartition(".")[0], **facts.versions}


def find_missing_caches(facts: Mapping[str, Facts]) -> list[str]:
    """Returns a sentence for each host on which compiled programs cannot be kept."""
    return [
        f"Compiled programs are not kept on {host}: {found.no_cache_because}. Set XDG_CACHE_HOME "
        "to a directory of your own."
        for host, found in facts.items()
        if found.no_cache_because
    ]


def find_unreachable(facts: Mapping[str, Facts], device_kind: str) -> dict[str, str]:
    """Returns the reason and the remedy for each host that others cannot reach by its own name."""
    # CPU collectives (Gloo) listen on the address of the host's own name and would hang. GPU
    # collectives (NCCL) choose a network card instead.
    if device_kind != "cpu" or share_machine(facts.values()):
        return {}
    traps = {}
    for host, found in facts.items():
        if all(map(is_loopback, found.own_addresses)):
            name, resolved = found.hostname, ", ".join(found.own_addresses) or "no address"
            traps[host] = (
                f"Its own name, {name}, stands for {resolved} there, where no other host can reach "
                f"it. Give {name} its network address in DNS or in /etc/hosts on that host, where "
                f"Debian writes '127.0.1.1 {name}'."
            )
    return traps


def share_machine(facts: Iterable[Facts]) -> bool:
    """Returns whether hosts are one machine, as several nodes of a Ray cluster can be."""
    return len({found.machine for found in facts}) == 1


def choose_address(
    candidates: Sequence[str], reachable: Mapping[str, Sequence[str]]
) -> tuple[str, list[str]]:
    """Returns the first candidate that most hosts reach, and the hosts that do not reach it.

    Candidates are names and addresses of the first host, the preferred one first; `reachable` are
    those that each of the other hosts reaches.
    """
    best = max(
        candidates, key=lambda candidate: sum(candidate in found for found in reachable.values())
    )
    return best, [host for host, found in reachable.items() if best not in found]
