"""Turns hosts, devices and options into a list of processes with their environments.

All functions are pure. The environment of a process is inherited from the shell or set here.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tnt_jax.cluster.clusters import Job
from tnt_jax.launch.planning.facts import PROXIES, Facts
from tnt_jax.launch.planning.options import Options

# More would exhaust the memory of the launcher.
_MOST_DEVICES = 4096
PLUGIN_PATH = str(Path(__file__).parents[2] / "distributed" / "plugin_path")
"""Directory of `jax_plugins.tnt_jax_join`; on other hosts the package is at the same path."""

SECRET = "TNT_JOB_SECRET"
"""Variable that holds what only the processes of the job know."""
_CARRIED_NAMES = (
    "PATH PYTHONPATH LD_LIBRARY_PATH VIRTUAL_ENV CONDA_PREFIX CONDA_DEFAULT_ENV GLIBC_TUNABLES"
).split()
_CARRIED_PREFIXES = tuple("TNT_ XLA_ JAX_ TF_ NCCL_ KERAS_ PYTHON PJRT_ OMP_ tf_".split())
# What describes a host or a login there, and what Ray sets for the process that it starts.
_NAMES_OF_A_HOST = ("HOME USER LOGNAME SHELL HOSTNAME TMPDIR DISPLAY CUDA_VISIBLE_DEVICES").split()
_PREFIXES_OF_A_HOST = tuple("RAY_ SSH_ XDG_ DBUS_ SLURM_ OMPI_ PMIX_".split())
_THREADS_OF_LIBRARIES = ("OMP_NUM_THREADS", "TF_NUM_INTRAOP_THREADS")


@dataclass(frozen=True)
class Launch:
    """Settings that the processes of a job have in common."""

    job_id: str
    coordinator_address: str  # `host:port` where process 0 listens.
    cwd: str
    environ: Mapping[str, str]  # That of the launcher.
    launched_at: float  # When the launcher began, in seconds since 1970.
    terminals: tuple[str, ...] = ()  # Which of its own "stdout" and "stderr" are terminals.
    columns: int = 80
    # Of so many launchers like this one, with as many processes each, that a cluster has started
    # for the job, the number of this one.
    num_parts: int = 1
    part: int = 0
    restart_count: int = 0
    # What only the processes of the job know; empty if several launchers start them.
    secret: str = field(default="", repr=False)


@dataclass(frozen=True)
class Host:
    """A host of the job, by the name that the user gave it."""

    name: str
    facts: Facts
    slots: int | None = None  # Devices that the hostfile grants on it; None for no limit.
    # Whether processes there start from the environment of a login, not from the launcher's.
    is_remote: bool = False


@dataclass(frozen=True)
class Devices:
    """How many devices of which kind ("gpu" or "cpu") each host has in the job."""

    kind: str
    per_host: tuple[int, ...]
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True)
class Process:
    """One process to start."""

    rank: int
    local_rank: int
    host: str
    command: tuple[str, ...]
    cwd: str
    environment: Mapping[str, str]  # Variables in addition to those of the host.
    # The user's own variables, set after these, with `$NAME` expanded on the host.
    exports: tuple[tuple[str, str], ...]
    shown: tuple[str, ...]  # Which of "stdout" and "stderr" reach the user's screen.
    log_file: str | None = None  # File on the host that gets both streams.
    # Which streams are terminals, so that progress bars work: those shown alone on a terminal.
    terminals: tuple[str, ...] = ()
    columns: int = 80
    processors: tuple[int, ...] = ()  # Those of the host on which it runs; empty for any.
    is_elastic: bool = False  # Whether it talks to the launcher, which forms the generations.


def choose_devices(hosts: Sequence[Host], options: Options) -> Devices:
    """Returns how many devices of which kind each host contributes.

    Without a number, a host contributes all its GPUs, or one CPU process if no host has GPUs. With
    a number, it contributes that many GPUs, or that many CPU processes if no host has enough GPUs.
    A warning says that CPUs replace GPUs, unless the user asked for CPUs, or the hosts have neither
    GPUs nor a JAX that supports them. Raises a ValueError if the hostfile and the options give
    different numbers, or if only some hosts have the GPUs.
    """
    wanted = [_wanted(host, options) for host in hosts]
    if not options.use_gpus:
        return Devices("cpu", tuple(number or 1 for number in wanted))
    usable = [len(host.facts.gpus) if host.facts.has_cuda_jax else 0 for host in hosts]
    enough = [have >= (number or 1) for have, number in zip(usable, wanted, strict=True)]
    if not any(enough):
        return Devices("cpu", tuple(number or 1 for number in wanted), _gpu_warnings(hosts, wanted))
    counts = tuple(number or have for number, have in zip(wanted, usable, strict=True))
    if not all(enough) or (None in wanted and len(set(counts)) > 1):
        listed = ", ".join(
            f"{host.name} has {have}" for host, have in zip(hosts, usable, strict=True)
        )
        raise ValueError(
            f"The hosts differ in the GPUs that JAX can use there: {listed}. Say how many to use "
            "on each with --devices-per-node or with slots=N in the hostfile, leave hosts out, or "
            "use CPUs only with --no-gpu."
        )
    return Devices("gpu", counts)


def _wanted(host: Host, options: Options) -> int | None:
    asked = options.devices_per_node
    if asked is not None and host.slots is not None and asked != host.slots:
        raise ValueError(
            f"The hostfile grants {host.slots} devices on {host.name} (slots={host.slots}), but "
            f"the command line asks for {asked} on each host. Leave one of the two out."
        )
    wanted = host.slots if asked is None else asked
    if wanted is not None and wanted > _MOST_DEVICES:
        raise ValueError(f"A host has {_MOST_DEVICES} devices at most, but {wanted} are asked for.")
    return wanted


def _gpu_warnings(hosts: Sequence[Host], wanted: Sequence[int | None]) -> tuple[str, ...]:
    warnings = [
        f"{host.name} has {len(host.facts.gpus)} GPU(s), but the JAX installed there cannot use "
        "them; install jax[cuda13]."
        for host in hosts
        if host.facts.gpus and not host.facts.has_cuda_jax
    ]
    pairs = zip(hosts, wanted, strict=True)
    short = [pair for pair in pairs if len(pair[0].facts.gpus) < (pair[1] or 1)]
    if short and any(host.facts.gpus or host.facts.has_cuda_jax for host in hosts):
        host, number = short[0]
        where = "" if len(hosts) == 1 else f" on {host.name}"
        what = f"{number} available GPUs per node as requested" if number else "any GPU"
        ranks = f"{number} ranks" if number and number > 1 else "1 rank"
        warnings.append(f"Cannot find {what}{where}; using {ranks} on CPUs instead.")
    return tuple(warnings)


def plan_processes(
    hosts: Sequence[Host], devices: Devices, options: Options, launch: Launch
) -> list[Process]:
    """Returns the processes of a job, host by host, so that neighbouring ranks are on one host.

    Raises a ValueError if the devices of a host cannot be divided evenly among
    `options.processes_per_node`, or if processes cannot be pinned to the sockets of a host.
    """
    counts = [
        _processes_on(host, number, options)
        for host, number in zip(hosts, devices.per_host, strict=True)
    ]
    processes: list[Process] = []
    for host, count, num_devices in zip(hosts, counts, devices.per_host, strict=True):
        for local_rank in range(count):
            rank = launch.part * sum(counts) + len(processes)
            first = local_rank * num_devices // count
            end = (local_rank + 1) * num_devices // count
            environment = _process_environment(
                launch,
                options,
                host,
                rank=rank,
                num_processes=launch.num_parts * sum(counts),
                processes_on_host=count,
                local_devices=range(first, end),
                device_kind=devices.kind,
                is_single_host=len(hosts) * launch.num_parts == 1,
            )
            pinning = _pinning(host, local_rank, count, options)
            is_bound = devices.kind == "cpu" and not pinning
            processes.append(
                Process(
                    rank=rank,
                    local_rank=local_rank,
                    host=host.name,
                    command=(*pinning, *script_command(options, launch.cwd)),
                    cwd=launch.cwd,
                    environment=environment,
                    exports=options.exports,
                    shown=_shown(rank, options),
                    log_file=_log_file(rank, options, launch),
                    terminals=_terminals(rank, options, launch),
                    columns=launch.columns,
                    processors=_own_processors(host, local_rank, count) if is_bound else (),
                    is_elastic=options.elastic,
                )
            )
    return processes


def _processes_on(host: Host, num_devices: int, options: Options) -> int:
    count = options.processes_per_node or num_devices
    if num_devices % count:
        raise ValueError(
            f"--processes-per-node ({count}) must divide the number of devices on {host.name} "
            f"({num_devices}), so that each process drives equally many."
        )
    return count


def script_command(options: Options, cwd: str) -> tuple[str, ...]:
    """Returns the words that run the user's script."""
    if options.interpreter:
        # It runs a script up to the end of its first fit.
        entry = ("-m", "tnt_jax.launch.entry") if options.ends_early else ()
        return (*options.interpreter, *entry, options.script, *options.script_args)
    return (os.path.join(cwd, options.script), *options.script_args)


