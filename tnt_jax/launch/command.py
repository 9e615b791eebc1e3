"""The program `tnt-jax`: reads the command line, asks the hosts, plans and runs."""

import logging
import os
import re
import secrets
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from tnt_jax.launch.connection import Connection, supervisor_command
from tnt_jax.launch.facts import Facts, Request
from tnt_jax.launch.options import Options, parse_options
from tnt_jax.launch.plan import Host, Launch, Process, choose_devices, plan_processes
from tnt_jax.launch.preflight import find_obstacles
from tnt_jax.launch.processtree import adopt_orphans, kill_descendants
from tnt_jax.launch.screen import say
from tnt_jax.launch.session import HostError, Session
from tnt_jax.settings import read_settings

LOCALHOST = "localhost"
_INSPECT_TIMEOUT_S = 60.0
_END_TIMEOUT_S = 10.0
_logger = logging.getLogger("tnt_jax.launch")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs `tnt-jax` with these arguments, the process's own by default, and returns its exit code."""
    is_program = argv is None
    if is_program:
        adopt_orphans()
    try:
        options = parse_options(sys.argv[1:] if argv is None else argv, version=_version())
        _start_log(options)
        return run_job(options, os.environ)
    except (ValueError, FileNotFoundError, HostError) as error:
        say(f"error: {error}")
        return 2
    except KeyboardInterrupt:
        return 130
    finally:
        if is_program:
            kill_descendants(os.getpid())


def run_job(options: Options, environ: Mapping[str, str]) -> int:
    """Starts the script on all devices, waits for it, and returns the exit code.

    Raises:
        ValueError: If the options do not fit the hosts.
        FileNotFoundError: If the script or a program it needs does not exist.
        HostError: If a host cannot take part.
    """
    job_id = _new_job_id(options.script)
    connections = [Connection(LOCALHOST, supervisor_command(), is_remote=False)]
    session = Session(connections, grace_period_s=options.grace_period_s)
    restore_signals = session.watch_signals()
    try:
        facts = session.inspect(_request(options), timeout_s=_INSPECT_TIMEOUT_S)
        processes = _plan(facts, options, job_id, environ)
        if options.dry_run:
            print(describe(processes))
            return 0
        return session.run(processes)
    finally:
        for connection in connections:
            connection.close()
        restore_signals()
        _end_rest(connections)


def _plan(facts: Mapping[str, Facts], options: Options, job_id: str, environ: Mapping[str, str]) -> list[Process]:
    if LOCALHOST in facts and facts[LOCALHOST].missing:
        raise FileNotFoundError(f"There is no {' and no '.join(facts[LOCALHOST].missing)}.")
    obstacles = find_obstacles(facts)
    if obstacles:
        raise HostError("The job was not started:\n" + "\n".join(obstacles))
    hosts = [Host(name, found) for name, found in facts.items()]
    devices = choose_devices(hosts, options)
    for warning in devices.warnings:
        _logger.warning(warning)
    address = f"127.0.0.1:{options.port or hosts[0].facts.free_port}"
    return plan_processes(hosts, devices, options, Launch(job_id, address, os.getcwd(), environ))


def _request(options: Options) -> Request:
    return Request(
        cwd=os.getcwd(),
        script=options.script,
        interpreter=options.interpreter[0] if options.interpreter else "",
        environment={name: value for name, value in options.exports if name == "CUDA_VISIBLE_DEVICES"},
    )


def _end_rest(connections: Sequence[Connection]) -> None:
    deadline = time.monotonic() + _END_TIMEOUT_S
    for connection in connections:
        connection.wait(max(0.0, deadline - time.monotonic()))
        connection.abort()


def describe(processes: Sequence[Process]) -> str:
    """Returns a plan in words: for each process its host, variables and command, ready for a shell."""
    lines = []
    for process in processes:
        lines.append(f"rank {process.rank} on {process.host} (local rank {process.local_rank}), in {process.cwd}:")
        settings = [*process.environment.items(), *process.exports]
        lines += [f"  {name}={shlex.quote(value)}" for name, value in settings]
        lines.append(f"  {shlex.join(process.command)}")
    return "\n".join(lines)


def _new_job_id(script: str) -> str:
    name = re.sub(r"\W+", "_", Path(script).stem)[:32]
    return f"{name}-{time.strftime('%m%d-%H%M%S')}-{secrets.token_hex(2)}"


def _version() -> str:
    try:
        return f"tnt-jax {version('tnt-jax')} from {Path(__file__).parents[1]}"
    except PackageNotFoundError:
        return f"tnt-jax (not installed) from {Path(__file__).parents[1]}"


def _start_log(options: Options) -> None:
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("[tnt-jax] %(levelname)s: %(message)s"))
    _logger.handlers = [handler]
    _logger.propagate = False
    _logger.setLevel(options.log_level or read_settings({**os.environ}).log_level)
