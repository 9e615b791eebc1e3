"""`tnt-jax doctor`: examines hosts, judges what it finds with remedies, and writes reports."""

import argparse
import dataclasses
import json
import platform
import re
import secrets
import shlex
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tnt_jax.files import replacing
from tnt_jax.launch.planning.facts import (
    Examination,
    Facts,
    find_obstacles,
    find_remedy,
    find_unreachable,
    package_version,
    share_machine,
)
from tnt_jax.launch.planning.options import Options, add_options
from tnt_jax.launch.planning.plan import Devices, Host, Launch, carried_environment, plan_processes
from tnt_jax.launch.remote.connection import Lines
from tnt_jax.launch.remote.hosts import HostEntry, taking_hosts
from tnt_jax.launch.remote.screen import say
from tnt_jax.launch.remote.session import HostError, Session
from tnt_jax.launch.run import (
    find_coordinator_address,
    hosts_of,
    new_job_id,
    open_session,
    working_directory,
)

OK, WARNING, FAILURE = "ok", "warning", "FAILURE"
_MOST_SKEW_S = 2.0
_FEWEST_FILES = 4096
_LEAST_SHM_MB = 1000
_LEAST_DISK_MB = 1000
_CONNECT_TIMEOUT_S = 30.0
_LINKS_TIMEOUT_S = 120.0
# Status, detail and remedy of a `Finding`.
_Judgement = tuple[str, str, str]


@dataclass(frozen=True)
class Finding:
    """One line of the doctor's table."""

    host: str
    topic: str
    status: str  # With "warning" training works, but perhaps not well, with "FAILURE" not at all.
    detail: str
    remedy: str = ""  # Empty if all is well.


def doctor(argv: Sequence[str], environ: Mapping[str, str]) -> int:
    """Examines the hosts and prints a table, or JSON; returns 1 if a job cannot run, else 0."""
    given = _parser().parse_args(argv)
    if given.ray and given.hostfile:
        raise ValueError("Use either --hostfile or --ray.")
    address = given.ray_address or environ.get("RAY_ADDRESS") or "auto"
    options = Options(
        script="tnt_jax.distributed.host.link_probe",
        interpreter=(sys.executable, "-m"),
        use_gpus=not given.no_gpu,
        exports=(("TNT_INIT_TIMEOUT_S", "60"),),
        hostfile=given.hostfile,
        ray_address=address if given.ray else None,
        ssh_args=tuple(shlex.split(given.ssh_args)),
        port=given.port,
        output_on_all_devices=True,
    )
    with taking_hosts(options, environ) as take:
        findings, links = examine_hosts(take(), options, environ)
    failed = any(finding.status == FAILURE for finding in findings)
    listed = list(map(dataclasses.asdict, findings))
    diagnosis = {"ok": not failed, "findings": listed, "links": links}
    print(json.dumps(diagnosis, indent=2) if given.json else describe(findings, links))
    if given.report is not None:
        write_report(Path(given.report), diagnosis, environ)
        say(f"wrote {given.report}: read it before you attach it to an issue.")
    return int(failed)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="tnt-jax doctor",
        description="Finds out why a job does not run, or runs slowly.",
        allow_abbrev=False,
    )
    parser.add_argument("--hostfile", metavar="FILE", help="hosts to examine (default: this one)")
    parser.add_argument("--ray", action="store_true", help="examine the nodes of a Ray cluster")
    add_options(parser, "ray_address")
    parser.add_argument(
        "--ssh-args",
        default="",
        metavar="ARGS",
        help='arguments for ssh, for instance "-F my_config"',
    )
    parser.add_argument(
        "--port", type=int, metavar="P", help="port of the coordinator to try (default: a free one)"
    )
    parser.add_argument("--no-gpu", action="store_true", help="measure between CPUs")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument(
        "--report",
        nargs="?",
        const="tnt_jax_report.json",
        metavar="FILE",
        help="also write a file for an issue: versions, devices, the environment without secrets "
        "and what was found (default: %(const)s)",
    )
    return parser


