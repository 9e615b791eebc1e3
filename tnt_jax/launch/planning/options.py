"""The command line of `tnt-jax`, read into one frozen, validated `Options`."""

import argparse
import os
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Literal

from tnt_jax.settings import LOG_LEVELS, parse_save_freq

_EPILOG = """\
examples:
  tnt-jax -- train.py --epochs 3                   every GPU of this host, or one CPU process
  tnt-jax -n 2 --no-gpu -- train.py                two CPU processes
  tnt-jax -n 2 -- -m package.train --epochs 3      a module instead of a script
  tnt-jax --hostfile hosts -- train.py             every GPU of the hosts in the file, through ssh
  tnt-jax --ray -n 8 -- train.py                   eight processes on the nodes of a Ray cluster
  tnt-jax --dry-run --hostfile hosts -- train.py   show what would be started where
  tnt-jax doctor --hostfile hosts                  find out why it does not work
  tnt-jax scale --ranks 1 2 4 -- train.py          measure how its speed grows with the devices
  tnt-jax tune -n 4 -- train.py                    find the fastest way to sum its gradients
  tnt-jax plan -n 8 --no-gpu -- train.py           show what a step needs, without training
"""

# What the first word of the command line can be, besides other programs.
COMMANDS = {
    "scale": "Times steps of a script's first fit on several numbers of devices, instead of "
    "training, and shows how its speed grows with them.",
    "tune": "Times ways to sum the gradients of a script's first fit, instead of training, and "
    "recommends options.",
    "plan": "Shows where the arrays of a script's first fit lie, and what memory and communication "
    "its step needs by the compiler's own analysis, instead of training.",
}

# Options that say how a single job runs, or goes on.
_NOT_WITH_SCALE = {
    "num_processes": "-n",
    "max_restarts": "--max-restarts",
    "min_hosts": "--min-hosts",
    "min_devices": "--min-devices",
    "checkpoint_dir": "--checkpoint-dir",
    "checkpoint_every": "--checkpoint-every",
    "timeline": "--timeline",
    "cleanup": "--cleanup",
}


@dataclass(frozen=True)
class Scale:
    """What `tnt-jax scale` measures: its options, named and explained as in `_add_scaling`."""

    ranks: tuple[int, ...]
    steps: int = 20
    rounds: int = 3
    is_weak: bool = False
    output: str | None = None
    run_timeout_s: float = 1800.0
    project: int | None = None
    link_gbit: float | None = None
    tune: bool = False