def _pinning(host: Host, local_rank: int, count: int, options: Options) -> tuple[str, ...]:
    if not options.pin_to_socket:
        return ()
    nodes = host.facts.numa_nodes
    if host.facts.numactl is None:
        raise FileNotFoundError(
            f"--pin-to-socket needs the program numactl on {host.name}; install it there."
        )
    if not nodes or count > len(nodes):
        raise ValueError(
            f"--pin-to-socket needs a socket (NUMA node) for each process, but {host.name} has "
            f"{len(nodes)} for {count} processes. Start fewer processes, or leave the option out."
        )
    memory = "--membind" if options.pin_memory_to_socket else "--preferred"
    node = nodes[local_rank]
    return (host.facts.numactl, f"--cpunodebind={node}", f"{memory}={node}")


def _own_processors(host: Host, local_rank: int, count: int) -> tuple[int, ...]:
    """Returns a process's share of the processors; none if they cannot be shared evenly."""
    # Elsewhere the threads of one process hold up the other, on whose processor they come to run
    # (benchmarks/scaling.py).
    processors = host.facts.processors
    share, rest = divmod(len(processors), count)
    if count == 1 or rest:
        return ()
    return processors[local_rank * share : (local_rank + 1) * share]


def _shown(rank: int, options: Options) -> tuple[str, ...]:
    if rank == 0 or options.output_on_all_devices:
        return ("stdout", "stderr")
    return ("stderr",) if options.log_on_all_devices else ()


