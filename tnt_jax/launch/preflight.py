"""What must be true of the hosts before a job may start: pure functions of what the hosts told about themselves."""

from collections.abc import Mapping, Sequence

from tnt_jax.launch.facts import Facts, is_loopback

_REMEDIES = {
    "permission denied": "Let ssh log in without a password: ssh-keygen, then ssh-copy-id {host}.",
    "host key verification failed": "Log in once by hand to check and accept its key: ssh {host}.",
    "could not resolve hostname": "Check its spelling in the hostfile; it must be known to ssh here.",
    "connection refused": "No ssh server listens there; start sshd, or give its port with --ssh-args '-p PORT'.",
    "timed out": "It is switched off, cut off, or a firewall drops ssh.",
    "no route to host": "It is switched off or cut off from the network.",
    "no such file or directory": "It needs the same Python environment at the same path as this host.",
    "not found": "It needs the same Python environment at the same path as this host.",
    "no module named": "tnt_jax must be installed there at the same path as on this host.",
    "no answer within": "It may be overloaded or waiting for a file system; try: ssh {host} true",
}


def find_remedy(host: str, reason: str) -> str:
    """Returns what usually helps when a host cannot be talked to for this reason; empty if that is not known."""
    return next((hint.format(host=host) for sign, hint in _REMEDIES.items() if sign in reason.lower()), "")


def find_obstacles(facts: Mapping[str, Facts]) -> dict[str, str]:
    """Returns for each host that cannot take part the reason and the remedy.

    Args:
        facts: What each host told, by its name; the first is what the others are compared with.
    """
    reference = next(iter(facts.values()))
    obstacles = {}
    for host, found in facts.items():
        reasons = [*_missing(found), *_differences(reference, found)]
        if reasons:
            obstacles[host] = " ".join(reasons)
    return obstacles


def _missing(facts: Facts) -> list[str]:
    if not facts.missing:
        return []
    return [f"There is no {' and no '.join(facts.missing)} there. Is it spelled right, and is the directory shared?"]


def _differences(reference: Facts, facts: Facts) -> list[str]:
    expected, found = _versions(reference), _versions(facts)
    return [
        f"{name} is {found[name] or 'not installed'} there, but {version or 'not installed'} on {reference.hostname}; install the same."
        for name, version in expected.items()
        if found[name] != version
    ]


def _versions(facts: Facts) -> dict[str, str | None]:
    return {"Python": facts.python.rpartition(".")[0], **facts.versions}


def find_unreachable(facts: Mapping[str, Facts], device_kind: str) -> dict[str, str]:
    """Returns for each host whose own name leads nowhere for other hosts the reason and the remedy.

    Collectives between CPUs (Gloo) listen on the address of the host's own name and would wait for one another for ever.
    Those between GPUs (NCCL) choose a network card instead.
    """
    if device_kind != "cpu":
        return {}
    return {host: _loopback(found) for host, found in facts.items() if all(map(is_loopback, found.own_addresses))}


def _loopback(facts: Facts) -> str:
    resolved = ", ".join(facts.own_addresses) or "no address"
    return (
        f"Its own name, {facts.hostname}, stands for {resolved} there, where no other host can reach it. "
        f"Give {facts.hostname} its network address in DNS or in /etc/hosts on that host, "
        f"where Debian writes '127.0.1.1 {facts.hostname}'."
    )


def choose_address(candidates: Sequence[str], reachable: Mapping[str, Sequence[str]]) -> tuple[str, list[str]]:
    """Returns the first candidate that most hosts reach, and the hosts that do not reach it.

    Args:
        candidates: Names and addresses of the first host, the preferred one first.
        reachable: Those candidates that each of the other hosts reaches.
    """
    best = max(candidates, key=lambda candidate: sum(candidate in found for found in reachable.values()))
    return best, [host for host, found in reachable.items() if best not in found]
