"""The program `tnt-jax`: reads the command line and executes it."""

import logging
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from tnt_jax.cluster.clusters import Job, detect_job
from tnt_jax.launch.doctor import doctor
from tnt_jax.launch.planning.facts import Facts, find_obstacles, inspect_host, package_version
from tnt_jax.launch.planning.fingerprint import fingerprint
from tnt_jax.launch.planning.options import Options, parse_options
from tnt_jax.launch.planning.plan import script_command, task_environment
from tnt_jax.launch.processtree import adopt_orphans, kill_descendants, leave_orphans
from tnt_jax.launch.remote.hosts import LOCALHOST, HostEntry
from tnt_jax.launch.remote.screen import discard, say
from tnt_jax.launch.remote.session import HostError
from tnt_jax.launch.run import (
    Attempt,
    check,
    clean_up,
    describe_command,
    new_job_id,
    run_attempt,
    run_with_restarts,
)
from tnt_jax.launch.supervisor import expand
from tnt_jax.launch.trials import Stopped, run_explain, run_scale
from tnt_jax.launch.verify.command import run_verify, verify_receipts
from tnt_jax.settings import read_settings

_logger = logging.getLogger("tnt_jax.launch")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs `tnt-jax` with these arguments, by default those of the process.

    Returns the exit code: what the script returned (`Session.run`), 2 if the job could not be
    started, 130 after Ctrl-C before its start.
    """
    is_program = argv is None
    if is_program:
        adopt_orphans()
    try:
        words = sys.argv[1:] if argv is None else argv
        if words and words[0] == "doctor":
            return doctor(words[1:], os.environ)
        if words and words[0] == "fingerprint":
            return fingerprint(words[1:])
        if words[:1] == ["verify"] and words[1:] and all(w.endswith(".json") for w in words[1:]):
            return verify_receipts(words[1:])
        installed = package_version("tnt-jax") or "(not installed)"
        version = f"tnt-jax {installed} from {Path(__file__).parents[1]}"
        options = parse_options(words, version=version)
        _start_log(options)
        return _dispatch(options, os.environ)
    except HostError as error:
        say(f"error: nothing was started, because of\n{error}")
        return 2
    except (ValueError, FileNotFoundError) as error:
        say(f"error: {error}")
        return 2
    except Stopped as stopped:
        return stopped.args[0]
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        discard(sys.stdout)
        return 128 + signal.SIGPIPE
    finally:
        if is_program:
            kill_descendants(os.getpid())


def _dispatch(options: Options, environ: Mapping[str, str]) -> int:
    if options.cleanup is not None:
        return clean_up(options, environ)
    # A launcher started by a process of a job starts another job.
    chooses_hosts = options.hostfile or options.ray_address
    job = None if chooses_hosts or "TNT_JOB_ID" in environ else detect_job(environ)
    if job is not None:
        _refuse_what_only_all_can(job, options)
    if options.scale is not None:
        return run_scale(options, options.scale, environ)
    if options.verify is not None:
        return run_verify(options, options.verify, environ)
    if options.explain is not None:
        return run_explain(options, options.explain, environ)
    if job is None:
        return run_with_restarts(options, environ)
    if options.devices_per_node is None:
        return _become_task(job, options, environ)
    attempt = Attempt(new_job_id(options.script_name), [HostEntry(LOCALHOST)])
    return run_attempt(attempt, options, environ, part=job).code


def _refuse_what_only_all_can(job: Job, options: Options) -> None:
    """Raises a ValueError if one task among many is to do what needs all, or what started them."""
    if options.scale or options.verify or options.explain:
        raise ValueError(
            "This command starts jobs of several sizes one after the other, but this program is "
            f"one of {job.num_processes} that {job.source} has started. Run it once, in the batch "
            "script without srun or mpirun."
        )
    if options.max_restarts or options.min_hosts or options.elastic:
        raise ValueError(
            "--max-restarts, --min-hosts and --elastic need a launcher that starts all processes, "
            f"but this one is one of {job.num_processes} that {job.source} has started. Run "
            "tnt-jax once, in the batch script without srun or mpirun, or have the cluster start "
            "the job again: #SBATCH --requeue and scontrol requeue, or backoffLimit in Kubernetes."
        )
    # With --devices-per-node it starts the processes of its node itself.
    is_task = options.devices_per_node is None
    settings = {
        "--port": options.port,
        "--processes-per-node": is_task and options.processes_per_node,
        "--pin-to-socket": is_task and options.pin_to_socket,
        "--pin-memory-to-socket": is_task and options.pin_memory_to_socket,
        "--log-dir": is_task and options.log_dir,
        "--grace-period": is_task and options.grace_period_s != Options.grace_period_s,
    }
    if refused := [flag for flag, value in settings.items() if value]:
        raise ValueError(
            f"{', '.join(refused)} cannot be used here: {job.source} decides it for the "
            f"{job.num_processes} processes that it starts. Use the options of {job.source}, or "
            "run tnt-jax once, in the batch script without srun or mpirun."
        )


def _become_task(job: Job, options: Options, environ: Mapping[str, str]) -> int:
    """Replaces this program by the script, as one process of the cluster's job."""
    # The cluster shows the output, passes on signals and ends the other tasks when one fails.
    cwd = os.getcwd()
    interpreter = options.interpreter[0] if options.interpreter else ""
    facts = Facts.from_json(inspect_host(cwd, options.script, interpreter, environ))
    check(find_obstacles({facts.hostname: facts}))
    command = script_command(options, cwd)
    added = task_environment(job, facts=facts, options=options, environ=environ)
    if options.dry_run:
        print(f"process {job.process_id} of {job.num_processes} on {facts.hostname}, in {cwd}:")
        print(describe_command([*added.items(), *options.exports], command))
        return 0
    environment = {**environ, **added}
    for name, value in options.exports:
        environment[name] = expand(value, environment)
    leave_orphans()
    os.execvpe(command[0], command, {**environment, "TNT_TASK_PID": str(os.getpid())})


def _start_log(options: Options) -> None:
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("[tnt-jax] %(levelname)s: %(message)s"))
    _logger.handlers = [handler]
    _logger.propagate = False
    _logger.setLevel(
        options.log_level
        or read_settings({"TNT_LOG_LEVEL": os.environ.get("TNT_LOG_LEVEL", "")}).log_level
    )
