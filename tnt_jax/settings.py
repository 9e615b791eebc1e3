"""Reads the `TNT_*` environment variables into one frozen, validated `Settings`.

The launcher writes these variables and the runtime reads them. This module uses the standard
library alone, so that the launcher can share it without importing JAX.
"""

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
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
_Read = Callable[[str, str], Any]
"""Returns the value of a variable from its name and text, or raises a ValueError."""


def _address(name: str, text: str) -> str:
    host, _, port = text.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise ValueError(
            f"{name} must be host:port with a port from 1 to 65535, for instance node1:12345, but "
            f"is {text!r}."
        )
    return text


def _at_least(lowest: int) -> _Read:
    def integer(name: str, text: str) -> int:
        if not text.strip().isdigit() or int(text) < lowest:
            raise ValueError(f"{name} must be an integer of at least {lowest}, but is {text!r}.")
        return int(text)

    return integer


def _bytes(name: str, text: str) -> int | None:
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?) ?([kKMGT]?)(i?)B", text.strip())
    nbytes = 0
    if match is not None:
        base = 1024 if match[3] else 1000
        nbytes = int(float(match[1]) * base ** " KMGT".index(match[2].upper() or " "))
    if text.strip() and not nbytes:
        raise ValueError(f"{name} must be a size such as 80GB or 40GiB, but is {text!r}.")
    return nbytes or None


def _recording(name: str, text: str) -> str:
    if text not in get_args(Recording):
        raise ValueError(f"{name} must be one of {', '.join(get_args(Recording))}, not {text!r}.")
    return text


def _secret(name: str, text: str) -> str:
    if len(text) < _SECRET_CHARACTERS:
        raise ValueError(
            f"{name} must be random text of at least {_SECRET_CHARACTERS} characters, but has "
            f"{len(text)}. Take that of `openssl rand -hex 32`."
        )
    return text


def _threshold(name: str, text: str) -> int | Literal["xla"] | None:
    value = text.strip()
    if value == "xla":
        return "xla"
    if value and not value.isdigit():
        raise ValueError(f"{name} must be a number of KiB of at least 0, or xla, but is {text!r}.")
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


def _save_freq(name: str, text: str) -> str:
    value = text.strip() or Settings.checkpoint_every
    try:
        parse_save_freq(value)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None
    return value


def _boolean(name: str, text: str) -> bool:
    value = text.strip().lower()
    if value not in _TRUE + _FALSE:
        raise ValueError(
            f"{name} must be one of {', '.join(_TRUE)} or {', '.join(v for v in _FALSE if v)}, but "
            f"is {text!r}."
        )
    return value in _TRUE


def _log_level(name: str, text: str) -> str:
    value = "WARNING" if text.upper() == "WARN" else text.upper()
    if value not in LOG_LEVELS:
        raise ValueError(f"{name} must be one of {', '.join(LOG_LEVELS)}, but is {text!r}.")
    return value


def _text(name: str, text: str) -> str:
    return text


def _number(name: str, text: str) -> float:
    return float(text)


def _variable(name: str, read: _Read, default: Any = None, **more: Any) -> Any:
    """Returns a field whose value is that of a variable, or the default if it is not set."""
    return field(default=default, metadata={"name": name, "read": read}, **more)


