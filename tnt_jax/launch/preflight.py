"""What must be true of the hosts before a job may start, as a pure function of what they told about themselves."""

from collections.abc import Mapping

from tnt_jax.launch.facts import Facts


def find_obstacles(facts: Mapping[str, Facts]) -> list[str]:
    """Returns a line for each reason why a job cannot run on these hosts, with the remedy; empty if there is none.

    Args:
        facts: What each host told, by its name; the first is compared with the others.
    """
    obstacles = [_missing(host, found) for host, found in facts.items() if found.missing]
    obstacles += _differences(facts)
    if len(facts) > 1:
        obstacles += [_loopback(host, found) for host, found in facts.items() if is_loopback(found)]
    return obstacles


def is_loopback(facts: Facts) -> bool:
    """Returns whether the host's own name stands for an address that no other host can reach, or for none."""
    return all(address.startswith("127.") or address == "::1" for address in facts.own_addresses)


def _missing(host: str, facts: Facts) -> str:
    return f"{host}: there is no {' and no '.join(facts.missing)}. Is the working directory shared, and is it spelled so there?"


def _differences(facts: Mapping[str, Facts]) -> list[str]:
    differences = []
    reference, *others = facts
    for host in others:
        expected, found = _versions(facts[reference]), _versions(facts[host])
        for name, version in expected.items():
            if found[name] != version:
                differences.append(
                    f"{host}: {name} is {found[name] or 'not installed'} there, but {version or 'not installed'} on {reference}. "
                    "Install the same version on all hosts."
                )
    return differences


def _versions(facts: Facts) -> dict[str, str | None]:
    return {"Python": facts.python.rpartition(".")[0], **facts.versions}


def _loopback(host: str, facts: Facts) -> str:
    resolved = ", ".join(facts.own_addresses) or "no address"
    return (
        f"{host}: its own name {facts.hostname} stands for {resolved} there, which other hosts cannot reach. "
        f"Give {facts.hostname} its network address in /etc/hosts on that host."
    )