def _terminals(rank: int, options: Options, launch: Launch) -> tuple[str, ...]:
    """Returns which streams are shown alone on a terminal, where progress bars work."""
    if rank or options.output_on_all_devices:
        return ()
    shared = ("stderr",) if options.log_on_all_devices else ()
    return tuple(name for name in launch.terminals if name not in shared)


def _log_file(rank: int, options: Options, launch: Launch) -> str | None:
    if not options.log_dir:
        return None
    attempt = f".restart{launch.restart_count}" if launch.restart_count else ""
    return os.path.join(launch.cwd, options.log_dir, f"rank{rank}{attempt}.log")


def carried_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Returns the variables of the launcher's shell that processes on other hosts get, too."""
    return {
        name: value
        for name, value in sorted(environ.items())
        if name in _CARRIED_NAMES or name.startswith(_CARRIED_PREFIXES)
    }


def _environment_on_ray(environ: Mapping[str, str]) -> dict[str, str]:
    """Returns the variables of the launcher's shell that processes on a Ray cluster get, too."""
    return {
        name: value
        for name, value in sorted(environ.items())
        if name not in _NAMES_OF_A_HOST and not name.startswith(_PREFIXES_OF_A_HOST)
    }


def _process_environment(
    launch: Launch,
    options: Options,
    host: Host,
    *,
    rank: int,
    num_processes: int,
    processes_on_host: int,
    local_devices: Sequence[int],
    device_kind: str,
    is_single_host: bool,
) -> dict[str, str]:
    """Returns the variables of one process in addition to those of its host."""
    environ, address, facts = launch.environ, launch.coordinator_address, host.facts
    num_cpu_devices = len(local_devices) if device_kind == "cpu" else 0
    threads = max(1, len(facts.processors) // processes_on_host)
    carries = carried_environment if options.ray_address is None else _environment_on_ray
    return {
        **(carries(environ) if host.is_remote else {}),
        **_defaults(facts, options, environ, threads, num_cpu_devices),
        **(
            _cpu_devices(num_cpu_devices)
            if num_cpu_devices
            else _gpu_devices(facts, local_devices, num_processes)
        ),
        "TNT_LAUNCHED_AT": f"{launch.launched_at:.3f}",
        "TNT_JOB_ID": launch.job_id,
        "TNT_RESTART_COUNT": str(launch.restart_count),
        **_job_variables(address, num_processes, rank),
        # By default the coordinator listens on all network interfaces.
        **({"JAX_COORDINATOR_BIND_ADDRESS": address} if is_single_host else {}),
        **_path(facts, environ, num_processes),
        **_direct_connections(environ, address),
        **_library_options(options),
        **({SECRET: launch.secret} if launch.secret else {}),
    }


def task_environment(
    job: Job, *, facts: Facts, options: Options, environ: Mapping[str, str]
) -> dict[str, str]:
    """Returns the variables of a process that a cluster has started.

    They are added to those of the cluster, which has bound the process to its processors and often
    to its GPUs; `facts` are those of its host as seen by the process.
    """
    ids = ",".join(map(str, job.local_device_ids or ()))
    gpu_devices = {"JAX_LOCAL_DEVICE_IDS": ids} if ids else {}
    return {
        **_defaults(facts, options, environ, len(facts.processors), int(not options.use_gpus)),
        **(gpu_devices if options.use_gpus else _cpu_devices(1)),
        **_job_variables(job.coordinator_address, job.num_processes, job.process_id),
        **_path(facts, environ, job.num_processes),
        **_direct_connections(environ, job.coordinator_address),
        **_library_options(options),
    }


def _defaults(
    facts: Facts, options: Options, environ: Mapping[str, str], threads: int, num_cpu_devices: int
) -> dict[str, str]:
    """Returns what divides the machine (threads) or keeps caches, but not what the shell sets."""
    defaults = {
        "PYTHONUNBUFFERED": "1",
        "PYTHONFAULTHANDLER": "1",
        # On import, TensorFlow logs what its binary was built for, and that there is no GPU.
        "TF_CPP_MIN_LOG_LEVEL": "1",
        **{name: str(threads) for name in _THREADS_OF_LIBRARIES},
        **_cache(facts, options),
    }
    if num_cpu_devices:
        # XLA's thread pool must have twice as many threads as devices that wait for one another
        # within the process. With fewer, an all-reduce can hang, because some devices wait for
        # others that have not started. More threads than cores cost time (benchmarks/scaling.py).
        needed = 2 * num_cpu_devices if num_cpu_devices > 1 else 1
        defaults["PJRT_NPROC"] = str(max(threads, needed))
        # XLA allocates the memory of each step anew, and the kernel clears it page by page
        # (benchmarks/convolutions.py).
        defaults["GLIBC_TUNABLES"] = "glibc.malloc.hugetlb=1"
    return {name: value for name, value in defaults.items() if not environ.get(name)}


def _job_variables(coordinator_address: str, num_processes: int, rank: int) -> dict[str, str]:
    return {
        "TNT_COORDINATOR_ADDRESS": coordinator_address,
        "TNT_NUM_PROCESSES": str(num_processes),
        "TNT_PROCESS_ID": str(rank),
    }


def _path(facts: Facts, environ: Mapping[str, str], num_processes: int) -> dict[str, str]:
    # There JAX finds the plugin that joins the job as soon as any code asks for JAX's devices.
    plugin = PLUGIN_PATH if num_processes > 1 else None
    if plugin is None and facts.package_root is None:
        return {}
    paths = [plugin, facts.package_root, environ.get("PYTHONPATH")]
    return {"PYTHONPATH": os.pathsep.join(filter(None, paths))}


def _cache(facts: Facts, options: Options) -> dict[str, str]:
    if not options.compilation_cache or not facts.cache_dir:
        return {}
    # Hosts with different instruction sets can share a home directory.
    folder = os.path.join(facts.cache_dir, "tnt_jax", f"compilation-{facts.cpu_kind}")
    return {
        "JAX_COMPILATION_CACHE_DIR": folder,
        # A model has many programs that take less than the second from which JAX keeps them.
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.1",
    }


def _cpu_devices(num_devices: int) -> dict[str, str]:
    return {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(num_devices)}


def _gpu_devices(facts: Facts, local_devices: Sequence[int], num_processes: int) -> dict[str, str]:
    if num_processes == 1:
        # Only processes that join others read JAX_LOCAL_DEVICE_IDS, and this one is alone.
        return {"CUDA_VISIBLE_DEVICES": ",".join(facts.gpus[number] for number in local_devices)}
    return {"JAX_LOCAL_DEVICE_IDS": ",".join(map(str, local_devices))}


def _direct_connections(environ: Mapping[str, str], coordinator_address: str) -> dict[str, str]:
    """Exempts the coordinator from proxies, with which the processes would hang."""
    if not any(name.lower() in PROXIES for name in environ):
        return {}
    host = coordinator_address.rpartition(":")[0]
    exempt = environ.get("no_proxy") or environ.get("NO_PROXY") or ""
    value = ",".join(filter(None, [exempt, host]))
    return {"no_proxy": value, "NO_PROXY": value}


def _library_options(options: Options) -> dict[str, str]:
    directory, scale, explain = options.checkpoint_dir, options.scale, options.explain
    record_as, record_steps = options.recording or (None, None)
    runs = scale or (options.verify if record_steps else None)
    chosen = {
        "TNT_LOG_LEVEL": options.log_level,
        "TNT_LOG_ON_ALL_DEVICES": "1" if options.log_on_all_devices else None,
        "TNT_OUTPUT_ON_ALL_DEVICES": "1" if options.output_on_all_devices else None,
        "TNT_FUSION_THRESHOLD": options.fusion_threshold_kb,
        "TNT_TUNE_STEPS": options.tune_steps,
        "TNT_PLAN": "1" if options.is_plan else None,
        "TNT_TIMELINE": options.timeline,
        # On other hosts processes may start in another directory.
        "TNT_CHECKPOINT_DIR": None if directory is None else os.path.abspath(directory),
        "TNT_CHECKPOINT_EVERY": options.checkpoint_every,
        "TNT_EXPLAIN_STEPS": explain and explain.steps,
        "TNT_EXPLAIN_ROUNDS": explain and explain.rounds,
        "TNT_SCALE_STEPS": scale and scale.steps,
        "TNT_SCALE_FROM": runs and runs.ranks[0],
        "TNT_SCALE_WEAK": scale and int(scale.is_weak),
        "TNT_RECORD_AS": record_as,
        "TNT_RECORD_STEPS": record_steps,
    }
    variables = {name: str(value) for name, value in chosen.items() if value is not None}
    if scale or explain or record_steps:
        # What is measured is no run of the user's, so that it must not be noted as one.
        not_noted = dict.fromkeys(("TNT_CHECKPOINT_DIR", "TNT_GOODPUT", "TNT_TIMELINE"), "")
        variables = not_noted | variables
    return variables
