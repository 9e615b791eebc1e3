"""Detects which job a process belongs to, whatever started it."""

import json
import re
from collections.abc import Mapping
from typing import Any

from tnt_jax.cluster.devices import count_gpus
from tnt_jax.cluster.job import (
    GpuCounter,
    Job,
    choose_port,
    coordinator_address,
    given_devices,
    own_devices,
)
from tnt_jax.cluster.ray import detect_ray_train
from tnt_jax.cluster.slurm import detect_slurm
from tnt_jax.on_ray.worker import role
from tnt_jax.settings import read_settings

__all__ = ["Job", "detect_job"]

# TensorFlow's own order: the chief, once called master, comes first.
_TF_KINDS = ("chief", "master", "worker")
_KUBERNETES_PORT = 55527  # JAX's own default on Kubernetes.


def detect_job(environ: Mapping[str, str], *, count_gpus: GpuCounter = count_gpus) -> Job | None:
    """Returns the job that this process belongs to, or None for a process that trains alone.

    A worker of Ray Train or a trial of Ray Tune belongs to the job that Ray says; the environment,
    which it inherits from whatever started Ray, does not count. Elsewhere the first of these that
    describes a job of several processes counts: `TNT_*` variables, `TF_CONFIG`, Open MPI (which may
    run inside SLURM), SLURM, Kubernetes. JAX's own `JAX_COORDINATOR_ADDRESS`,
    `JAX_COORDINATOR_PORT` and `JAX_LOCAL_DEVICE_IDS` override what Open MPI, SLURM and Kubernetes
    say.

    The GPUs are counted only where several processes of SLURM or Open MPI share a host and may
    share its GPUs.

    Raises:
        ValueError: If variables contradict each other, are incomplete, or describe something that
            cannot be trained on; the message names them.
    """
    if role() is not None:
        return detect_ray_train()
    return (
        _detect_tnt(environ)
        or _detect_tf_config(environ)
        or _detect_open_mpi(environ, count_gpus)
        or detect_slurm(environ, count_gpus)
        or _detect_kubernetes(environ)
    )


def _detect_tnt(environ: Mapping[str, str]) -> Job | None:
    settings = read_settings(environ)
    if settings.coordinator_address is None:
        return None
    assert settings.num_processes is not None
    assert settings.process_id is not None
    return Job(
        settings.coordinator_address,
        settings.num_processes,
        settings.process_id,
        given_devices(environ),
        "TNT_*",
    )


def _detect_tf_config(environ: Mapping[str, str]) -> Job | None:
    """Returns the job of a TensorFlow multi-worker cluster description."""
    text = environ.get("TF_CONFIG")
    if not text:
        return None
    cluster, task = _parse_tf_config(text)
    if cluster.get("ps"):
        raise ValueError(
            "TF_CONFIG has parameter servers (ps), but the processes of such a job all hold the "
            "same weights and sum their gradients, as with TensorFlow's "
            "MultiWorkerMirroredStrategy. Leave the ps entries out and start workers only, or "
            "train with tnt_jax.ParameterServer on a Ray cluster, which needs no TF_CONFIG."
        )
    if not any(cluster.get(kind) for kind in _TF_KINDS):
        return None
    kind, index = task.get("type"), task.get("index")
    if (
        kind not in _TF_KINDS
        or not isinstance(index, int)
        or not 0 <= index < len(cluster.get(kind, []))
    ):
        raise ValueError(
            f"TF_CONFIG's task must be one of the cluster's {', '.join(_TF_KINDS)} entries, for "
            f'instance {{"type": "worker", "index": 0}}, but is {json.dumps(task)}. An '
            "evaluator is not needed: evaluate() runs on all processes."
        )
    addresses = [address for each in _TF_KINDS for address in cluster.get(each, [])]
    if len(addresses) == 1:
        return None
    before = sum(len(cluster.get(each, [])) for each in _TF_KINDS[: _TF_KINDS.index(kind)])
    return Job(addresses[0], len(addresses), before + index, None, "TF_CONFIG")


def _parse_tf_config(text: str) -> tuple[dict[str, list[str]], dict[str, Any]]:
    try:
        config = json.loads(text)
        return config.get("cluster") or {}, config.get("task") or {}
    except (json.JSONDecodeError, AttributeError, RecursionError) as error:
        raise ValueError(
            'TF_CONFIG must be JSON such as {"cluster": {"worker": ["host1:port", '
            '"host2:port"]}, "task": {"type": "worker", '
            f'"index": 0}}}}, but is {text!r:.200}.'
        ) from error


def _detect_open_mpi(environ: Mapping[str, str], count_gpus: GpuCounter) -> Job | None:
    """Returns the job of a process that `mpirun` started, of version 4 (ORTE) or 5 (PRRTE).

    The processes of one host use its loopback address. Those of several hosts use the host on which
    `mpirun` runs, which must have rank 0; otherwise set `JAX_COORDINATOR_ADDRESS` to the host of
    rank 0.
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


def _detect_kubernetes(environ: Mapping[str, str]) -> Job | None:
    """Returns the job of a pod of an indexed Job or JobSet, or of Kubeflow's JAX jobs.

    Kubernetes numbers the pods of an indexed job (`JOB_COMPLETION_INDEX`); the manifest must set
    `JAX_NUM_PROCESSES` and `JAX_COORDINATOR_ADDRESS`. The environment is enough: the pods need no
    permission to query the cluster.
    """
    if environ.get("JAX_COORDINATOR_ADDRESS") and environ.get("JAX_NUM_PROCESSES"):
        address = coordinator_address(environ, "", _KUBERNETES_PORT)
        num_processes = environ["JAX_NUM_PROCESSES"]
        # Kubeflow Trainer sets the first, a plain indexed job has the number of the pod.
        index = environ.get("JAX_PROCESS_ID") or environ.get("JOB_COMPLETION_INDEX")
        name = "JAX_PROCESS_ID or JOB_COMPLETION_INDEX"
    elif (
        environ.get("KUBERNETES_SERVICE_HOST")
        and environ.get("COORDINATOR_ADDRESS")
        and environ.get("NUM_PROCESSES")
    ):
        # Kubeflow's JAXJob, the older of the two.
        port = environ.get("COORDINATOR_PORT") or _KUBERNETES_PORT
        address = f"{environ['COORDINATOR_ADDRESS']}:{port}"
        num_processes = environ["NUM_PROCESSES"]
        index, name = environ.get("PROCESS_ID"), "PROCESS_ID"
    else:
        return None
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
