"""The command line of `tnt-jax`, read into one frozen, validated `Options`."""

import argparse
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from tnt_jax.settings import LOG_LEVELS, parse_save_freq

_EPILOG = """\
examples:
  tnt-jax -- train.py --epochs 3                   every GPU of this host, or one CPU process
  tnt-jax -n 2 --no-gpu -- train.py                two CPU processes
  tnt-jax -n 2 -- -m package.train --epochs 3      a module instead of a script
  tnt-jax --hostfile hosts -- train.py             every GPU of the hosts in the file, through ssh
  tnt-jax --dry-run --hostfile hosts -- train.py   show what would be started where
  tnt-jax doctor --hostfile hosts                  find out why it does not work
  tnt-jax tune -n 4 -- train.py                    find the fastest way to sum its gradients
"""


@dataclass(frozen=True)
class Options:
    """The options of the command line.

    Attributes:
        script: The script to run, or "-m" for the module that is the first of `script_args`; empty
            with `cleanup`.
        script_args: Its arguments.
        interpreter: Words of the command that runs the script; empty to run the script itself.
        devices_per_node: Devices to use on each host; None for all GPUs, or one CPU.
        this_host_only: Whether the user asked for devices of this host, even if a cluster offers
            more hosts.
        processes_per_node: Processes that share these devices; None for one each.
        use_gpus: Whether GPUs may be used.
        log_level: Level of the library's log; None to leave the environment's.
        log_on_all_devices: Whether every process logs.
        output_on_all_devices: Whether the output of every process is shown.
        exports: Variables for every process, in order; values may refer to others as `$NAME`.
        fusion_threshold_kb: KiB from which a gradient bucket is full, or "xla"; None to leave the
            environment's.
        timeline: File for a timeline of process 0, in Chrome's trace format, beside which the
            others write theirs; None for none.
        checkpoint_dir: Directory in which every `fit` saves checkpoints and resumes; None to leave
            the environment's.
        checkpoint_every: Batches, "epoch", or a time such as "30s", between two checkpoints; None
            to leave the environment's.
        tune_steps: Steps of each trial of `tnt-jax tune`; None to train.
        pin_to_socket: Whether each process is bound to the processors of one NUMA node.
        pin_memory_to_socket: Whether its memory is, too.
        compilation_cache: Whether compiled programs are kept between runs.
        hostfile: File that lists the hosts; None for this one.
        ssh_args: Words to add to the ssh command.
        log_dir: Directory for one log file per process; None for none.
        port: Port of the coordinator; None for any free one.
        grace_period_s: Seconds that processes get to end by themselves after Ctrl-C or SIGTERM.
        dry_run: Whether to print the plan instead of running it.
        cleanup: Id of the job whose remains are ended, empty to list jobs; None to run a job.
        force: Whether `cleanup` uses SIGKILL.
    """

    script: str
    script_args: tuple[str, ...] = ()
    interpreter: tuple[str, ...] = (sys.executable,)
    devices_per_node: int | None = None
    this_host_only: bool = False
    processes_per_node: int | None = None
    use_gpus: bool = True
    log_level: str | None = None
    log_on_all_devices: bool = False
    output_on_all_devices: bool = False
    exports: tuple[tuple[str, str], ...] = ()
    fusion_threshold_kb: int | Literal["xla"] | None = None
    timeline: str | None = None
    checkpoint_dir: str | None = None
    checkpoint_every: str | None = None
    tune_steps: int | None = None
    pin_to_socket: bool = False
    pin_memory_to_socket: bool = False
    compilation_cache: bool = True
    hostfile: str | None = None
    ssh_args: tuple[str, ...] = ()
    log_dir: str | None = None
    port: int | None = None
    grace_period_s: float = 30.0
    dry_run: bool = False
    cleanup: str | None = None
    force: bool = False


