"""Kubernetes: detects the pods of an indexed Job or JobSet, and of Kubeflow's JAX jobs.

Kubernetes numbers the pods of an indexed job (`JOB_COMPLETION_INDEX`). The manifest must set their
number and the address of the first in `JAX_NUM_PROCESSES` and `JAX_COORDINATOR_ADDRESS`. The
environment is enough: the pods need no permission to query the cluster.
"""

from collections.abc import Mapping

from tnt_jax.cluster.job import Job, coordinator_address

_DEFAULT_PORT = 55527  # JAX's own default on Kubernetes.


def detect_kubernetes(environ: Mapping[str, str]) -> Job | None:
    """Returns the job of a pod that is one of several processes, otherwise None."""
    if environ.get("JAX_COORDINATOR_ADDRESS") and environ.get("JAX_NUM_PROCESSES"):
        # Kubeflow Trainer sets the third, a plain indexed job has the number of the pod.
        index = environ.get("JAX_PROCESS_ID") or environ.get("JOB_COMPLETION_INDEX")
        address = coordinator_address(environ, "", _DEFAULT_PORT)
        return _job(
            address, environ["JAX_NUM_PROCESSES"], index, "JAX_PROCESS_ID or JOB_COMPLETION_INDEX"
        )
    if (
        environ.get("KUBERNETES_SERVICE_HOST")
        and environ.get("COORDINATOR_ADDRESS")
        and environ.get("NUM_PROCESSES")
    ):
        # Kubeflow's JAXJob, the older of the two.
        address = (
            f"{environ['COORDINATOR_ADDRESS']}:{environ.get('COORDINATOR_PORT') or _DEFAULT_PORT}"
        )
        return _job(address, environ["NUM_PROCESSES"], environ.get("PROCESS_ID"), "PROCESS_ID")
    return None


def _job(address: str, num_processes: str, index: str | None, name: str) -> Job | None:
    if not index:
        raise ValueError(
            f"The environment names a coordinator and {num_processes} processes, but not the "
            f"number of this one: set {name}."
        )
    if int(num_processes) == 1:
        return None
    if not 0 <= int(index) < int(num_processes):
        raise ValueError(
            f"{name} ({index}) must be below the number of processes ({num_processes}). They are "
            "numbered from 0."
        )
    return Job(address, int(num_processes), int(index), None, "Kubernetes")
