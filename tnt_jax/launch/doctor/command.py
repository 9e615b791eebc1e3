"""The command line of the doctor, and the order of its checks."""

import argparse
import dataclasses
import json
import secrets
import shlex
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tnt_jax.launch.doctor.checks import FAILURE, OK, WARNING, Finding, judge, judge_reachability
from tnt_jax.launch.doctor.examine import Examination
from tnt_jax.launch.doctor.report import write_report
from tnt_jax.launch.planning.environment import Launch, carried_environment
from tnt_jax.launch.planning.facts import Facts
from tnt_jax.launch.planning.hostfile import HostEntry
from tnt_jax.launch.planning.options import Options
from tnt_jax.launch.planning.plan import Devices, Host, plan_processes
from tnt_jax.launch.planning.preflight import find_remedy, share_machine
from tnt_jax.launch.remote.connection import Lines
from tnt_jax.launch.remote.ray_nodes import RayNodes
from tnt_jax.launch.remote.screen import say
from tnt_jax.launch.remote.session import HostError, Session
from tnt_jax.launch.run import (
    find_coordinator_address,
    hosts_of,
    job_hosts,
    new_job_id,
    open_session,
    working_directory,
)

_CONNECT_TIMEOUT_S = 30.0
_LINKS_TIMEOUT_S = 120.0


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
    if options.ray_address is None:
        findings, links = examine_hosts(job_hosts(options, environ), options, environ)
    else:
        with RayNodes(options, every_node=True) as nodes:
            findings, links = examine_hosts(nodes.take(), options, environ)
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
    parser.add_argument(
        "--ray-address",
        metavar="ADDRESS",
        help="address of the cluster (default: RAY_ADDRESS, or that of this host)",
    )
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
    probe = Path(__file__).parents[2] / "distributed" / "host" / "link_probe.py"
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
        token_file.unlink(missing_ok=True)
    return token, {host: Examination.from_json(found) for host, found in answers.items()}


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
    """Runs a small job; returns a finding on it and, for each pair of hosts, its all-reduce.

    A measurement is a latency and a bandwidth. A single host is measured against itself, with two
    processes.
    """
    has_gpus = all(host.facts.num_gpus and host.facts.has_cuda_jax for host in hosts)
    kind = "gpu" if options.use_gpus and has_gpus else "cpu"
    count = 2 if len(hosts) == 1 and (kind == "cpu" or hosts[0].facts.num_gpus > 1) else 1
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
        lines = splitters[rank].feed(data) if name == "stdout" else []
        for line in lines:
            if line.startswith(b'{"pair"'):
                measured = json.loads(line)
                first, second = (processes[other].host for other in measured.pop("pair"))
                links.append({"from": first, "to": second, **measured})

    code = session.run(processes, write=note, timeout_s=_LINKS_TIMEOUT_S)
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
