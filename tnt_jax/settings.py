"""Reads the `TNT_*` environment variables into one frozen, validated `Settings`.

The launcher writes these variables and the runtime reads them. This module uses the standard
library alone, so that the launcher can share it without importing JAX.
"""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

LOG_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR")
PREEMPTED_EXIT_CODE = 75
"""Exit code of a run that a signal ended after it had saved its state: starting it again goes on.

The value is EX_TEMPFAIL of sysexits.h.
"""
STALLED_EXIT_CODE = 76
"""Exit code of a run that ended because a process made no progress."""
LOST_EXIT_CODE = 77
"""Exit code of a process that cannot continue because another ended without leaving the job."""

RECORD_MARK = "tnt-jax record: "
"""How a line begins in which process 0 reports to its launcher what a step has done."""
Recording = Literal["plain", "rounded", "passes", "sharded", "killed", "resumed"]
"""How the steps run that are recorded: as the script says; from weights that are changed by
rounding errors; with the rows of each rank in two passes; with the optimizer's state sharded; up to
half of the steps, where the state is saved and the processes end as by a kill; and on from there.
"""
EXPLAIN_MARK = "tnt-jax explain: "
"""How the line begins in which process 0 reports to its launcher what steps are made of."""


class TrialsDone(BaseException):
    """Ends a script after what `tnt-jax` has asked for: its further lines count on a trained model.

    Not an `Exception`, so that the script's own handlers of errors let it pass.
    """


_SECRET_CHARACTERS = 32
_TRUE = ("1", "true", "yes", "on")
_FALSE = ("0", "false", "no", "off", "")


