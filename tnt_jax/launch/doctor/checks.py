"""Judges examinations of hosts: pure functions that return findings with remedies."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from tnt_jax.launch.doctor.examine import Examination
from tnt_jax.launch.planning.facts import Facts
from tnt_jax.launch.planning.preflight import find_obstacles, find_unreachable

OK, WARNING, FAILURE = "ok", "warning", "FAILURE"
_MOST_SKEW_S = 2.0
_FEWEST_FILES = 4096
_LEAST_SHM_MB = 1000
_LEAST_DISK_MB = 1000


@dataclass(frozen=True)
class Finding:
    """One line of the doctor's table.

    Attributes:
        host: The host concerned.
        topic: What was checked.
        status: "ok", "warning" (training works, but perhaps not well) or "FAILURE" (training does
            not work).
        detail: What was found.
        remedy: What to do; empty if all is well.
    """

    host: str
    topic: str
    status: str
    detail: str
    remedy: str = ""


def judge(
    hosts: Mapping[str, Examination], *, token: str, skews_s: Mapping[str, tuple[float, float]]
) -> list[Finding]:
    """Returns the findings about each host.

    Args:
        hosts: The examination of each host, by name.
        token: What the launcher wrote to the working directory; empty if that failed.
        skews_s: For each host, by how many seconds its clock is ahead of the launcher's, and the
            uncertainty.
    """
    findings = [*_installation(hosts), *_names(hosts)]
    for host, found in hosts.items():
        findings += [finding for check in _CHECKS for finding in check(host, found)]
        findings += _directory(host, found, token)
        findings.append(_clock(host, *skews_s[host]))
    return sorted(findings, key=lambda finding: list(hosts).index(finding.host))


def _installation(hosts: Mapping[str, Examination]) -> Iterator[Finding]:
    facts = {host: Facts.from_json(found.facts) for host, found in hosts.items()}
    obstacles = find_obstacles(facts)
    for host, found in facts.items():
        versions = ", ".join(
            f"{name} {version or 'missing'}" for name, version in found.versions.items()
        )
        detail = f"Python {found.python}, {versions}"
        if host in obstacles:
            yield Finding(host, "installation", FAILURE, detail, obstacles[host])
        elif found.versions["jax"] is None:
            yield Finding(
                host,
                "installation",
                FAILURE,
                detail,
                "Install the package there: pip install tnt-jax",
            )
        else:
            yield Finding(host, "installation", OK, detail)


def _names(hosts: Mapping[str, Examination]) -> Iterator[Finding]:
    facts = {host: Facts.from_json(found.facts) for host, found in hosts.items()}
    traps = find_unreachable(facts, "cpu") if len(hosts) > 1 else {}
    for host, found in facts.items():
        detail = f"{found.hostname} is {', '.join(found.own_addresses) or 'unknown'}"
        # Collectives between GPUs do not need the name.
        status = WARNING if found.num_gpus and found.has_cuda_jax else FAILURE
        if host not in traps:
            status = OK
        yield Finding(host, "own name", status, detail, traps.get(host, ""))


def _devices(host: str, found: Examination) -> Iterator[Finding]:
    facts = Facts.from_json(found.facts)
    versions = (
        f", driver {found.driver or 'unknown'}, NCCL {found.nccl or 'not from pip'}"
        if facts.num_gpus
        else ""
    )
    detail = f"{facts.num_gpus} GPU(s), {facts.num_cores} cores{versions}"
    if facts.num_gpus and not facts.has_cuda_jax:
        yield Finding(
            host, "devices", WARNING, detail, "JAX cannot use the GPUs: pip install 'jax[cuda13]'"
        )
    elif found.driver and not facts.num_gpus:
        yield Finding(
            host,
            "devices",
            WARNING,
            detail,
            "A driver is loaded but no GPU can be used: look at nvidia-smi -L.",
        )
    else:
        yield Finding(host, "devices", OK, detail)


def _proxies(host: str, found: Examination) -> Iterator[Finding]:
    if found.proxies:
        remedy = (
            "tnt-jax exempts the coordinator; if processes still wait for one another, unset them."
        )
        yield Finding(host, "proxies", WARNING, ", ".join(found.proxies), remedy)
    else:
        yield Finding(host, "proxies", OK, "none")


def _limits(host: str, found: Examination) -> Iterator[Finding]:
    files = found.open_files
    detail = f"open files {files or 'unlimited'}, locked memory {found.locked_kb or 'unlimited'} kB"
    if files is not None and files < _FEWEST_FILES:
        yield Finding(
            host,
            "limits",
            WARNING,
            detail,
            f"Data loading may run out of files: ulimit -n {_FEWEST_FILES}",
        )
    else:
        yield Finding(host, "limits", OK, detail)


def _space(host: str, found: Examination) -> Iterator[Finding]:
    detail = f"/dev/shm {found.shm_mb} MB, caches {found.free_disk_mb} MB free"
    if found.shm_mb is None or found.shm_mb < _LEAST_SHM_MB:
        remedy = (
            "NCCL and data loaders exchange data through /dev/shm: mount a larger one (docker run "
            "--shm-size=8g)."
        )
        yield Finding(host, "space", WARNING, detail, remedy)
    elif found.free_disk_mb < _LEAST_DISK_MB:
        yield Finding(
            host,
            "space",
            WARNING,
            detail,
            "Free some space, or set JAX_COMPILATION_CACHE_DIR to another disk.",
        )
    else:
        yield Finding(host, "space", OK, detail)


def _directory(host: str, found: Examination, token: str) -> Iterator[Finding]:
    if not token:
        yield Finding(
            host,
            "directory",
            WARNING,
            "the launcher cannot write to its working directory",
            "Run from a directory of your own.",
        )
    elif found.token == token:
        yield Finding(host, "directory", OK, "the working directory is the same")
    elif not any(missing.startswith("directory") for missing in found.facts["missing"]):
        remedy = (
            "Copy the script and the data to each host, or run from a shared file system; the "
            "master alone writes results."
        )
        yield Finding(
            host,
            "directory",
            WARNING,
            "the working directory is another one of the same name",
            remedy,
        )


def _clock(host: str, skew_s: float, uncertainty_s: float) -> Finding:
    detail = f"{skew_s:+.2f} s (+-{uncertainty_s:.2f} s)"
    if abs(skew_s) - uncertainty_s > _MOST_SKEW_S:
        return Finding(
            host,
            "clock",
            WARNING,
            detail,
            "Times in logs will not match; run a time service such as chrony.",
        )
    return Finding(host, "clock", OK, detail)


def judge_reachability(reached: Mapping[str, Mapping[str, Sequence[str]]]) -> list[Finding]:
    """Returns a finding for each host on whether all others can connect to it.

    Args:
        reached: For each host, the names and addresses at which each other host reached it.
    """
    findings = []
    for host, others in reached.items():
        missed = [other for other, addresses in others.items() if not addresses]
        if missed:
            remedy = (
                "Open the ports between the hosts of a job; a firewall or another network is in "
                "between."
            )
            findings.append(
                Finding(host, "reachable", FAILURE, f"not from {', '.join(missed)}", remedy)
            )
        else:
            used = sorted({addresses[0] for addresses in others.values()})
            findings.append(
                Finding(host, "reachable", OK, f"at {', '.join(used)}" if used else "no other host")
            )
    return findings


_CHECKS: tuple[Callable[[str, Examination], Iterator[Finding]], ...] = (
    _devices,
    _proxies,
    _limits,
    _space,
)
