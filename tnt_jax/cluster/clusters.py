"""Detects which job a process belongs to, whatever started it."""

from collections.abc import Mapping

from tnt_jax.cluster.devices import count_gpus
from tnt_jax.cluster.job import GpuCounter, Job
from tnt_jax.cluster.kubernetes import detect_kubernetes
from tnt_jax.cluster.openmpi import detect_open_mpi
from tnt_jax.cluster.ray import detect_ray_train
from tnt_jax.cluster.slurm import detect_slurm
from tnt_jax.cluster.tfconfig import detect_tf_config
from tnt_jax.on_ray.worker import role
from tnt_jax.settings import read_settings

__all__ = ["Job", "detect_job"]


def detect_job(environ: Mapping[str, str], *, count_gpus: GpuCounter = count_gpus) -> Job | None:
    """Returns the job that this process belongs to, or None for a process that trains alone.

    A worker of Ray Train or a trial of Ray Tune belongs to the job that Ray says; the environment,
    which it inherits from whatever started Ray, does not count. Elsewhere the first of these that
    describes a job of several processes counts: `TNT_*` variables, `TF_CONFIG`, Open MPI (which may
    run inside SLURM), SLURM, Kubernetes. JAX's own
    `JAX_COORDINATOR_ADDRESS`, `JAX_COORDINATOR_PORT` and `JAX_LOCAL_DEVICE_IDS` override what Open
    MPI, SLURM and Kubernetes say.

    Args:
        environ: The environment of the process.
        count_gpus: Counts the GPUs visible to a process with this environment; called only where
            several processes of SLURM or Open MPI share a host and may share its GPUs.

    Raises:
        ValueError: If variables contradict each other, are incomplete, or describe something that
            cannot be trained on; the message names them.
    """
    if role() is not None:
        return detect_ray_train()
    return (
        _detect_tnt(environ)
        or detect_tf_config(environ)
        or detect_open_mpi(environ, count_gpus)
        or detect_slurm(environ, count_gpus)
        or detect_kubernetes(environ)
    )


def _detect_tnt(environ: Mapping[str, str]) -> Job | None:
    settings = read_settings(environ)
    if settings.coordinator_address is None:
        return None
    assert settings.num_processes is not None
    assert settings.process_id is not None
    given = environ.get("JAX_LOCAL_DEVICE_IDS")
    devices = tuple(int(number) for number in given.split(",")) if given else None
    return Job(
        settings.coordinator_address, settings.num_processes, settings.process_id, devices, "TNT_*"
    )
