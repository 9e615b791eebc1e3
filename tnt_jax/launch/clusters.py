"""Which job this process belongs to, read from the environment alone."""

from collections.abc import Mapping
from dataclasses import dataclass

from tnt_jax.settings import read_settings


@dataclass(frozen=True)
class Job:
    """A job of several processes, as one of them sees it.

    Attributes:
        coordinator_address: `host:port` of process 0.
        num_processes: Processes of the job.
        process_id: Number of this process, from 0.
        local_device_ids: Devices of the host that this process may use; None for all that it sees.
        source: What named the job, for messages.
    """

    coordinator_address: str
    num_processes: int
    process_id: int
    local_device_ids: list[int] | None
    source: str


def detect_job(environ: Mapping[str, str]) -> Job | None:
    """Returns the job that the environment names, or None for a process on its own."""
    settings = read_settings(environ)
    if settings.coordinator_address is None or settings.num_processes is None or settings.process_id is None:
        return None
    return Job(settings.coordinator_address, settings.num_processes, settings.process_id, None, "TNT_COORDINATOR_ADDRESS")
