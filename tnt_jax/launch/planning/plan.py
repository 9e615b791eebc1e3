"""Turns hosts, devices and options into a list of processes: pure functions."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tnt_jax.launch.planning.environment import Launch, process_environment
from tnt_jax.launch.planning.facts import Facts
from tnt_jax.launch.planning.options import Options

# More would exhaust the memory of the launcher.
_MOST_DEVICES = 4096
# Runs a script up to the end of its first fit.
_ENTRY = "tnt_jax.launch.entry"


@dataclass(frozen=True)
class Host:
    """A host of the job, by the name that the user gave it.

    Attributes:
        slots: Number of devices that the hostfile grants on it; None for no limit.
        is_remote: Whether processes there start from the environment of a login, not from the
            launcher's.
    """

    name: str
    facts: Facts
    slots: int | None = None
    is_remote: bool = False


@dataclass(frozen=True)
class Devices:
    """How many devices of which kind ("gpu" or "cpu") each host has in the job."""

    kind: str
    per_host: tuple[int, ...]
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True)
class Process:
    """One process to start.

    Attributes:
        environment: Variables in addition to those of the host.
        exports: The user's own variables, set after these, with `$NAME` expanded on the host.
        shown: Which of its streams reach the user's screen: "stdout", "stderr".
        log_file: File on the host that gets both streams, or None.
        terminals: Which of its streams are terminals, so that progress bars work: those shown alone
            on a terminal.
        processors: Processors of the host on which it runs; empty for any.
        is_elastic: Whether it talks to the launcher, which forms the job's generations.
    """

    rank: int
    local_rank: int
    host: str
    command: tuple[str, ...]
    cwd: str
    environment: Mapping[str, str]
    exports: tuple[tuple[str, str], ...]
    shown: tuple[str, ...]
    log_file: str | None = None
    terminals: tuple[str, ...] = ()
    columns: int = 80
    processors: tuple[int, ...] = ()
    is_elastic: bool = False


def choose_devices(hosts: Sequence[Host], options: Options) -> Devices:
    """Returns how many devices of which kind each host contributes.

    Without a number, a host contributes all its GPUs, or one CPU process if no host has GPUs. With
    a number, it contributes that many GPUs, or that many CPU processes if no host has enough GPUs.
    A warning says that CPUs replace GPUs, unless the user asked for CPUs, or the hosts have neither
    GPUs nor a JAX that supports them.

    Raises:
        ValueError: If the hostfile and the options give different numbers, or if only some hosts
            have the GPUs.
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

    Raises:
        ValueError: If the devices of a host cannot be divided evenly among
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
            environment = process_environment(
                launch,
                options,
                host.facts,
                rank=rank,
                num_processes=launch.num_parts * sum(counts),
                processes_on_host=count,
                local_devices=range(first, end),
                device_kind=devices.kind,
                is_single_host=len(hosts) * launch.num_parts == 1,
                is_remote=host.is_remote,
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
        entry = ("-m", _ENTRY) if options.ends_early else ()
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