@dataclass(frozen=True)
class Options:
    """The options of the command line, explained where the parser adds them.

    Attributes:
        script: The script to run, or "-m" for the module that is the first of `script_args`; empty
            with `cleanup`.
        script_args: Its arguments.
        interpreter: Words of the command that runs the script; empty to run the script itself.
        devices_per_node: Devices to use on each host; None for all GPUs, or one CPU.
        this_host_only: Whether the user asked for devices of this host, even if a cluster offers
            more hosts.
        exports: Variables for every process, in order; values may refer to others as `$NAME`.
        tune_steps: Steps of each trial of `tnt-jax tune`; None to train.
        scale: What `tnt-jax scale` measures; None for other commands.
        is_plan: Whether `tnt-jax plan` shows what a step needs instead of training.
        ray_address: Address of the Ray cluster to run on; None for hosts.
        ray_devices: Devices to use there.
        cleanup: Id of the job whose remains are ended, empty to list jobs; None to run a job.
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
    scale: Scale | None = None
    is_plan: bool = False
    pin_to_socket: bool = False
    pin_memory_to_socket: bool = False
    compilation_cache: bool = True
    hostfile: str | None = None
    ssh_args: tuple[str, ...] = ()
    log_dir: str | None = None
    port: int | None = None
    grace_period_s: float = 30.0
    max_restarts: int = 0
    min_hosts: int | None = None
    ray_address: str | None = None
    ray_devices: int | None = None
    min_devices: int | None = None
    dry_run: bool = False
    cleanup: str | None = None
    force: bool = False

    @property
    def script_name(self) -> str:
        """The path of the script, or the name of the module."""
        return self.script_args[0] if self.script == "-m" else self.script

    @property
    def ends_early(self) -> bool:
        """Whether the script ends with its first `fit`, which measures instead of training."""
        return self.is_plan or self.tune_steps is not None or self.scale is not None


def parse_options(argv: Sequence[str], *, version: str) -> Options:
    """Returns the options of a command line; prints help or an error and exits where argparse does.

    Everything after `--`, or from the first word that is not an option, is the script and its
    arguments. The first word `tune` selects trials instead of training, and allows `--steps`;
    `scale` selects measurements on several numbers of devices, and has options of its own; `plan`
    selects a plan, for which one process has all devices.

    Raises:
        ValueError: If options contradict each other, or an argument of `-x` is not NAME=VALUE.
    """
    command = argv[0] if argv and argv[0] in COMMANDS else ""
    words = list(argv[1:] if command else argv)
    at = words.index("--") if "--" in words else len(words)
    given = _make_parser(version, command).parse_args(words[:at])
    exports = tuple(_export(text) for texts in given.exports for text in texts)
    # If a script is named before the first `--`, this `--` belongs to its arguments.
    script = [*given.script, *words[at if given.script else at + 1 :]]
    _check(given, script, command)
    names = {field.name for field in fields(Options)}
    chosen = {name: value for name, value in vars(given).items() if name in names}
    chosen |= {
        "script": script[0] if script else "",
        "script_args": tuple(script[1:]),
        "exports": exports,
        "ssh_args": tuple(shlex.split(given.ssh_args)),
        "pin_to_socket": given.pin_to_socket or given.pin_memory_to_socket,
        "this_host_only": given.num_processes is not None and given.hostfile is None,
        "scale": _read_scale(given) if command == "scale" else None,
        "is_plan": command == "plan",
    }
    if given.python_interpreter is not None:
        chosen["interpreter"] = tuple(shlex.split(given.python_interpreter))
    if command == "plan":
        chosen["processes_per_node"] = 1
    if given.ray:
        chosen["ray_address"] = given.ray_address or os.environ.get("RAY_ADDRESS") or "auto"
        chosen["ray_devices"] = given.num_processes
    else:
        chosen["devices_per_node"] = given.num_processes or given.devices_per_node
    return Options(**chosen)


def _read_scale(given: argparse.Namespace) -> Scale:
    for name, option in _NOT_WITH_SCALE.items():
        # The default is None, or 0 for --max-restarts.
        if getattr(given, name) not in (None, 0):
            raise ValueError(
                f"{option} cannot be used with tnt-jax scale, which runs a script several times "
                "for a few steps, on the devices that --ranks says. Leave it out."
            )
    ranks = " ".join(map(str, given.ranks))
    if len(set(given.ranks)) < len(given.ranks):
        raise ValueError(f"--ranks must name each number once, but got {ranks}.")
    if given.project is not None and given.project <= max(given.ranks):
        raise ValueError(
            f"--project ({given.project}) must be above the numbers of ranks that are measured "
            f"({ranks})."
        )
    if given.link_gbit is not None and (given.project is None or given.link_gbit <= 0):
        raise ValueError("--link-gbit is only valid together with --project, and must be above 0.")
    if given.tune and max(given.ranks) == 1:
        raise ValueError("--tune needs a number of ranks above 1: one rank sends nothing.")
    if given.run_timeout_s <= 0:
        raise ValueError(f"--run-timeout must be above 0, but is {given.run_timeout_s:g}.")
    chosen = {field.name: getattr(given, field.name) for field in fields(Scale)}
    return Scale(**{**chosen, "ranks": tuple(sorted(given.ranks))})


def _check(given: argparse.Namespace, script: Sequence[str], command: str) -> None:
    if given.num_processes is not None and given.devices_per_node is not None:
        raise ValueError(
            "Use either -n or --devices-per-node (also spelled --n-per-node): they mean the same."
        )
    _check_ray(given, command)
    if given.force and given.cleanup is None:
        raise ValueError("--force is only valid together with --cleanup.")
    if script[:1] == ["-m"] and (len(script) == 1 or given.python_interpreter == ""):
        raise ValueError(
            "-m must be followed by a module, and needs a Python interpreter: tnt-jax -n 2 -- -m "
            "package.train --epochs 3"
        )
    if command and given.python_interpreter == "":
        raise ValueError(
            f"tnt-jax {command} runs a Python script up to its first fit, and needs an "
            "interpreter: name the script, and leave --python-interpreter out: "
            f"tnt-jax {command} -n 2 -- train.py"
        )
    if not script and given.cleanup is None:
        raise ValueError("A script is required, for instance: tnt-jax -n 2 -- train.py --epochs 3")


def _check_ray(given: argparse.Namespace, command: str) -> None:
    if not given.ray:
        if given.ray_address is not None or given.min_devices is not None:
            raise ValueError("--ray-address and --min-devices are only valid together with --ray.")
        return
    if given.num_processes is None and command != "scale":
        raise ValueError(
            "--ray needs -n, the number of processes, each of which gets a CPU, and a GPU if the "
            "cluster has them: tnt-jax --ray -n 8 -- train.py"
        )
    others = {
        "--hostfile": given.hostfile,
        "--min-hosts": given.min_hosts,
        "--devices-per-node": given.devices_per_node,
        "--cleanup": given.cleanup,
    }
    wrong = [name for name, value in others.items() if value is not None]
    if wrong:
        raise ValueError(
            f"{wrong[0]} cannot be used together with --ray, which chooses the nodes and leaves "
            "nothing behind; --min-devices says on how few devices to start."
        )
    if given.min_devices is not None and given.min_devices > given.num_processes:
        raise ValueError(
            f"--min-devices ({given.min_devices}) must not be above -n ({given.num_processes})."
        )


def _export(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or not name.isidentifier():
        raise ValueError(
            f"-x must be followed by NAME=VALUE, but got {text!r}. If that is the script, put -- "
            "before it."
        )
    return name, value


def _make_parser(version: str, command: str) -> argparse.ArgumentParser:
    """Returns the parser of the command line up to the script; `dest` is a field of `Options`."""
    parser = argparse.ArgumentParser(
        prog="tnt-jax",
        usage=f"tnt-jax {f'{command} ' if command else ''}[options] -- script.py [arguments]",
        description=COMMANDS.get(command, "Runs a training script in one process per device."),
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
    if command == "scale":
        _add_scaling(parser.add_argument_group("scaling"))
    if command == "tune":
        trials = parser.add_argument_group("trials")
        trials.add_argument(
            "--steps",
            dest="tune_steps",
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
        help="devices to use on this host, or with --ray in the cluster, one process each",
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
    add("--no-gpu", "--no-gpus", dest="use_gpus", action="store_false", help="use CPUs only")
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
        "--min-hosts",
        type=_at_least(1),
        metavar="M",
        help="start on the hosts that can take part, if these are at least M (default: all)",
    )
    add(
        "--ray",
        action="store_true",
        help="start -n processes wherever a Ray cluster has room for them",
    )
    add(
        "--ray-address",
        metavar="ADDRESS",
        help="address of the cluster (default: RAY_ADDRESS, or that of this host)",
    )
    add(
        "--min-devices",
        type=_at_least(1),
        metavar="M",
        help="with --ray: start on fewer devices than -n if there is room for at least M",
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
        dest="fusion_threshold_kb",
        type=lambda text: "xla" if text == "xla" else _at_least(0)(text),
        metavar="KiB",
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
        dest="compilation_cache",
        action="store_false",
        help="do not keep compiled programs for the next run",
    )
    add(
        "--grace-period",
        dest="grace_period_s",
        type=float,
        default=Options.grace_period_s,
        metavar="S",
        help="seconds that processes get to end after Ctrl-C or SIGTERM (default: %(default)g)",
    )
    add(
        "--max-restarts",
        type=_at_least(0),
        default=Options.max_restarts,
        metavar="K",
        help="start a job that failed again, at most K times; the script goes on from its own last "
        "checkpoint",
    )


def _add_scaling(group: argparse._ArgumentGroup) -> None:
    """Adds the options of `tnt-jax scale`; `dest` is a field of `Scale`."""
    add = group.add_argument
    add(
        "--ranks",
        nargs="+",
        type=_at_least(1),
        required=True,
        metavar="N",
        help="numbers of devices to run on, one process each; others are compared with the lowest",
    )
    add(
        "--steps",
        type=_at_least(1),
        default=Scale.steps,
        metavar="N",
        help="timed steps of a run, after those that compile and warm up (default: %(default)s)",
    )
    add(
        "--rounds",
        type=_at_least(1),
        default=Scale.rounds,
        metavar="R",
        help="runs on each number of ranks; each round takes all numbers in turn "
        "(default: %(default)s)",
    )
    kind = group.add_mutually_exclusive_group()
    kind.add_argument(
        "--strong",
        dest="is_weak",
        action="store_const",
        const=False,
        default=False,
        help="keep the script's global batch on all numbers of ranks (default)",
    )
    kind.add_argument(
        "--weak",
        dest="is_weak",
        action="store_true",
        help="multiply the global batch with the ranks: the script's own is that of the lowest "
        "number",
    )
    add("--output", metavar="DIR", help="new folder for scaling.json and scaling.png")
    add(
        "--project",
        type=_at_least(2),
        metavar="N",
        help="continue the curve to N ranks by a model of the links, and state its error",
    )
    add(
        "--link-gbit",
        type=float,
        metavar="G",
        help="with --project: rate of a host's link in Gbit/s (default: found by what is measured)",
    )
    add(
        "--tune",
        action="store_true",
        help="also find the fastest way to sum gradients on the highest number, as tnt-jax tune",
    )
    add(
        "--run-timeout",
        dest="run_timeout_s",
        type=float,
        default=Scale.run_timeout_s,
        metavar="S",
        help="seconds after which a run that has not ended is given up (default: %(default)g)",
    )


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
