"""Which hosts, with how many devices each, a number of ranks is run on."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from tnt_jax.launch.planning.hostfile import HostEntry
from tnt_jax.launch.planning.options import Options, Scale
from tnt_jax.launch.planning.plan import Devices, Host, choose_devices
from tnt_jax.launch.planning.preflight import find_obstacles
from tnt_jax.launch.run import ask_facts, check, open_session


@dataclass(frozen=True)
class Layout:
    """Where a number of ranks runs.

    Attributes:
        entries: The hosts.
        per_host: Devices of each.
    """

    entries: tuple[HostEntry, ...]
    per_host: int


def choose_layouts(
    entries: Sequence[HostEntry], options: Options, scale: Scale, environ: Mapping[str, str]
) -> dict[int, Layout]:
    """Returns where each number of ranks runs; connects to all hosts once to find out.

    Args:
        entries: The hosts to use.
        options: The options of the command line.
        scale: What to measure.
        environ: The launcher's environment.

    Raises:
        ValueError: If a number of ranks does not fit the hosts.
        HostError: If hosts cannot take part; the message names each with the reason.
    """
    if len(entries) == 1 and entries[0].slots is None and options.devices_per_node is None:
        options = replace(options, devices_per_node=scale.ranks[-1])
    with open_session(entries, options) as session:
        facts = ask_facts(session, options, environ)
        check(find_obstacles(facts))
    hosts = [
        Host(entry.name, facts[entry.name], entry.slots, not entry.is_local) for entry in entries
    ]
    devices = choose_devices(hosts, options)
    _check_kind(hosts, devices, options)
    return {ranks: lay_out(ranks, entries, devices.per_host) for ranks in scale.ranks}


def lay_out(ranks: int, entries: Sequence[HostEntry], per_host: Sequence[int]) -> Layout:
    """Returns the first hosts, with equally many devices each, that have so many devices.

    Args:
        ranks: Number of devices to use.
        entries: The hosts.
        per_host: Devices of each.

    Raises:
        ValueError: If the hosts have too few devices, or cannot share the ranks evenly.
    """
    total, most = sum(per_host), per_host[0]
    if ranks > total:
        raise ValueError(
            f"--ranks {ranks} needs as many devices, but the {len(entries)} host(s) have {total} "
            "together. Name more hosts, say how many each has with slots=N in the hostfile or with "
            "--devices-per-node, or leave the number out."
        )
    if ranks <= most:
        return Layout((replace(entries[0], slots=None),), ranks)
    used = -(-ranks // most)
    if ranks % most or any(number != most for number in per_host[:used]):
        raise ValueError(
            f"--ranks {ranks} cannot be shared evenly by hosts with "
            f"{', '.join(map(str, per_host))} device(s): above {most}, name multiples of {most} "
            "that whole hosts have."
        )
    return Layout(tuple(replace(entry, slots=None) for entry in entries[:used]), most)


def _check_kind(hosts: Sequence[Host], devices: Devices, options: Options) -> None:
    """Raises a ValueError where CPUs would take the place of GPUs, of which there are too few."""
    found = {host.name: host.facts.num_gpus for host in hosts if host.facts.num_gpus}
    if options.use_gpus and devices.kind == "cpu" and found:
        listed = ", ".join(f"{name} has {number}" for name, number in found.items())
        raise ValueError(
            f"There are too few GPUs for the numbers of ranks ({listed}, as far as JAX can use "
            "them). Name smaller numbers, or measure CPUs with --no-gpu."
        )
