"""The doctor's examination of a host, run on that host."""

import os
import re
import resource
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from tnt_jax.launch.planning.facts import inspect_host, package_version

_DRIVER_VERSION = Path("/proc/driver/nvidia/version")
_NCCL_PACKAGES = ("nvidia-nccl-cu13", "nvidia-nccl-cu12")
_PROXIES = ("http_proxy", "https_proxy", "all_proxy", "grpc_proxy")


@dataclass(frozen=True)
class Examination:
    """The result of a host's examination, in addition to its `Facts`.

    Attributes:
        driver, nccl: Versions of the NVIDIA driver and of NCCL's Python package, or None.
        proxies: Names of the proxy variables that are set.
        open_files, locked_kb: Limits on what a process may open and lock; None for no limit.
        shm_mb: Free space of /dev/shm, in MB; None if there is no such directory.
        token: Content of the file that the launcher has just written to the working directory, or
            None if it is not there.
        free_disk_mb: Free space on the disk of the compilation cache, in MB.
    """

    facts: dict[str, Any]
    driver: str | None
    nccl: str | None
    proxies: list[str]
    open_files: int | None
    locked_kb: int | None
    shm_mb: int | None
    token: str | None
    free_disk_mb: int

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "Examination":
        """Returns the examination from plain data."""
        return cls(**{field.name: data[field.name] for field in fields(cls)})


def examine(request: Mapping[str, Any], token_file: str) -> dict[str, Any]:
    """Returns this host's `Examination` as plain data; the request is for `inspect_host`."""
    environ = {**os.environ, **request["environment"]}
    facts = inspect_host(**request)
    locked = _limit(resource.RLIMIT_MEMLOCK)
    found = Examination(
        facts=facts,
        driver=_driver_version(),
        nccl=next(filter(None, map(package_version, _NCCL_PACKAGES)), None),
        proxies=sorted(name for name in environ if name.lower() in _PROXIES and environ[name]),
        open_files=_limit(resource.RLIMIT_NOFILE),
        locked_kb=None if locked is None else locked // 1024,
        shm_mb=_free_mb("/dev/shm"),
        token=_read(token_file),
        free_disk_mb=_free_mb(facts["cache_dir"]) or 0,
    )
    return asdict(found)


def read_clock() -> float:
    """Returns the host's clock, in seconds since 1970."""
    return time.time()


def _driver_version() -> str | None:
    found = re.search(r"Kernel Module(?: for \S+)?\s+([\d.]+)", _read(str(_DRIVER_VERSION)) or "")
    return found[1] if found else None


def _limit(kind: int) -> int | None:
    soft, _ = resource.getrlimit(kind)
    return None if soft == resource.RLIM_INFINITY else soft


def _free_mb(path: str) -> int | None:
    """Returns the free space of a directory or of its nearest existing parent."""
    here = Path(path)
    if path == "/dev/shm" and not here.is_dir():
        return None
    while not here.is_dir():
        here = here.parent
    found = os.statvfs(here)
    return found.f_bavail * found.f_frsize // 10**6


def _read(path: str) -> str | None:
    try:
        return Path(path).read_text()
    except OSError:
        return None
