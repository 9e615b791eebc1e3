"""Checks the facts of the hosts before a job starts: pure functions."""

from collections.abc import Iterable, Mapping, Sequence

from tnt_jax.launch.planning.facts import Facts, is_loopback

_REMEDIES = {
    "permission denied": "Let ssh log in without a password: ssh-keygen, then ssh-copy-id {host}.",
    "host key verification failed": "Log in once by hand to check and accept its key: ssh {host}.",
    "could not resolve hostname": "Check its spelling in the hostfile; it must be known to ssh "
    "here.",
    "connection refused": "No ssh server listens there; start sshd, or give its port with "
    "--ssh-args '-p PORT'.",
    "timed out": "It is switched off, cut off, or a firewall drops ssh.",
    "no route to host": "It is switched off or cut off from the network.",
    "no such file or directory": "It needs the same Python environment at the same path as this "
    "host.",
    "not found": "It needs the same Python environment at the same path as this host.",
    "no module named": "tnt_jax must be installed there at the same path as on this host.",
    "no answer within": "It may be overloaded or waiting for a file system; try: ssh {host} true",
}


def find_remedy(host: str, reason: str) -> str:
    """Returns the usual remedy if a host cannot be reached for this reason; empty if unknown."""
    return next(
        (hint.format(host=host) for sign, hint in _REMEDIES.items() if sign in reason.lower()), ""
    )


def find_obstacles(facts: Mapping[str, Facts]) -> dict[str, str]:
    """Returns the reason and the remedy for each host that cannot take part.

    The first host is the one that the others are compared with.
    """
    reference = next(iter(facts.values()))
    expected = _versions(reference)
    obstacles = {}
    for host, found in facts.items():
        reasons = []
        if found.missing:
            reasons.append(
                f"There is no {' and no '.join(found.missing)} there. Is it spelled right, and is "
                "the directory shared?"
            )
        versions = _versions(found)
        reasons += [
            f"{name} is {versions[name] or 'not installed'} there, but "
            f"{version or 'not installed'} on {reference.hostname}; install the same."
            for name, version in expected.items()
            if versions[name] != version
        ]
        if reasons:
            obstacles[host] = " ".join(reasons)
    return obstacles


def _versions(facts: Facts) -> dict[str, str | None]:
    return {"Python": facts.python.rpartition(".")[0], **facts.versions}


def find_missing_caches(facts: Mapping[str, Facts]) -> list[str]:
    """Returns a sentence for each host on which compiled programs cannot be kept."""
    return [
        f"Compiled programs are not kept on {host}: {found.no_cache_because}. Set XDG_CACHE_HOME "
        "to a directory of your own."
        for host, found in facts.items()
        if found.no_cache_because
    ]


def find_unreachable(facts: Mapping[str, Facts], device_kind: str) -> dict[str, str]:
    """Returns the reason and the remedy for each host that others cannot reach by its own name.

    CPU collectives (Gloo) listen on the address of the host's own name and would hang. GPU
    collectives (NCCL) choose a network card instead.
    """
    if device_kind != "cpu" or share_machine(facts.values()):
        return {}
    traps = {}
    for host, found in facts.items():
        if all(map(is_loopback, found.own_addresses)):
            name, resolved = found.hostname, ", ".join(found.own_addresses) or "no address"
            traps[host] = (
                f"Its own name, {name}, stands for {resolved} there, where no other host can reach "
                f"it. Give {name} its network address in DNS or in /etc/hosts on that host, where "
                f"Debian writes '127.0.1.1 {name}'."
            )
    return traps


def share_machine(facts: Iterable[Facts]) -> bool:
    """Returns whether hosts are one machine, as several nodes of a Ray cluster can be."""
    return len({found.machine for found in facts}) == 1


def choose_address(
    candidates: Sequence[str], reachable: Mapping[str, Sequence[str]]
) -> tuple[str, list[str]]:
    """Returns the first candidate that most hosts reach, and the hosts that do not reach it.

    Candidates are names and addresses of the first host, the preferred one first; `reachable` are
    those that each of the other hosts reaches.
    """
    best = max(
        candidates, key=lambda candidate: sum(candidate in found for found in reachable.values())
    )
    return best, [host for host, found in reachable.items() if best not in found]