@dataclass(frozen=True)
class Settings:
    """The settings of this process, each from the environment variable that stands with it.

    Attributes:
        coordinator_address: `host:port` of process 0, or None outside a TNT job.
        num_processes: Number of processes in the job.
        process_id: Number of this process, `0 <= process_id < num_processes`.
        init_timeout_s: Seconds to wait for all processes at start; None for
            `default_init_timeout_s`.
        heartbeat_timeout_s: Seconds after which a silent process counts as dead.
        log_level: Level of the logger `tnt_jax`.
        log_on_all_devices: Whether every process logs, instead of the master alone.
        output_on_all_devices: Whether every process prints progress and summaries.
        fusion_threshold_kb: KiB from which a gradient bucket is full, 0 for one bucket per array,
            `"xla"` to leave it to the compiler; None for the default of the backend.
        launched_at: Seconds since 1970 when the launcher was started, to time the start.
        tune_steps: Steps per trial if `fit` compares ways to sum gradients instead of training.
        plan: Whether `fit` prints what a step needs instead of training.
        stall_warning_s: Seconds that a process waits for others before it warns and names them.
        stall_timeout_s: Seconds without progress of a process after which the job ends, 0 for
            never.
        timeline: File for what the host does, in Chrome's trace format; or None.
        checkpoint_dir: Directory in which every `fit` saves checkpoints and resumes; None for no
            checkpoints unless `fit` asks for them.
        checkpoint_every: Batches, `"epoch"`, or a time such as `"30s"`, between two checkpoints of
            `fit(resume=...)`.
        restart_count: How many times `tnt-jax` has started the job before.
        goodput: File for where the time of the run goes, by default `goodput.jsonl` in
            `checkpoint_dir`, if that is set; or None.
        scale_steps: Steps that `fit` times instead of training, otherwise None.
        scale_from: With `scale_steps`, the number of ranks that others are compared with.
        scale_weak: With `scale_steps`, whether the global batch grows with the ranks.
        record_steps: Steps that the script records, and ends with, otherwise None.
        record_as: How these steps run.
        explain_steps: Steps of each kind and round that `fit` times to explain where their time
            goes, otherwise None.
        explain_rounds: How often each kind is timed.
        device_memory: Bytes of a device for `Model(mesh="auto")`, such as `80GB` or `40GiB`; None
            for what the device states.
        shared_memory: Whether the CPU processes of one machine sum in memory that they share.
        job_secret: What only the processes of the job know, with which they sign what they tell one
            another; empty if they were started without one.
        elastic_fd: Descriptor over which a process of an elastic job talks to the launcher; None in
            other jobs.
        joins: Whether it was started in the place of one that was lost.
    """

    coordinator_address: str | None = _variable("TNT_COORDINATOR_ADDRESS", _address)
    num_processes: int | None = _variable("TNT_NUM_PROCESSES", _at_least(1))
    process_id: int | None = _variable("TNT_PROCESS_ID", _at_least(0))
    init_timeout_s: int | None = _variable("TNT_INIT_TIMEOUT_S", _at_least(1))
    heartbeat_timeout_s: int = _variable("TNT_HEARTBEAT_TIMEOUT_S", _at_least(1), 100)
    log_level: str = _variable("TNT_LOG_LEVEL", _log_level, "WARNING")
    log_on_all_devices: bool = _variable("TNT_LOG_ON_ALL_DEVICES", _boolean, False)
    output_on_all_devices: bool = _variable("TNT_OUTPUT_ON_ALL_DEVICES", _boolean, False)
    fusion_threshold_kb: int | Literal["xla"] | None = _variable("TNT_FUSION_THRESHOLD", _threshold)
    launched_at: float | None = _variable("TNT_LAUNCHED_AT", _number)
    tune_steps: int | None = _variable("TNT_TUNE_STEPS", _at_least(1))
    plan: bool = _variable("TNT_PLAN", _boolean, False)
    stall_warning_s: int = _variable("TNT_STALL_WARNING_S", _at_least(1), 60)
    stall_timeout_s: int = _variable("TNT_STALL_TIMEOUT", _at_least(0), 60)
    timeline: str | None = _variable("TNT_TIMELINE", _text)
    checkpoint_dir: str | None = _variable("TNT_CHECKPOINT_DIR", _text)
    checkpoint_every: str = _variable("TNT_CHECKPOINT_EVERY", _save_freq, "60s")
    restart_count: int = _variable("TNT_RESTART_COUNT", _at_least(0), 0)
    goodput: str | None = _variable("TNT_GOODPUT", _text)
    scale_steps: int | None = _variable("TNT_SCALE_STEPS", _at_least(1))
    scale_from: int = _variable("TNT_SCALE_FROM", _at_least(1), 1)
    scale_weak: bool = _variable("TNT_SCALE_WEAK", _boolean, False)
    record_steps: int | None = _variable("TNT_RECORD_STEPS", _at_least(1))
    record_as: Recording = _variable("TNT_RECORD_AS", _recording, "plain")  # noqa: RUF009
    explain_steps: int | None = _variable("TNT_EXPLAIN_STEPS", _at_least(1))
    explain_rounds: int = _variable("TNT_EXPLAIN_ROUNDS", _at_least(1), 5)
    device_memory: int | None = _variable("TNT_DEVICE_MEMORY", _bytes)
    shared_memory: bool = _variable("TNT_SHARED_MEMORY", _boolean, True)
    job_secret: str = _variable("TNT_JOB_SECRET", _secret, "", repr=False)
    elastic_fd: int | None = _variable("TNT_ELASTIC_FD", _at_least(0))
    joins: bool = _variable("TNT_ELASTIC_JOINS", _boolean, False)


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
    values: dict[str, Any] = {}
    for each in fields(Settings):
        name, read = each.metadata["name"], each.metadata["read"]
        # An empty variable counts as one that is not set, but turns off what is on by default.
        if env.get(name) or (name in env and read is _boolean):
            values[each.name] = read(name, env[name])
    if "checkpoint_dir" in values:
        values.setdefault("goodput", os.path.join(values["checkpoint_dir"], "goodput.jsonl"))
    settings = Settings(**values)
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
