"""Runs a small job over the hosts that measures all-reduces between them."""

import json
import time
from collections.abc import Mapping, Sequence
from typing import Any

from tnt_jax.launch.doctor.checks import FAILURE, OK, Finding
from tnt_jax.launch.planning.options import Options
from tnt_jax.launch.planning.plan import Devices, Host, Launch, Process, plan_processes
from tnt_jax.launch.remote.connection import Lines
from tnt_jax.launch.remote.session import Session
from tnt_jax.launch.run import find_coordinator_address, new_job_id, working_directory

_TIMEOUT_S = 120.0


class Recorder:
    """Replaces the screen: keeps the lines that the processes print."""

    def __init__(self) -> None:
        self.lines: list[bytes] = []
        self._streams: dict[tuple[int, str], Lines] = {}

    def write(self, rank: int, name: str, data: bytes) -> None:
        """Takes a piece of output of a rank."""
        if name == "stdout":
            self.lines += self._streams.setdefault((rank, name), Lines()).feed(data)

    def finish(self, rank: int) -> None:
        """Does nothing: all relevant lines are complete."""

    def shows(self, rank: int) -> bool:
        """Returns False: the user has not seen the end of a failed process's output."""
        return False


def measure_links(
    session: Session, hosts: Sequence[Host], options: Options, environ: Mapping[str, str]
) -> tuple[Finding, list[dict[str, Any]]]:
    """Returns a finding on the job and, for each pair of hosts, the measured all-reduce.

    A measurement is a latency and a bandwidth. A single host is measured against itself, with two
    processes.
    """
    kind = (
        "gpu"
        if options.use_gpus
        and all(host.facts.num_gpus and host.facts.has_cuda_jax for host in hosts)
        else "cpu"
    )
    count = 2 if len(hosts) == 1 and (kind == "cpu" or hosts[0].facts.num_gpus > 1) else 1
    launch = Launch(
        job_id=new_job_id("doctor"),
        coordinator_address=find_coordinator_address(session, hosts, options, kind),
        cwd=working_directory(environ),
        environ=environ,
        launched_at=time.time(),
    )
    processes = plan_processes(hosts, Devices(kind, (count,) * len(hosts)), options, launch)
    recorder = Recorder()
    code = session.run(processes, screen=recorder, timeout_s=_TIMEOUT_S)
    links = [
        _link(json.loads(line), processes) for line in recorder.lines if line.startswith(b'{"pair"')
    ]
    if code:
        remedy = "See the output above: it is that of the process that failed first."
        return Finding(
            hosts[0].name,
            "all-reduce",
            FAILURE,
            f"failed with code {code} after {len(links)} pair(s)",
            remedy,
        ), links
    slowest = min((link["bandwidth_mb_per_s"] for link in links), default=None)
    detail = (
        "one device alone"
        if slowest is None
        else f"{len(links)} pair(s) of {kind} processes, slowest {slowest} MB/s"
    )
    return Finding(hosts[0].name, "all-reduce", OK, detail), links


def _link(measured: dict[str, Any], processes: Sequence[Process]) -> dict[str, Any]:
    first, second = (processes[rank].host for rank in measured.pop("pair"))
    return {"from": first, "to": second, **measured}