@dataclass(frozen=True)
class Settings:
    """The settings of this process, read from environment variables.

    Attributes:
        coordinator_address: `host:port` of process 0 (`TNT_COORDINATOR_ADDRESS`), or None outside a
            TNT job.
        num_processes: Number of processes in the job (`TNT_NUM_PROCESSES`).
        process_id: Number of this process (`TNT_PROCESS_ID`), `0 <= process_id < num_processes`.
        init_timeout_s: Seconds to wait for all processes at start (`TNT_INIT_TIMEOUT_S`); None for
            `default_init_timeout_s`.
        heartbeat_timeout_s: Seconds after which a silent process counts as dead
            (`TNT_HEARTBEAT_TIMEOUT_S`).
        log_level: Level of the logger `tnt_jax` (`TNT_LOG_LEVEL`).
        log_on_all_devices: Whether every process logs, instead of the master alone
            (`TNT_LOG_ON_ALL_DEVICES`).
        output_on_all_devices: Whether every process prints progress and summaries
            (`TNT_OUTPUT_ON_ALL_DEVICES`).
        fusion_threshold_kb: KiB from which a gradient bucket is full, 0 for one bucket per array,
            `"xla"` to leave it to the compiler (`TNT_FUSION_THRESHOLD`); None for the default of
            the backend.
        launched_at: Seconds since 1970 when the launcher was started (`TNT_LAUNCHED_AT`), to time
            the start.
        tune_steps: Steps per trial if `fit` compares ways to sum gradients instead of training
            (`TNT_TUNE_STEPS`), otherwise None.
        scale_steps: Steps that `fit` times instead of training (`TNT_SCALE_STEPS`), otherwise None.
        scale_from: With `scale_steps`, the number of ranks that others are compared with
            (`TNT_SCALE_FROM`).
        scale_weak: With `scale_steps`, whether the global batch grows with the ranks
            (`TNT_SCALE_WEAK`).
        record_steps: Steps that the script records, and ends with (`TNT_RECORD_STEPS`), otherwise
            None.
        record_as: How these steps run (`TNT_RECORD_AS`).
        explain_steps: Steps of each kind and round that `fit` times to explain where their time
            goes (`TNT_EXPLAIN_STEPS`), otherwise None.
        explain_rounds: How often each kind is timed (`TNT_EXPLAIN_ROUNDS`).
        plan: Whether `fit` prints what a step needs instead of training (`TNT_PLAN`).
        stall_warning_s: Seconds that a process waits for others before it warns and names them
            (`TNT_STALL_WARNING_S`).
        stall_timeout_s: Seconds without progress of a process after which the job ends, 0 for never
            (`TNT_STALL_TIMEOUT`).
        checkpoint_dir: Directory in which every `fit` saves checkpoints and resumes
            (`TNT_CHECKPOINT_DIR`); None for no checkpoints unless `fit` asks for them.
        checkpoint_every: Batches, `"epoch"`, or a time such as `"30s"`, between two checkpoints of
            `fit(resume=...)` (`TNT_CHECKPOINT_EVERY`).
        timeline: File for what the host does, in Chrome's trace format (`TNT_TIMELINE`); or None.
        restart_count: How many times `tnt-jax` has started the job before (`TNT_RESTART_COUNT`).
        device_memory: Bytes of a device for `Model(mesh="auto")` (`TNT_DEVICE_MEMORY`, such as
            `80GB` or `40GiB`); None for what the device states.
        shared_memory: Whether the CPU processes of one machine sum in memory that they share
            (`TNT_SHARED_MEMORY`).
        job_secret: What only the processes of the job know (`TNT_JOB_SECRET`), with which they sign
            what they tell one another; empty if they were started without one.
        elastic_fd: Descriptor over which a process of an elastic job talks to the launcher
            (`TNT_ELASTIC_FD`); None in other jobs.
        joins: Whether it was started in the place of one that was lost (`TNT_ELASTIC_JOINS`).
        goodput: File for where the time of the run goes (`TNT_GOODPUT`; by default `goodput.jsonl`
            in the folder `TNT_CHECKPOINT_DIR`, if that is set); or None.
    """

    coordinator_address: str | None = None
    num_processes: int | None = None
    process_id: int | None = None
    init_timeout_s: int | None = None
    heartbeat_timeout_s: int = 100
    log_level: str = "WARNING"
    log_on_all_devices: bool = False
    output_on_all_devices: bool = False
    fusion_threshold_kb: int | Literal["xla"] | None = None
    launched_at: float | None = None
    tune_steps: int | None = None
    plan: bool = False
    stall_warning_s: int = 60
    stall_timeout_s: int = 60
    timeline: str | None = None
    checkpoint_dir: str | None = None
    checkpoint_every: str = "60s"
    restart_count: int = 0
    goodput: str | None = None
    scale_steps: int | None = None
    scale_from: int = 1
    scale_weak: bool = False
    record_steps: int | None = None
    record_as: Recording = "plain"
    explain_steps: int | None = None
    explain_rounds: int = 5
    device_memory: int | None = None
    shared_memory: bool = True
    job_secret: str = field(default="", repr=False)
    elastic_fd: int | None = None
    joins: bool = False


def default_init_timeout_s(num_processes: int) -> int:
    """Returns the seconds that a process waits for the others at start.

    It is 45 seconds plus a quarter of a second per process.
    """
    return 45 + num_processes // 4