def parse_options(argv: Sequence[str], *, version: str) -> Options:
    """Returns the options of a command line; prints help or an error and exits where argparse does.

    Everything after `--`, or from the first word that is not an option, is the script and its
    arguments. The first word `tune` selects trials instead of training, and allows `--steps`.

    Raises:
        ValueError: If options contradict each other, or an argument of `-x` is not NAME=VALUE.
    """
    is_tuning = list(argv[:1]) == ["tune"]
    ours, script = _split(argv[1:] if is_tuning else argv)
    parser = _parser(version, is_tuning=is_tuning)
    given = parser.parse_args(ours)
    exports = tuple(_export(text) for texts in given.exports for text in texts)
    # If a script is named before the first `--`, this `--` belongs to its arguments.
    script = [*given.script, *(["--"] if given.script and "--" in argv else []), *script]
    _check(given, script)
    return Options(
        script=script[0] if script else "",
        script_args=tuple(script[1:]),
        interpreter=(sys.executable,)
        if given.python_interpreter is None
        else tuple(shlex.split(given.python_interpreter)),
        devices_per_node=given.num_processes or given.devices_per_node,
        this_host_only=given.num_processes is not None and given.hostfile is None,
        processes_per_node=given.processes_per_node,
        use_gpus=not given.no_gpu,
        log_level=given.log_level,
        log_on_all_devices=given.log_on_all_devices,
        output_on_all_devices=given.output_on_all_devices,
        exports=exports,
        fusion_threshold_kb=given.fusion_threshold,
        timeline=given.timeline,
        checkpoint_dir=given.checkpoint_dir,
        checkpoint_every=given.checkpoint_every,
        tune_steps=given.steps if is_tuning else None,
        pin_to_socket=given.pin_to_socket or given.pin_memory_to_socket,
        pin_memory_to_socket=given.pin_memory_to_socket,
        compilation_cache=not given.no_compilation_cache,
        hostfile=given.hostfile,
        ssh_args=tuple(shlex.split(given.ssh_args)),
        log_dir=given.log_dir,
        port=given.port,
        grace_period_s=given.grace_period,
        dry_run=given.dry_run,
        cleanup=given.cleanup,
        force=given.force,
    )