def examine_hosts(
    entries: Sequence[HostEntry], options: Options, environ: Mapping[str, str]
) -> tuple[list[Finding], list[dict[str, Any]]]:
    """Returns all findings, and the measured links if nothing prevented the measurement."""
    unreachable, entries = _try_to_connect(entries, options)
    if not entries:
        return unreachable, []
    with open_session(entries, options) as session:
        skews_s = _read_clocks(session, [entry.name for entry in entries])
        token, hosts = _examine(session, environ)
        findings = [*unreachable, *judge(hosts, token=token, skews_s=skews_s)]
        facts = {host: Facts.from_json(found.facts) for host, found in hosts.items()}
        if not share_machine(facts.values()):
            findings += judge_reachability(_connect_all_pairs(session, facts))
        if any(finding.status == FAILURE for finding in findings):
            remedy = "Resolve the failures first."
            untried = Finding(entries[0].name, "all-reduce", WARNING, "not tried", remedy)
            return [*findings, untried], []
        finding, links = _measure_links(session, hosts_of(entries, facts), options, environ)
        return [*findings, finding], links


def _try_to_connect(
    entries: Sequence[HostEntry], options: Options
) -> tuple[list[Finding], list[HostEntry]]:
    """Returns a finding for each host that cannot be connected to, and the others."""
    started = time.monotonic()
    try:
        with open_session(entries, options) as session:
            session.ask("read_clock", {}, timeout_s=_CONNECT_TIMEOUT_S)
    except HostError as error:
        failures = [
            Finding(host, "connection", FAILURE, reason, find_remedy(host, reason))
            for host, reason in error.reasons.items()
        ]
        rest = [entry for entry in entries if entry.name not in error.reasons]
        return failures, rest
    detail = f"to {len(entries)} host(s) in {time.monotonic() - started:.1f} s"
    return [Finding(entries[0].name, "connection", OK, detail)], list(entries)


def _read_clocks(session: Session, hosts: Iterable[str]) -> dict[str, tuple[float, float]]:
    """Returns by how much each host's clock is ahead of ours, and half of its response time."""
    # The first question waits for the connection.
    session.ask("read_clock", {})
    skews_s = {}
    for host in hosts:
        before = time.time()
        clock = session.ask("read_clock", {}, hosts=[host])[host]
        after = time.time()
        skews_s[host] = (clock - (before + after) / 2, (after - before) / 2)
    return skews_s


def _examine(session: Session, environ: Mapping[str, str]) -> tuple[str, dict[str, Examination]]:
    """Returns what was written to the working directory, and the examination of each host."""
    cwd = working_directory(environ)
    probe = Path(__file__).parents[1] / "distributed" / "host" / "link_probe.py"
    request = {
        "cwd": cwd,
        "script": str(probe),
        "interpreter": sys.executable,
        "environment": carried_environment(environ),
    }
    token = secrets.token_hex(8)
    token_file = Path(cwd, f".tnt-jax-doctor-{token}")
    try:
        token_file.write_text(token)
    except OSError:
        token = ""
    try:
        answers = session.ask("examine", {"request": request, "token_file": str(token_file)})
    finally:
        if token_file.exists():
            token_file.unlink()
    return token, {host: Examination(**found) for host, found in answers.items()}


def _connect_all_pairs(
    session: Session, facts: Mapping[str, Facts]
) -> dict[str, dict[str, list[str]]]:
    """Returns for each host the names and addresses at which each other host could connect."""
    reached = {}
    for host, found in facts.items():
        others = [other for other in facts if other != host]
        port = session.ask("listen", {"port": None}, hosts=[host])[host]
        arguments = {"hosts": found.addresses(host), "port": port}
        reached[host] = session.ask("find_reachable", arguments, hosts=others)
        session.ask("stop_listening", {}, hosts=[host])
    return reached


def _measure_links(
    session: Session, hosts: Sequence[Host], options: Options, environ: Mapping[str, str]
) -> tuple[Finding, list[dict[str, Any]]]:
    """Runs a small job; returns a finding on it and, for each pair of hosts, its all-reduce."""
    has_gpus = all(host.facts.gpus and host.facts.has_cuda_jax for host in hosts)
    kind = "gpu" if options.use_gpus and has_gpus else "cpu"
    # A single host is measured against itself.
    count = 2 if len(hosts) == 1 and (kind == "cpu" or len(hosts[0].facts.gpus) > 1) else 1
    launch = Launch(
        job_id=new_job_id("doctor"),
        coordinator_address=find_coordinator_address(session, hosts, options, kind),
        cwd=working_directory(environ),
        environ=environ,
        launched_at=time.time(),
    )
    processes = plan_processes(hosts, Devices(kind, (count,) * len(hosts)), options, launch)
    splitters = [Lines() for _ in processes]
    links: list[dict[str, Any]] = []

    def note(rank: int, name: str, data: bytes) -> None:
        for line in splitters[rank].feed(data) if name == "stdout" else []:
            if line.startswith(b'{"pair"'):
                measured = json.loads(line)
                first, second = (processes[other].host for other in measured.pop("pair"))
                links.append({"from": first, "to": second, **measured})

    code = session.run(processes, write=note, timeout_s=_LINKS_TIMEOUT_S).code
    detail, remedy = "one device alone", ""
    if code:
        detail = f"failed with code {code} after {len(links)} pair(s)"
        remedy = "See the output above: it is that of the process that failed first."
    elif links:
        slowest = min(link["bandwidth_mb_per_s"] for link in links)
        detail = f"{len(links)} pair(s) of {kind} processes, slowest {slowest} MB/s"
    return Finding(hosts[0].name, "all-reduce", FAILURE if code else OK, detail, remedy), links


