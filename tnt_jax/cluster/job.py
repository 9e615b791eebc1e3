"""The position of a process in a job, and the port and devices that some clusters leave open."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

# The end of the dynamic ports (RFC 6335), which Linux by default does not use for outgoing
# connections.
_FIRST_PORT = 61440
_NUM_PORTS = 4096
# More than any machine has: variables that ask for more are wrong, and would exhaust the memory.
MOST_PROCESSES = 2**20
GpuCounter = Callable[[Mapping[str, str]], int]


@dataclass(frozen=True)
class Job:
    """Settings with which a process joins its job.

    Attributes:
        coordinator_address: `host:port` where process 0 listens.
        process_id: Number of this process, `0 <= process_id < num_processes`.
        local_device_ids: Indices, among the visible devices, of those that this process owns; None
            for all.
        source: Where this comes from, for messages: "Ray Train", "TNT_*", "TF_CONFIG", "Open MPI",
            "SLURM" or "Kubernetes".
    """

    coordinator_address: str
    num_processes: int
    process_id: int
    local_device_ids: tuple[int, ...] | None
    source: str

    def __post_init__(self) -> None:
        """Checks the numbers, which come from variables that anything may have set."""
        if not 0 <= self.process_id < self.num_processes <= MOST_PROCESSES:
            raise ValueError(
                f"{self.source} names process {self.process_id} of {self.num_processes}, but "
                "processes are numbered from 0 to below their number, which is "
                f"{MOST_PROCESSES} at most. Correct the variables of {self.source}."
            )


def choose_port(number: int) -> int:
    """Returns a port that all processes derive from a number they share, such as the job's id."""
    return _FIRST_PORT + number % _NUM_PORTS


def coordinator_address(environ: Mapping[str, str], host: str, port: int) -> str:
    """Returns the coordinator's address; JAX's own variables override those of the cluster."""
    given = environ.get("JAX_COORDINATOR_ADDRESS")
    if given and given.rpartition(":")[2].isdigit():
        return given
    return f"{given or host}:{environ.get('JAX_COORDINATOR_PORT') or port}"


def given_devices(environ: Mapping[str, str]) -> tuple[int, ...] | None:
    """Returns what `JAX_LOCAL_DEVICE_IDS` says; None if it is not set."""
    given = environ.get("JAX_LOCAL_DEVICE_IDS")
    return tuple(int(number) for number in given.split(",")) if given else None


def own_devices(
    environ: Mapping[str, str],
    *,
    local_rank: int,
    local_size: int,
    gpus_on_node: int | None,
    count_gpus: GpuCounter,
) -> tuple[int, ...] | None:
    """Returns which of the visible GPUs this process owns; None for all visible devices.

    JAX chooses the GPU whose index is the local rank. That fails if each task sees only its own
    GPU, as index 0 (jax#23452), and if a task has several. Here, a process that sees fewer GPUs
    than its node has owns all of them; processes that see all GPUs divide them evenly.

    `gpus_on_node` GPUs are those that the cluster gives the job on this node, None if unknown.
    `JAX_LOCAL_DEVICE_IDS` takes precedence; `JAX_PLATFORMS=cpu` means no GPU.
    """
    given = given_devices(environ)
    if given is not None:
        return given
    if local_size == 1 or environ.get("JAX_PLATFORMS", "").split(",")[0] == "cpu":
        return None
    visible = count_gpus(environ)
    if visible <= 1 or (gpus_on_node is not None and visible < gpus_on_node):
        return None
    if visible < local_size:
        # More processes than GPUs: neighbours share one (jax#29669).
        return (local_rank * visible // local_size,)
    return tuple(
        range(local_rank * visible // local_size, (local_rank + 1) * visible // local_size)
    )
