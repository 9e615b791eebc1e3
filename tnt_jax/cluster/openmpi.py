"""Open MPI: detects processes that `mpirun` started, for versions 4 (ORTE) and 5 (PRRTE)."""

import re
from collections.abc import Mapping

from tnt_jax.cluster.job import GpuCounter, Job, choose_port, coordinator_address, own_devices


def detect_open_mpi(environ: Mapping[str, str], count_gpus: GpuCounter) -> Job | None:
    """Returns the job of a process that `mpirun` started with others, otherwise None.

    The processes of one host use its loopback address. Those of several hosts use the host on which
    `mpirun` runs, which must have rank 0; otherwise set `JAX_COORDINATOR_ADDRESS` to the host of
    rank 0.

    Raises:
        ValueError: If the environment does not say where `mpirun` runs.
    """
    if not environ.get("OMPI_COMM_WORLD_SIZE") or not environ.get("OMPI_COMM_WORLD_RANK"):
        return None
    num_processes = int(environ["OMPI_COMM_WORLD_SIZE"])
    if num_processes == 1:
        return None
    local_size = int(environ.get("OMPI_COMM_WORLD_LOCAL_SIZE") or 1)
    host, number = _mpirun(environ)
    return Job(
        coordinator_address=coordinator_address(
            environ, "127.0.0.1" if local_size == num_processes else host, choose_port(number)
        ),
        num_processes=num_processes,
        process_id=int(environ["OMPI_COMM_WORLD_RANK"]),
        local_device_ids=own_devices(
            environ,
            local_rank=int(environ.get("OMPI_COMM_WORLD_LOCAL_RANK") or 0),
            local_size=local_size,
            gpus_on_node=None,
            count_gpus=count_gpus,
        ),
        source="Open MPI",
    )


def _mpirun(environ: Mapping[str, str]) -> tuple[str, int]:
    """Returns the host of mpirun and a number that is unique to this job on that host."""
    # Version 4, for instance: 550567936.0;tcp://10.0.0.2,10.1.0.2:48563;tcp6://[fd00::2]:33393
    # The number of the job family is the upper half of the job's number.
    found = re.match(
        r"(\d+)\.\d+;tcp(?:://([^,:]+)|6://\[([^,\]]+))", environ.get("OMPI_MCA_orte_hnp_uri", "")
    )
    if found:
        return found[2] or f"[{found[3]}]", int(found[1]) >> 16
    # Version 5, for instance: prterun-node1-4711@1, after the host and the process id of mpirun.
    found = re.match(r"[^-]+-(.+)-(\d+)@(\d+)", environ.get("PMIX_NAMESPACE", ""))
    if found:
        return found[1], int(found[2])
    raise ValueError(
        "Open MPI started this process, but neither OMPI_MCA_orte_hnp_uri nor PMIX_NAMESPACE says "
        "on which host mpirun runs. Set JAX_COORDINATOR_ADDRESS=host:port to a free port of the "
        "host of rank 0: mpirun -x JAX_COORDINATOR_ADDRESS=..."
    )