def read_settings(environ: Mapping[str, str] | None = None) -> Settings:
    """Returns the settings in the environment.

    Args:
        environ: Variables to read; defaults to those of the process.

    Raises:
        ValueError: If a variable has an invalid value, or if only some of
            `TNT_COORDINATOR_ADDRESS`, `TNT_NUM_PROCESSES` and `TNT_PROCESS_ID` are set. The message
            lists the valid values.
    """
    env = os.environ if environ is None else environ
    stall_timeout_s = _integer(env, "TNT_STALL_TIMEOUT", at_least=0)
    settings = Settings(
        coordinator_address=_address(env, "TNT_COORDINATOR_ADDRESS"),
        num_processes=_integer(env, "TNT_NUM_PROCESSES", at_least=1),
        process_id=_integer(env, "TNT_PROCESS_ID", at_least=0),
        init_timeout_s=_integer(env, "TNT_INIT_TIMEOUT_S", at_least=1),
        heartbeat_timeout_s=_integer(env, "TNT_HEARTBEAT_TIMEOUT_S", at_least=1)
        or Settings.heartbeat_timeout_s,
        log_level=_log_level(env),
        log_on_all_devices=_boolean(env, "TNT_LOG_ON_ALL_DEVICES"),
        output_on_all_devices=_boolean(env, "TNT_OUTPUT_ON_ALL_DEVICES"),
        fusion_threshold_kb=_threshold(env, "TNT_FUSION_THRESHOLD"),
        tune_steps=_integer(env, "TNT_TUNE_STEPS", at_least=1),
        scale_steps=_integer(env, "TNT_SCALE_STEPS", at_least=1),
        scale_from=_integer(env, "TNT_SCALE_FROM", at_least=1) or Settings.scale_from,
        scale_weak=_boolean(env, "TNT_SCALE_WEAK"),
        plan=_boolean(env, "TNT_PLAN"),
        stall_warning_s=_integer(env, "TNT_STALL_WARNING_S", at_least=1)
        or Settings.stall_warning_s,
        stall_timeout_s=Settings.stall_timeout_s if stall_timeout_s is None else stall_timeout_s,
        timeline=env.get("TNT_TIMELINE") or None,
        checkpoint_dir=env.get("TNT_CHECKPOINT_DIR") or None,
        checkpoint_every=_save_freq(env, "TNT_CHECKPOINT_EVERY"),
        restart_count=_integer(env, "TNT_RESTART_COUNT", at_least=0) or 0,
        goodput=env.get("TNT_GOODPUT") or _in_folder(env, "TNT_CHECKPOINT_DIR", "goodput.jsonl"),
        record_steps=_integer(env, "TNT_RECORD_STEPS", at_least=1),
        record_as=_recording(env, "TNT_RECORD_AS"),
        explain_steps=_integer(env, "TNT_EXPLAIN_STEPS", at_least=1),
        explain_rounds=_integer(env, "TNT_EXPLAIN_ROUNDS", at_least=1) or Settings.explain_rounds,
        device_memory=_bytes(env, "TNT_DEVICE_MEMORY"),
        shared_memory="TNT_SHARED_MEMORY" not in env or _boolean(env, "TNT_SHARED_MEMORY"),
        job_secret=_secret(env, "TNT_JOB_SECRET"),
        elastic_fd=_integer(env, "TNT_ELASTIC_FD", at_least=0),
        joins=_boolean(env, "TNT_ELASTIC_JOINS"),
        launched_at=float(env["TNT_LAUNCHED_AT"]) if env.get("TNT_LAUNCHED_AT") else None,
    )
    _check_job(settings)
    return settings


def _check_job(settings: Settings) -> None:
    job = {
        "TNT_COORDINATOR_ADDRESS": settings.coordinator_address,
        "TNT_NUM_PROCESSES": settings.num_processes,
        "TNT_PROCESS_ID": settings.process_id,
    }
    missing = [name for name, value in job.items() if value is None]
    if missing and len(missing) < len(job):
        raise ValueError(
            "TNT_COORDINATOR_ADDRESS, TNT_NUM_PROCESSES and TNT_PROCESS_ID must be set together, "
            f"but {' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} missing. Set all "
            "three, or none for one process."
        )
    if (
        settings.process_id is not None
        and settings.num_processes is not None
        and settings.process_id >= settings.num_processes
    ):
        raise ValueError(
            f"TNT_PROCESS_ID ({settings.process_id}) must be below TNT_NUM_PROCESSES "
            f"({settings.num_processes}). Processes are numbered from 0."
        )


def _address(env: Mapping[str, str], name: str) -> str | None:
    value = env.get(name) or None
    if value is None:
        return None
    host, _, port = value.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise ValueError(
            f"{name} must be host:port with a port from 1 to 65535, for instance node1:12345, but "
            f"is {value!r}."
        )
    return value


