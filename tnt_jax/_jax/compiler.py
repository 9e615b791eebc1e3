"""Options of the compiler, which come and go with its versions."""

import importlib.metadata
import os
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, SingleDeviceSharding


def convolution_options(mesh: Mesh) -> dict[str, Any]:
    """Returns the compiler options that make convolutions faster on the devices of `mesh`.

    Results differ by rounding.
    """
    devices = [
        device for device in mesh.devices.flat if device.process_index == jax.process_index()
    ]
    # YNNPACK's convolutions keep hardly more than one core busy; on one core they are the faster
    # ones.
    has_more_cores = mesh.devices.flat[0].platform == "cpu" and _num_cores() > len(devices)
    return _without_ynn_convolutions() if has_more_cores else {}


def _num_cores() -> int:
    """Returns the number of processor cores that this process may use.

    The launcher writes each process's share to `OMP_NUM_THREADS`.
    """
    allowed = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    share = os.environ.get("OMP_NUM_THREADS", "")
    return min(allowed, int(share)) if share.isdigit() else allowed


# Versions of jaxlib that know the option below; others are asked, which takes a compilation.
_WITH_YNN = ("0.10.0", "0.10.2", "0.12.0.1")


# Depends on the version of XLA alone, so that it outlives the job.
@cache
def _without_ynn_convolutions() -> dict[str, Any]:
    # Experimental. Checked with JAX 0.10.0 to 0.12.0; a version without it does without. XLA hands
    # wide convolutions on CPUs to YNNPACK, which is slower there than Eigen
    # (benchmarks/convolutions.py). The option names the kinds of operations that are left to it:
    # the default without convolutions.
    kinds = "LIBRARY_FUSION_TYPE_INDIVIDUAL_DOT,LIBRARY_FUSION_TYPE_REDUCE"
    options: dict[str, Any] = {"xla_cpu_experimental_ynn_fusion_type": kinds}
    if importlib.metadata.version("jaxlib") in _WITH_YNN:
        return options
    number = jax.ShapeDtypeStruct(
        (), jnp.float32, sharding=SingleDeviceSharding(jax.local_devices(backend="cpu")[0])
    )
    try:
        jax.jit(lambda x: x).lower(number).compile(compiler_options=options)
    except jax.errors.JaxRuntimeError as error:
        # An experimental option goes when its time has come.
        if "xla_cpu_experimental_ynn_fusion_type" not in str(error):
            raise
        return {}
    return options


def options_of_one_run() -> dict[str, Any]:
    """Returns the compiler options for a program of the default device that runs once.

    On CPUs the compiler then spends a third of the time or less on random numbers. From JAX 0.12
    on, these differ by rounding.
    """
    return {"xla_backend_optimization_level": 1} if jax.default_backend() == "cpu" else {}


def deterministic_options(mesh: Mesh) -> dict[str, Any]:
    """Returns the compiler options that make every run on `mesh` give the same bits."""
    # It implies xla_gpu_exclude_nondeterministic_ops, and chooses kernels by rule instead of by
    # measuring them.
    return (
        {"xla_gpu_deterministic_ops": True}
        if mesh.devices.flat[0].platform in ("gpu", "cuda")
        else {}
    )