def _split(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    words = list(argv)
    if "--" not in words:
        return words, []
    at = words.index("--")
    return words[:at], words[at + 1 :]


def _check(given: argparse.Namespace, script: Sequence[str]) -> None:
    if given.num_processes is not None and given.devices_per_node is not None:
        raise ValueError(
            "Use either -n or --devices-per-node (also spelled --n-per-node): they mean the same."
        )
    if given.force and given.cleanup is None:
        raise ValueError("--force is only valid together with --cleanup.")
    if script[:1] == ["-m"] and (len(script) == 1 or given.python_interpreter == ""):
        raise ValueError(
            "-m must be followed by a module, and needs a Python interpreter: tnt-jax -n 2 -- -m "
            "package.train --epochs 3"
        )
    if not script and given.cleanup is None:
        raise ValueError("A script is required, for instance: tnt-jax -n 2 -- train.py --epochs 3")


def _export(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or not name.isidentifier():
        raise ValueError(
            f"-x must be followed by NAME=VALUE, but got {text!r}. If that is the script, put -- "
            "before it."
        )
    return name, value


def _at_least(lowest: int) -> Callable[[str], int]:
    def integer(text: str) -> int:
        if int(text) < lowest:
            raise argparse.ArgumentTypeError(f"must be at least {lowest}, but is {text}")
        return int(text)

    return integer


def _save_freq(text: str) -> str:
    try:
        parse_save_freq(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return text


def _parser(version: str, *, is_tuning: bool) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="tnt-jax",
        usage=f"tnt-jax {'tune ' if is_tuning else ''}[options] -- script.py [arguments]",
        description=(
            "Times ways to sum the gradients of a script's first fit, instead of training, and "
            "recommends options."
            if is_tuning
            else "Runs a training script in one process per device."
        ),
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=version)
    parser.add_argument("script", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    _add_placement(parser.add_argument_group("devices"))
    _add_hosts(parser.add_argument_group("hosts"))
    _add_output(parser.add_argument_group("output"))
    _add_processes(parser.add_argument_group("processes"))
    if is_tuning:
        trials = parser.add_argument_group("trials")
        trials.add_argument(
            "--steps",
            type=_at_least(1),
            default=20,
            metavar="N",
            help="steps per setting in each of 5 rounds (default: %(default)s)",
        )
    return parser


def _add_placement(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add(
        "-n",
        dest="num_processes",
        type=_at_least(1),
        metavar="N",
        help="devices to use on this host, one process each",
    )
    add(
        "--devices-per-node",
        "--n-per-node",
        type=_at_least(1),
        metavar="N",
        help="devices to use on each host (default: all GPUs, or one CPU process)",
    )
    add(
        "--processes-per-node",
        type=_at_least(1),
        metavar="N",
        help="processes that share the devices of a host (default: one per device)",
    )
    add("--no-gpu", "--no-gpus", action="store_true", help="use CPUs only")
    add(
        "--pin-to-socket",
        action="store_true",
        help="bind each process to the processors of one socket, with numactl",
    )
    add("--pin-memory-to-socket", action="store_true", help="bind its memory to that socket, too")


def _add_hosts(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--hostfile", metavar="FILE", help="hosts to use, one per line: NAME [slots=N]")
    add(
        "--ssh-args",
        default="",
        metavar="ARGS",
        help='arguments for ssh, for instance "-F my_config -p 2222"',
    )
    add(
        "--port",
        type=_at_least(1),
        metavar="P",
        help="port at which the processes meet (default: a free one)",
    )
    add(
        "--cleanup",
        nargs="?",
        const="",
        metavar="JOB",
        help="end the remains of a job on its hosts; without an id, list jobs",
    )
    add("--force", action="store_true", help="with --cleanup: kill without asking")


def _add_output(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add(
        "--log-level",
        type=str.upper,
        choices=LOG_LEVELS,
        help="log level of the library and of the launcher",
    )
    add(
        "--log-on-all-devices",
        action="store_true",
        help="log on every process instead of the first alone",
    )
    add(
        "--output-on-all-devices",
        action="store_true",
        help="show the output of every process, each line with its rank",
    )
    add(
        "--log-dir",
        metavar="DIR",
        help="write the output of each process to a file in this directory, on its host",
    )
    add("--dry-run", action="store_true", help="show what would be started, start nothing")


def _add_processes(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add(
        "-x",
        dest="exports",
        nargs="+",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="set variables in every process; $OTHER in a value is expanded there",
    )
    add(
        "--fusion-threshold",
        type=lambda text: "xla" if text == "xla" else _at_least(0)(text),
        metavar="KB",
        help="size in KiB from which a gradient bucket is full; 0 sends each array separately, "
        "xla leaves the choice to the compiler",
    )
    add(
        "--timeline",
        metavar="FILE",
        help="write what each process's host does, for chrome://tracing: process 0 to FILE, "
        "process 1 to FILE with .1 before its ending",
    )
    add(
        "--checkpoint-dir",
        metavar="DIR",
        help="save checkpoints there in every fit, and go on from them when the job is started "
        "again; all hosts must see it",
    )
    add(
        "--checkpoint-every",
        type=_save_freq,
        metavar="N|S",
        help="batches between two checkpoints, epoch, or a time such as 30s (default: 60s)",
    )
    add(
        "--python-interpreter",
        metavar="CMD",
        help='command that runs the script; "" runs the script itself',
    )
    add(
        "--no-compilation-cache",
        action="store_true",
        help="do not keep compiled programs for the next run",
    )
    add(
        "--grace-period",
        type=float,
        default=Options.grace_period_s,
        metavar="S",
        help="seconds that processes get to end after Ctrl-C or SIGTERM (default: %(default)g)",
    )