def _integer(env: Mapping[str, str], name: str, *, at_least: int) -> int | None:
    value = env.get(name) or None
    if value is None:
        return None
    if not value.strip().isdigit() or int(value) < at_least:
        raise ValueError(f"{name} must be an integer of at least {at_least}, but is {value!r}.")
    return int(value)


def _bytes(env: Mapping[str, str], name: str) -> int | None:
    value = (env.get(name) or "").strip()
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?) ?([kKMGT]?)(i?)B", value)
    nbytes = 0
    if match is not None:
        base = 1024 if match[3] else 1000
        nbytes = int(float(match[1]) * base ** " KMGT".index(match[2].upper() or " "))
    if value and not nbytes:
        raise ValueError(f"{name} must be a size such as 80GB or 40GiB, but is {env[name]!r}.")
    return nbytes or None


def _recording(env: Mapping[str, str], name: str) -> Recording:
    value: Any = env.get(name) or Settings.record_as
    if value not in get_args(Recording):
        raise ValueError(f"{name} must be one of {', '.join(get_args(Recording))}, not {value!r}.")
    return value


def _secret(env: Mapping[str, str], name: str) -> str:
    value = env.get(name, "")
    if 0 < len(value) < _SECRET_CHARACTERS:
        raise ValueError(
            f"{name} must be random text of at least {_SECRET_CHARACTERS} characters, but has "
            f"{len(value)}. Take that of `openssl rand -hex 32`."
        )
    return value


def _threshold(env: Mapping[str, str], name: str) -> int | Literal["xla"] | None:
    value = (env.get(name) or "").strip()
    if value and value != "xla" and not value.isdigit():
        raise ValueError(
            f"{name} must be a number of KiB of at least 0, or xla, but is {env[name]!r}."
        )
    if value == "xla":
        return "xla"
    return int(value) if value else None


def parse_save_freq(text: str) -> int | float | Literal["epoch"]:
    """Returns how often to save: a number of batches (int), of seconds (float), or `"epoch"`.

    Args:
        text: Such as `500`, `30s`, `5m`, `1h` or `epoch`.

    Raises:
        ValueError: If it is none of them.
    """
    if text == "epoch":
        return "epoch"
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)([smh])|([0-9]+)", text)
    number = 0.0 if match is None else float(match[1] or match[3])
    if match is None or not number:
        raise ValueError(
            "How often to save must be epoch, a number of batches from 1, or a time such as 30s, "
            f"5m or 1h, but is {text!r}."
        )
    return int(number) if match[3] else number * {"s": 1, "m": 60, "h": 3600}[match[2]]


def _save_freq(env: Mapping[str, str], name: str) -> str:
    value = env.get(name, "").strip() or Settings.checkpoint_every
    try:
        parse_save_freq(value)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None
    return value


def _in_folder(env: Mapping[str, str], name: str, file_name: str) -> str | None:
    """Returns the path of a file in the folder that a variable names; None if it is not set."""
    return os.path.join(env[name], file_name) if env.get(name) else None


def _boolean(env: Mapping[str, str], name: str) -> bool:
    value = env.get(name, "").strip().lower()
    if value in _TRUE:
        return True
    if value in _FALSE:
        return False
    raise ValueError(
        f"{name} must be one of {', '.join(_TRUE)} or {', '.join(v for v in _FALSE if v)}, but is "
        f"{env[name]!r}."
    )


def _log_level(env: Mapping[str, str]) -> str:
    value = (env.get("TNT_LOG_LEVEL") or Settings.log_level).upper()
    value = "WARNING" if value == "WARN" else value
    if value not in LOG_LEVELS:
        raise ValueError(
            f"TNT_LOG_LEVEL must be one of {', '.join(LOG_LEVELS)}, but is "
            f"{env['TNT_LOG_LEVEL']!r}."
        )
    return value
