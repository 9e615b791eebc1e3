"""The environment of a job's processes: what they inherit from the launcher's shell and what the launcher sets."""

import os
from collections.abc import Mapping, Sequence

from tnt_jax.launch.facts import Facts
from tnt_jax.launch.job import Job
from tnt_jax.launch.options import Options

_CARRIED_NAMES = (
    "PATH", "PYTHONPATH", "LD_LIBRARY_PATH", "VIRTUAL_ENV", "CONDA_PREFIX", "CONDA_DEFAULT_ENV", "GLIBC_TUNABLES",
)  # fmt: skip
_CARRIED_PREFIXES = ("TNT_", "XLA_", "JAX_", "TF_", "NCCL_", "KERAS_", "PYTHON", "PJRT_", "OMP_", "tf_")
_THREADS_OF_LIBRARIES = ("OMP_NUM_THREADS", "TF_NUM_INTRAOP_THREADS")


def carried_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Returns the variables of the launcher's shell that processes on other hosts get, too."""
    return {
        name: value for name, value in sorted(environ.items()) if name in _CARRIED_NAMES or name.startswith(_CARRIED_PREFIXES)
    }


def process_environment(
    *,
    facts: Facts,
    device_kind: str,
    local_devices: Sequence[int],
    rank: int,
    num_processes: int,
    processes_on_host: int,
    single_host: bool,
    options: Options,
    job_id: str,
    coordinator_address: str,
    environ: Mapping[str, str],
    launched_at: float,
) -> dict[str, str]:
    """Returns the variables of one process on top of its host's own.

    Variables that divide the machine (threads) or keep caches are defaults: one that the user's shell sets is left alone.

    Args:
        facts: What the host told about itself.
        device_kind: "gpu" or "cpu".
        local_devices: Numbers of the devices of this process on its host.
        rank: Number of the process in the job.
        num_processes: Processes of the job.
        processes_on_host: Processes on this host.
        single_host: Whether all processes are on one host.
        options: The user's options.
        job_id: Name of the job.
        coordinator_address: `host:port` of process 0.
        environ: Environment of the launcher.
        launched_at: When the launcher began, in seconds since 1970.
    """
    threads = max(1, facts.num_cores // processes_on_host)
    on_cpu = device_kind == "cpu"
    return {
        **_defaults(facts, options, environ, threads=threads, num_cpu_devices=len(local_devices) if on_cpu else 0),
        **(_cpu_devices(len(local_devices)) if on_cpu else _gpu_devices(facts, local_devices, num_processes)),
        "TNT_LAUNCHED_AT": f"{launched_at:.3f}",
        "TNT_JOB_ID": job_id,
        **_place(coordinator_address, num_processes, rank),
        # By default the coordinator listens to the whole network.
        **({"JAX_COORDINATOR_BIND_ADDRESS": coordinator_address} if single_host else {}),
        **_path(facts, environ),
        **_direct_connections(environ, coordinator_address),
        **_library_options(options),
    }


def task_environment(job: Job, *, facts: Facts, options: Options, environ: Mapping[str, str]) -> dict[str, str]:
    """Returns the variables of a process that a cluster has started, on top of those that the cluster gave it.

    The cluster has bound the process to its processors and often to its GPUs.

    Args:
        job: The process's place in the job.
        facts: What its host is like, seen from the process.
        options: The user's options.
        environ: Environment that the cluster gave the process.
    """
    on_cpu = not options.use_gpus
    devices = () if job.local_device_ids is None else job.local_device_ids
    return {
        **_defaults(facts, options, environ, threads=facts.num_cores, num_cpu_devices=1 if on_cpu else 0),
        **(_cpu_devices(1) if on_cpu else {"JAX_LOCAL_DEVICE_IDS": ",".join(map(str, devices))} if devices else {}),
        **_place(job.coordinator_address, job.num_processes, job.process_id),
        **_path(facts, environ),
        **_direct_connections(environ, job.coordinator_address),
        **_library_options(options),
    }


def _defaults(
    facts: Facts, options: Options, environ: Mapping[str, str], *, threads: int, num_cpu_devices: int
) -> dict[str, str]:
    defaults = {
        "PYTHONUNBUFFERED": "1",
        "PYTHONFAULTHANDLER": "1",
        **{name: str(threads) for name in _THREADS_OF_LIBRARIES},
        **_cache(facts, options),
        **({**_cpu_threads(threads, num_cpu_devices), **_huge_pages()} if num_cpu_devices else {}),
    }
    return {name: value for name, value in defaults.items() if not environ.get(name)}


def _place(coordinator_address: str, num_processes: int, rank: int) -> dict[str, str]:
    return {
        "TNT_COORDINATOR_ADDRESS": coordinator_address,
        "TNT_NUM_PROCESSES": str(num_processes),
        "TNT_PROCESS_ID": str(rank),
    }


def _path(facts: Facts, environ: Mapping[str, str]) -> dict[str, str]:
    if facts.package_root is None:
        return {}
    return {"PYTHONPATH": os.pathsep.join(filter(None, [facts.package_root, environ.get("PYTHONPATH")]))}


def _cache(facts: Facts, options: Options) -> dict[str, str]:
    if not options.compilation_cache:
        return {}
    # A home directory can be shared by hosts of which some do not know the instructions of others.
    return {"JAX_COMPILATION_CACHE_DIR": os.path.join(facts.cache_dir, "tnt_jax", f"compilation-{facts.cpu_kind}")}


def _cpu_threads(threads: int, num_devices: int) -> dict[str, str]:
    # XLA's thread pool must have twice as many threads as devices: with fewer, an all-reduce of which some devices wait for
    # others that have not been started can stop for ever.
    return {"PJRT_NPROC": str(max(threads, 2 * num_devices))}


def _huge_pages() -> dict[str, str]:
    # XLA gets the memory of each step anew from glibc, and the kernel clears it page by page (benchmarks/convolutions.py).
    return {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}


def _cpu_devices(num_devices: int) -> dict[str, str]:
    return {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(num_devices)}


def _gpu_devices(facts: Facts, local_devices: Sequence[int], num_processes: int) -> dict[str, str]:
    if num_processes == 1:
        # JAX_LOCAL_DEVICE_IDS is read by processes that join others, and this one has none.
        return {"CUDA_VISIBLE_DEVICES": ",".join(facts.gpus[number] for number in local_devices)}
    return {"JAX_LOCAL_DEVICE_IDS": ",".join(map(str, local_devices))}


def _direct_connections(environ: Mapping[str, str], coordinator_address: str) -> dict[str, str]:
    """Exempts the coordinator from proxies, which would make the processes wait for ever for one another."""
    if not any(name.lower() in ("http_proxy", "https_proxy", "all_proxy", "grpc_proxy") for name in environ):
        return {}
    host = coordinator_address.rpartition(":")[0]
    exempt = environ.get("no_proxy") or environ.get("NO_PROXY") or ""
    value = ",".join(filter(None, [exempt, host]))
    return {"no_proxy": value, "NO_PROXY": value}


def _library_options(options: Options) -> dict[str, str]:
    chosen: dict[str, str] = {}
    if options.log_level is not None:
        chosen["TNT_LOG_LEVEL"] = options.log_level
    if options.log_on_all_devices:
        chosen["TNT_LOG_ON_ALL_DEVICES"] = "1"
    if options.output_on_all_devices:
        chosen["TNT_OUTPUT_ON_ALL_DEVICES"] = "1"
    if options.fusion_threshold_kb is not None:
        chosen["TNT_FUSION_THRESHOLD"] = str(options.fusion_threshold_kb)
    if options.tune_steps is not None:
        chosen["TNT_TUNE_STEPS"] = str(options.tune_steps)
    return chosen