def describe(findings: Sequence[Finding], links: Sequence[Mapping[str, Any]]) -> str:
    """Returns a table of the findings, with remedies, and a table of the links."""
    host_width = max(len(finding.host) for finding in findings)
    lines = []
    for finding in findings:
        lines.append(
            f"{finding.host:{host_width}}  {finding.topic:12}  {finding.status:7}  {finding.detail}"
        )
        if finding.remedy:
            lines.append(f"{'':{host_width}}  {'':12}  {'':7}  -> {finding.remedy}")
    for link in links:
        lines.append(
            f"{link['from']} - {link['to']}: latency {link['latency_us']:g} us, bandwidth "
            f"{link['bandwidth_mb_per_s']:g} MB/s"
        )
    return "\n".join(lines)


def judge(
    hosts: Mapping[str, Examination], *, token: str, skews_s: Mapping[str, tuple[float, float]]
) -> list[Finding]:
    """Returns the findings about each host.

    `token` is what the launcher wrote to the working directory, empty if that failed; `skews_s` are
    by how much each host's clock is ahead of the launcher's, and the uncertainty.
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


def _judged(detail: str, remedy: str, status: str = WARNING) -> _Judgement:
    """Returns a judgement; all is well if there is nothing to remedy."""
    return status if remedy else OK, detail, remedy


def _installation(facts: Facts, obstacle: str) -> _Judgement:
    versions = ", ".join(
        f"{name} {version or 'missing'}" for name, version in facts.versions.items()
    )
    if not obstacle and facts.versions["jax"] is None:
        obstacle = "Install the package there: pip install tnt-jax"
    return _judged(f"Python {facts.python}, {versions}", obstacle, FAILURE)


def _own_name(facts: Facts, trap: str) -> _Judgement:
    detail = f"{facts.hostname} is {', '.join(facts.own_addresses) or 'unknown'}"
    # Collectives between GPUs do not need the name.
    return _judged(detail, trap, WARNING if facts.gpus and facts.has_cuda_jax else FAILURE)


def _devices(facts: Facts, found: Examination) -> _Judgement:
    detail, remedy = f"{len(facts.gpus)} GPU(s), {len(facts.processors)} cores", ""
    if facts.gpus:
        detail += f", driver {found.driver or 'unknown'}, NCCL {found.nccl or 'not from pip'}"
        if not facts.has_cuda_jax:
            remedy = "JAX cannot use the GPUs: pip install 'jax[cuda13]'"
    elif found.driver:
        remedy = "A driver is loaded but no GPU can be used: look at nvidia-smi -L."
    return _judged(detail, remedy)


def _proxies(found: Examination) -> _Judgement:
    remedy = "tnt-jax exempts the coordinator; if processes still wait for one another, unset them."
    return _judged(", ".join(found.proxies) or "none", remedy if found.proxies else "")


def _limits(found: Examination) -> _Judgement:
    files = found.open_files
    detail = f"open files {files or 'unlimited'}, locked memory {found.locked_kb or 'unlimited'} kB"
    has_few = files is not None and files < _FEWEST_FILES
    remedy = f"Data loading may run out of files: ulimit -n {_FEWEST_FILES}"
    return _judged(detail, remedy if has_few else "")


def _space(found: Examination) -> _Judgement:
    remedy = ""
    if found.shm_mb is None or found.shm_mb < _LEAST_SHM_MB:
        remedy = (
            "NCCL and data loaders exchange data through /dev/shm: mount a larger one (docker run "
            "--shm-size=8g)."
        )
    elif found.free_disk_mb < _LEAST_DISK_MB:
        remedy = "Free some space, or set JAX_COMPILATION_CACHE_DIR to another disk."
    return _judged(f"/dev/shm {found.shm_mb} MB, caches {found.free_disk_mb} MB free", remedy)


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
    is_off = abs(skew_s) - uncertainty_s > _MOST_SKEW_S
    remedy = "Times in logs will not match; run a time service such as chrony."
    return _judged(f"{skew_s:+.2f} s (+-{uncertainty_s:.2f} s)", remedy if is_off else "")


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


_PACKAGES = (
    "tnt-jax jax jaxlib jax-cuda12-plugin jax-cuda13-plugin flax optax keras numpy tensorstore "
    "h5py safetensors tensorflow tensorflow-cpu tensorflow-datasets ray optuna grain torch"
).split()
_PREFIXES_OF_CLUSTERS = ("CUDA_", "SLURM_", "OMPI_", "PMIX_")
# Its settings begin as TensorFlow's do, and hold what a user deploys.
_OF_TERRAFORM = ("TF_VAR_", "TF_CLI_")
_HIDDEN = "(hidden)"
# SLURM_JWT and precondition_transports of Open MPI are keys of these.
_SOUNDS_SECRET = (
    "secret|token|key|pass|pwd|credential|auth|cookie|jwt|signature|precondition_transports"
)
_SECRET = re.compile(_SOUNDS_SECRET, re.IGNORECASE)
_USER = re.compile(r"//\S*@|(?<![\w/])[\w.%-]+:[^\s/@]+@")
_NAME = rf"[\w-]*(?:{_SOUNDS_SECRET})[\w-]*"
# Within a value, as in `?token=...`, `password: ...`, `--api-key ...` and `Bearer ...`. A KeyError
# names no secret, and neither does `/opt/keys:/usr/bin`.
_NAMED = re.compile(
    rf"""((?:{_NAME}(?:=|["']\s*:\s*|(?<!Error)\s*:\s+)|--{_NAME}\s+(?!-)|\b(?=(?:Bearer|Basic)\s))"""
    r"""(?P<quote>["'])?(?:(?:Bearer|Basic|token)\s+(?!-))?)"""
    r"""(?(quote)(?:(?!(?P=quote)).)+|[^\s"'&,;}]+)""",
    re.IGNORECASE | re.DOTALL,
)
_LIST_DEVICES = """
import json, jax
print(json.dumps([
    {"id": d.id, "platform": d.platform, "kind": d.device_kind, "process": d.process_index}
    for d in jax.devices()
]))
"""
_DEVICES_TIMEOUT_S = 120


def write_report(path: Path, diagnosis: Mapping[str, Any], environ: Mapping[str, str]) -> None:
    """Writes versions, JAX's devices, the environment and what the doctor found as JSON."""
    report = {
        "python": sys.version,
        "platform": platform.platform(),
        "versions": {name: found for name in _PACKAGES if (found := package_version(name))},
        "devices": _list_devices(environ),
        "environment": shown_environment(environ),
        **diagnosis,
    }
    shown = _without_secrets(report, environ.get("HOME", ""))
    with replacing(path) as file:
        file.write_text(json.dumps(shown, indent=2) + "\n")


def shown_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Returns the variables that matter to a job, without passwords and the home directory.

    A value is hidden if its name sounds like a secret; variables of other programs are left out.
    """
    of_clusters = {
        name: value for name, value in environ.items() if name.startswith(_PREFIXES_OF_CLUSTERS)
    }
    return {
        name: _HIDDEN if _SECRET.search(name) else _without_secrets(value, environ.get("HOME", ""))
        for name, value in sorted((carried_environment(environ) | of_clusters).items())
        if not name.startswith(_OF_TERRAFORM)
    }


def _without_secrets(value: Any, home: str) -> Any:
    """Returns a JSON value without users and passwords, named secrets and the home directory."""
    if isinstance(value, Mapping):
        return {name: _without_secrets(part, home) for name, part in value.items()}
    if isinstance(value, list):
        return [_without_secrets(part, home) for part in value]
    if not isinstance(value, str):
        return value
    value = _USER.sub(lambda user: "//" * user[0].startswith("//") + f"{_HIDDEN}@", value)
    value = _NAMED.sub(rf"\g<1>{_HIDDEN}", value)
    return value.replace(home, "~") if len(home) > 1 else value


def _list_devices(environ: Mapping[str, str]) -> list[dict[str, Any]] | str:
    """Returns the devices of this host as JAX lists them, or the end of what it says instead."""
    command = [sys.executable, "-c", _LIST_DEVICES]
    try:
        done = subprocess.run(
            command, env=environ, capture_output=True, text=True, timeout=_DEVICES_TIMEOUT_S
        )
    except subprocess.TimeoutExpired:
        return f"JAX has not listed its devices within {_DEVICES_TIMEOUT_S} s."
    if done.returncode:
        return done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])
