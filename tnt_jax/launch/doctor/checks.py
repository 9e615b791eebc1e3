"""Judges examinations of hosts: pure functions that return findings with remedies."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tnt_jax.launch.doctor.examine import Examination
from tnt_jax.launch.planning.facts import Facts
from tnt_jax.launch.planning.preflight import find_obstacles, find_unreachable

OK, WARNING, FAILURE = "ok", "warning", "FAILURE"
_MOST_SKEW_S = 2.0
_FEWEST_FILES = 4096
_LEAST_SHM_MB = 1000
_LEAST_DISK_MB = 1000
# Status, detail and remedy of a `Finding`.
_Judgement = tuple[str, str, str]


@dataclass(frozen=True)
class Finding:
    """One line of the doctor's table.

    With status "warning" training works, but perhaps not well, with "FAILURE" it does not work. The
    remedy is empty if all is well.
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
        skews_s: By how much each host's clock is ahead of the launcher's, and the uncertainty.
    """
    all_facts = {host: Facts.from_json(found.facts) for host, found in hosts.items()}
    obstacles = find_obstacles(all_facts)
    traps = find_unreachable(all_facts, "cpu") if len(hosts) > 1 else {}
    findings = []
    for host, found in hosts.items():
        facts = all_facts[host]
        judgements = {
            "installation": _installation(facts, obstacles.get(host, "")),
            "own name": _own_name(facts, traps.get(host, "")),
            "devices": _devices(facts, found),
            "proxies": _proxies(found),
            "limits": _limits(found),
            "space": _space(found),
            "directory": _directory(found, token),
            "clock": _clock(*skews_s[host]),
        }
        findings += [Finding(host, topic, *said) for topic, said in judgements.items() if said]
    return findings


def _installation(facts: Facts, obstacle: str) -> _Judgement:
    versions = ", ".join(
        f"{name} {version or 'missing'}" for name, version in facts.versions.items()
    )
    detail = f"Python {facts.python}, {versions}"
    if obstacle:
        return FAILURE, detail, obstacle
    if facts.versions["jax"] is None:
        return FAILURE, detail, "Install the package there: pip install tnt-jax"
    return OK, detail, ""


def _own_name(facts: Facts, trap: str) -> _Judgement:
    detail = f"{facts.hostname} is {', '.join(facts.own_addresses) or 'unknown'}"
    if not trap:
        return OK, detail, ""
    # Collectives between GPUs do not need the name.
    return (WARNING if facts.num_gpus and facts.has_cuda_jax else FAILURE), detail, trap


def _devices(facts: Facts, found: Examination) -> _Judgement:
    detail = f"{facts.num_gpus} GPU(s), {facts.num_cores} cores"
    if facts.num_gpus:
        detail += f", driver {found.driver or 'unknown'}, NCCL {found.nccl or 'not from pip'}"
    if facts.num_gpus and not facts.has_cuda_jax:
        return WARNING, detail, "JAX cannot use the GPUs: pip install 'jax[cuda13]'"
    if found.driver and not facts.num_gpus:
        remedy = "A driver is loaded but no GPU can be used: look at nvidia-smi -L."
        return WARNING, detail, remedy
    return OK, detail, ""


def _proxies(found: Examination) -> _Judgement:
    if not found.proxies:
        return OK, "none", ""
    remedy = "tnt-jax exempts the coordinator; if processes still wait for one another, unset them."
    return WARNING, ", ".join(found.proxies), remedy


def _limits(found: Examination) -> _Judgement:
    files = found.open_files
    detail = f"open files {files or 'unlimited'}, locked memory {found.locked_kb or 'unlimited'} kB"
    if files is not None and files < _FEWEST_FILES:
        remedy = f"Data loading may run out of files: ulimit -n {_FEWEST_FILES}"
        return WARNING, detail, remedy
    return OK, detail, ""


def _space(found: Examination) -> _Judgement:
    detail = f"/dev/shm {found.shm_mb} MB, caches {found.free_disk_mb} MB free"
    if found.shm_mb is None or found.shm_mb < _LEAST_SHM_MB:
        remedy = (
            "NCCL and data loaders exchange data through /dev/shm: mount a larger one (docker run "
            "--shm-size=8g)."
        )
        return WARNING, detail, remedy
    if found.free_disk_mb < _LEAST_DISK_MB:
        remedy = "Free some space, or set JAX_COMPILATION_CACHE_DIR to another disk."
        return WARNING, detail, remedy
    return OK, detail, ""


def _directory(found: Examination, token: str) -> _Judgement | None:
    if not token:
        detail = "the launcher cannot write to its working directory"
        return WARNING, detail, "Run from a directory of your own."
    if found.token == token:
        return OK, "the working directory is the same", ""
    if any(missing.startswith("directory") for missing in found.facts["missing"]):
        return None  # The installation has failed because of that.
    remedy = (
        "Copy the script and the data to each host, or run from a shared file system; the "
        "master alone writes results."
    )
    return WARNING, "the working directory is another one of the same name", remedy


def _clock(skew_s: float, uncertainty_s: float) -> _Judgement:
    detail = f"{skew_s:+.2f} s (+-{uncertainty_s:.2f} s)"
    if abs(skew_s) - uncertainty_s > _MOST_SKEW_S:
        remedy = "Times in logs will not match; run a time service such as chrony."
        return WARNING, detail, remedy
    return OK, detail, ""


def judge_reachability(reached: Mapping[str, Mapping[str, Sequence[str]]]) -> list[Finding]:
    """Returns a finding for each host on the addresses at which each other host reached it."""
    return [Finding(host, "reachable", *_reachable(others)) for host, others in reached.items()]


def _reachable(others: Mapping[str, Sequence[str]]) -> _Judgement:
    missed = [other for other, addresses in others.items() if not addresses]
    if missed:
        remedy = (
            "Open the ports between the hosts of a job; a firewall or another network is in "
            "between."
        )
        return FAILURE, f"not from {', '.join(missed)}", remedy
    used = sorted({addresses[0] for addresses in others.values()})
    return OK, f"at {', '.join(used)}" if used else "no other host", ""
