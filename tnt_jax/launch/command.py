"""The program `tnt-jax`: reads the command line and executes it."""

import logging
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from tnt_jax.cluster.clusters import detect_job
from tnt_jax.launch.doctor.command import doctor
from tnt_jax.launch.planning.fingerprint import fingerprint
from tnt_jax.launch.planning.options import Options, parse_options
from tnt_jax.launch.processtree import adopt_orphans, kill_descendants
from tnt_jax.launch.remote.screen import discard, say
from tnt_jax.launch.remote.session import HostError
from tnt_jax.launch.restarts import clean_up, run_with_restarts
from tnt_jax.launch.run import run_part
from tnt_jax.launch.scale.command import refuse_tasks, run_scale
from tnt_jax.launch.task import become_task, refuse_restarts
from tnt_jax.settings import read_settings

_logger = logging.getLogger("tnt_jax.launch")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs `tnt-jax` with these arguments, by default those of the process; returns the exit code.

    Returns:
        What the script returned (`session.Session.run`); 2 if the job could not be started; 130
        after Ctrl-C before its start.
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
        options = parse_options(words, version=_version())
        _start_log(options)
        return _dispatch(options, os.environ)
    except HostError as error:
        say(f"error: nothing was started, because of\n{error}")
        return 2
    except (ValueError, FileNotFoundError) as error:
        say(f"error: {error}")
        return 2
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
    if options.scale is not None:
        refuse_tasks(job)
        return run_scale(options, options.scale, environ)
    if job is None:
        return run_with_restarts(options, environ)
    refuse_restarts(job, options)
    if options.devices_per_node is None:
        become_task(job, options, environ)
    return run_part(job, options, environ)


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
    _logger.setLevel(
        options.log_level
        or read_settings({"TNT_LOG_LEVEL": os.environ.get("TNT_LOG_LEVEL", "")}).log_level
    )
