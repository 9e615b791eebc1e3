"""The command line of `tnt-jax`, read into one frozen, validated `Options`."""

import argparse
import os
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import MISSING, dataclass, field, fields
from typing import Any, Literal

from tnt_jax.settings import LOG_LEVELS, Recording, parse_save_freq

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
  tnt-jax verify --ranks 1 2 4 -- train.py         check that they change nothing but the speed
  tnt-jax explain -n 4 -- train.py                 find out where the time of a step goes
  tnt-jax tune -n 4 -- train.py                    find the fastest way to sum its gradients
  tnt-jax plan -n 8 --no-gpu -- train.py           show what a step needs, without training
"""

# What the first word of the command line can be, besides other programs.
COMMANDS = {
    "scale": "Times steps of a script's first fit on several numbers of devices, instead of "
    "training, and shows how its speed grows with them.",
    "verify": "Trains a script's first steps on several numbers of devices, in passes, with "
    "sharded optimizer state, and with a fault in the middle, and says where results differ by "
    "more than rounding.",
    "explain": "Times the steps of a script's first fit, or of its custom training loop, with one "
    "thing after another removed (callbacks, data, sums, other ranks, rows), says where the time "
    "goes, and tries what may help.",
    "tune": "Times ways to sum the gradients of a script's first fit, instead of training, and "
    "recommends options.",
    "plan": "Shows where the arrays of a script's first fit lie, and what memory and communication "
    "its step needs by the compiler's own analysis, instead of training.",
}

# Options that say how a single job runs, or goes on.
_NOT_WITH_RUNS = """num_processes max_restarts min_hosts min_devices checkpoint_dir
    checkpoint_every timeline cleanup""".split()


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


def _option(metavar: str | None, help: str, *, default: Any = None, **settings: Any) -> Any:
    """Returns a field that an option sets, by its own name or `flags`, as of `add_argument`."""
    return field(default=default, metadata={"metavar": metavar, "help": help, **settings})


def _number(metavar: str, help: str, *, lowest: int = 1, **settings: Any) -> Any:
    return _option(metavar, help, type=_at_least(lowest), **settings)


def _flag(help: str, *, default: bool = False, **settings: Any) -> Any:
    """Returns a field that an option without a value reverses."""
    action = "store_false" if default else "store_true"
    return field(default=default, metadata={"action": action, "help": help, **settings})


def _run_timeout() -> Any:
    """Returns the field for how long a run of a command may take that starts several."""
    return _option(
        "S",
        "seconds after which a run that has not ended is given up (default: %(default)g)",
        default=1800.0,
        flags=["--run-timeout"],
        type=float,
    )


@dataclass(frozen=True)
class Scale:
    """Options of `tnt-jax scale`; with `is_weak` the global batch grows with the ranks."""

    ranks: tuple[int, ...] = _number(
        "N",
        "numbers of devices to run on, one process each; others are compared with the lowest",
        default=MISSING,
        nargs="+",
        required=True,
    )
    steps: int = _number(
        "N",
        "timed steps of a run, after those that compile and warm up (default: %(default)s)",
        default=20,
    )
    rounds: int = _number(
        "R",
        "runs on each number of ranks; each round takes all numbers in turn (default: %(default)s)",
        default=3,
    )
    is_weak: bool = _flag(
        "multiply the global batch with the ranks: the script's own is that of the lowest number",
        flags=["--weak"],
        opposite={"--strong": "keep the script's global batch on all numbers of ranks (default)"},
    )
    output: str | None = _option("DIR", "new folder for scaling.json and scaling.png")
    project: int | None = _number(
        "N", "continue the curve to N ranks by a model of the links, and state its error", lowest=2
    )
    link_gbit: float | None = _option(
        "G",
        "with --project: rate of a host's link in Gbit/s (default: found by what is measured)",
        type=float,
    )
    tune: bool = _flag(
        "also find the fastest way to sum gradients on the highest number, as tnt-jax tune"
    )
    run_timeout_s: float = _run_timeout()


@dataclass(frozen=True)
class Verify:
    """Options of `tnt-jax verify`."""

    ranks: tuple[int, ...] = _number(
        "N",
        "numbers of devices to train on; others are compared with the lowest (default: 1 2 4)",
        default=(1, 2, 4),
        nargs="+",
    )
    steps: int = _number(
        "N", "training steps that are compared (default: %(default)s)", default=8, lowest=2
    )
    rounds: int = _number(
        "R",
        "rounds in which the speed is measured as well, as tnt-jax scale does; 0 for none "
        "(default: %(default)s)",
        default=0,
        lowest=0,
    )
    receipt: str | None = _option("FILE", "new file for the receipt, as JSON")
    against: str | None = _option("FILE", "a receipt, also of another machine, to compare with")
    scratch: str | None = _option(
        "DIR",
        "folder that all hosts see, for the run that is resumed (default: a temporary one, on one "
        "host)",
    )
    run_timeout_s: float = _run_timeout()


@dataclass(frozen=True)
class Explain:
    """How `tnt-jax explain` measures."""

    steps: int = _number(
        "N", "steps of each kind that are timed in a round (default: %(default)s)", default=20
    )
    rounds: int = _number(
        "R", "rounds, each of which takes all kinds in turn (default: %(default)s)", default=5
    )
    output: str | None = _option("DIR", "new folder for explain.json and explain.html")
    run_timeout_s: float = _run_timeout()


# The commands that run a script for a few steps, with the tables of their options.
_RUNS: dict[str, Any] = {"scale": Scale, "verify": Verify, "explain": Explain}


@dataclass(frozen=True)
class Options:
    """Options of `tnt-jax`, and values that follow from them."""

    # The script to run, or "-m" for the module that is the first argument; empty with `cleanup`.
    script: str
    script_args: tuple[str, ...] = ()
    # Whether the user asked for devices of this host, even if a cluster offers more hosts.
    this_host_only: bool = False
    tune_steps: int | None = None  # Steps of each trial of `tnt-jax tune`; None to train.
    # What these commands run; None for others.
    scale: Scale | None = None
    verify: Verify | None = None
    explain: Explain | None = None
    # How a run of it trains, and for how many steps; None if nothing is recorded.
    recording: tuple[Recording, int] | None = None
    is_plan: bool = False  # Whether to show what a step needs instead of training.

    devices_per_node: int | None = _number(
        "N",
        "devices to use on each host (default: all GPUs, or one CPU process)",
        flags=["--devices-per-node", "--n-per-node"],
    )
    processes_per_node: int | None = _number(
        "N", "processes that share the devices of a host (default: one per device)"
    )
    use_gpus: bool = _flag("use CPUs only", default=True, flags=["--no-gpu", "--no-gpus"])
    pin_to_socket: bool = _flag("bind each process to the processors of one socket, with numactl")
    pin_memory_to_socket: bool = _flag("bind its memory to that socket, too")

    hostfile: str | None = _option("FILE", "hosts to use, one per line: NAME [slots=N]")
    ssh_args: tuple[str, ...] = _option(
        "ARGS", 'arguments for ssh, for instance "-F my_config -p 2222"', default=()
    )
    port: int | None = _number("P", "port at which the processes meet (default: a free one)")
    min_hosts: int | None = _number(
        "M", "start on the hosts that can take part, if these are at least M (default: all)"
    )
    # None without Ray.
    ray_address: str | None = _option(
        "ADDRESS", "address of the cluster (default: RAY_ADDRESS, or that of this host)"
    )
    # Devices to use there; None for all nodes, of which none is reserved.
    ray_devices: int | None = None
    min_devices: int | None = _number(
        "M", "with --ray: start on fewer devices than -n if there is room for at least M"
    )
    # Empty to list jobs; None to run one.
    cleanup: str | None = _option(
        "JOB",
        "end the remains of a job on its hosts; without an id, list jobs",
        nargs="?",
        const="",
    )
    force: bool = _flag("with --cleanup: kill without asking")

    log_level: str | None = _option(
        None, "log level of the library and of the launcher", type=str.upper, choices=LOG_LEVELS
    )
    log_on_all_devices: bool = _flag("log on every process instead of the first alone")
    output_on_all_devices: bool = _flag("show the output of every process, each line with its rank")
    log_dir: str | None = _option(
        "DIR", "write the output of each process to a file in this directory, on its host"
    )
    dry_run: bool = _flag("show what would be started, start nothing")

    exports: tuple[tuple[str, str], ...] = ()
    fusion_threshold_kb: int | Literal["xla"] | None = _option(
        "KiB",
        "size in KiB from which a gradient bucket is full; 0 sends each array separately, "
        "xla leaves the choice to the compiler",
        flags=["--fusion-threshold"],
        type=lambda text: "xla" if text == "xla" else _at_least(0)(text),
    )
    timeline: str | None = _option(
        "FILE",
        "write what each process's host does, for chrome://tracing: process 0 to FILE, "
        "process 1 to FILE with .1 before its ending",
    )
    checkpoint_dir: str | None = _option(
        "DIR",
        "save checkpoints there in every fit, and go on from them when the job is started "
        "again; all hosts must see it",
    )
    checkpoint_every: str | None = _option(
        "N|S",
        "batches between two checkpoints, epoch, or a time such as 30s (default: 60s)",
        type=_save_freq,
    )
    # Words of the command; empty to run the script itself.
    interpreter: tuple[str, ...] = _option(
        "CMD",
        'command that runs the script; "" runs the script itself',
        default=(sys.executable,),
        flags=["--python-interpreter"],
    )
    compilation_cache: bool = _flag(
        "do not keep compiled programs for the next run",
        default=True,
        flags=["--no-compilation-cache"],
    )
    grace_period_s: float = _option(
        "S",
        "seconds that processes get to end after Ctrl-C or SIGTERM (default: %(default)g)",
        default=30.0,
        flags=["--grace-period"],
        type=float,
    )
    max_restarts: int = _number(
        "K",
        "start a job that failed again, at most K times; the script goes on from its own last "
        "checkpoint",
        lowest=0,
        default=0,
    )
    elastic: bool = _flag(
        "train on with the other processes when one is lost, and start another in its place, which "
        "joins them; see docs/survival.md"
    )
    min_processes: int | None = _number(
        "K", "with --elastic: fewest processes that train on (default: 1)"
    )

    @property
    def script_name(self) -> str:
        """The path of the script, or the name of the module."""
        return self.script_args[0] if self.script == "-m" else self.script

    @property
    def ends_early(self) -> bool:
        """Whether the script ends with its first `fit`, which measures instead of training."""
        commands = (self.tune_steps, self.scale, self.explain, self.recording)
        return self.is_plan or any(command is not None for command in commands)


def parse_options(argv: Sequence[str], *, version: str) -> Options:
    """Returns the options of a command line; prints help or an error and exits where argparse does.

    Everything after `--`, or from the first word that is not an option, is the script and its
    arguments. The first word can be one of `COMMANDS`; for a plan one process has all devices. A
    ValueError says that options contradict each other, or an argument of `-x` is not NAME=VALUE.
    """
    command = argv[0] if argv and argv[0] in COMMANDS else ""
    words = list(argv[1:] if command else argv)
    at = words.index("--") if "--" in words else len(words)
    given = _make_parser(version, command).parse_args(words[:at])
    exports = tuple(_export(text) for texts in given.exports for text in texts)
    # If a script is named before the first `--`, this `--` belongs to its arguments.
    script = [*given.script, *words[at if given.script else at + 1 :]]
    _check(given, script, command)
    known = Options.__dataclass_fields__
    chosen = {name: value for name, value in vars(given).items() if name in known}
    chosen |= {
        "script": script[0] if script else "",
        "script_args": tuple(script[1:]),
        "exports": exports,
        "interpreter": _words(given.interpreter),
        "ssh_args": _words(given.ssh_args),
        "pin_to_socket": given.pin_to_socket or given.pin_memory_to_socket,
        "this_host_only": given.num_processes is not None and given.hostfile is None,
        "is_plan": command == "plan",
    }
    if command in _RUNS:
        chosen[command] = _read_runs(given, command)
    if command == "plan":
        chosen["processes_per_node"] = 1
    if given.ray:
        chosen["ray_address"] = given.ray_address or os.environ.get("RAY_ADDRESS") or "auto"
        chosen["ray_devices"] = given.num_processes
    else:
        chosen["devices_per_node"] = given.num_processes or given.devices_per_node
    return Options(**chosen)


def _read_runs(given: argparse.Namespace, command: str) -> Any:
    """Returns the checked options of a command that runs a script for a few steps."""
    is_explain = command == "explain"
    when = "for a few steps"
    if not is_explain:
        when = "several times for a few steps, on the devices that --ranks says"
    for name in _NOT_WITH_RUNS:
        is_allowed = is_explain and name in ("num_processes", "timeline")
        # The default is None, or 0 for --max-restarts.
        if not is_allowed and getattr(given, name) not in (None, 0):
            option = "-n" if name == "num_processes" else _spelled(name)
            raise ValueError(
                f"{option} cannot be used with tnt-jax {command}, which runs a script {when}. "
                "Leave it out."
            )
    if not given.run_timeout_s > 0:
        raise ValueError(f"--run-timeout must be above 0, but is {given.run_timeout_s:g}.")
    if is_explain and given.ray:
        raise ValueError(
            "--ray cannot be used with tnt-jax explain. Start it on hosts that are named by "
            "--hostfile, or on this one."
        )
    chosen = {each.name: getattr(given, each.name) for each in fields(_RUNS[command])}
    if not is_explain:
        ranks = " ".join(map(str, given.ranks))
        if len(set(given.ranks)) < len(given.ranks):
            raise ValueError(f"--ranks must name each number once, but got {ranks}.")
        chosen["ranks"] = tuple(sorted(given.ranks))
    if command == "scale":
        _check_scale(given)
    return _RUNS[command](**chosen)


def _check_scale(given: argparse.Namespace) -> None:
    if given.project is not None and given.project <= max(given.ranks):
        raise ValueError(
            f"--project ({given.project}) must be above the numbers of ranks that are measured "
            f"({' '.join(map(str, given.ranks))})."
        )
    if given.link_gbit is not None and (given.project is None or given.link_gbit <= 0):
        raise ValueError("--link-gbit is only valid together with --project, and must be above 0.")
    if given.tune and max(given.ranks) == 1:
        raise ValueError("--tune needs a number of ranks above 1: one rank sends nothing.")


def _words(option: str | tuple[str, ...]) -> tuple[str, ...]:
    """Splits what was given as a shell does; a default is a tuple already."""
    return tuple(shlex.split(option)) if isinstance(option, str) else option


def _check(given: argparse.Namespace, script: Sequence[str], command: str) -> None:
    if given.num_processes is not None and given.devices_per_node is not None:
        raise ValueError(
            "Use either -n or --devices-per-node (also spelled --n-per-node): they mean the same."
        )
    _check_ray(given, command)
    if given.min_processes is not None and not given.elastic:
        raise ValueError("--min-processes is only valid together with --elastic.")
    if given.elastic and command:
        raise ValueError(
            f"--elastic cannot be used with tnt-jax {command}, which ends with the first fit. "
            "Leave it out."
        )
    if given.force and given.cleanup is None:
        raise ValueError("--force is only valid together with --cleanup.")
    if script[:1] == ["-m"] and (len(script) == 1 or given.interpreter == ""):
        raise ValueError(
            "-m must be followed by a module, and needs a Python interpreter: tnt-jax -n 2 -- -m "
            "package.train --epochs 3"
        )
    if command and given.interpreter == "":
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
    if given.num_processes is None and command not in ("scale", "verify"):
        raise ValueError(
            "--ray needs -n, the number of processes, each of which gets a CPU, and a GPU if the "
            "cluster has them: tnt-jax --ray -n 8 -- train.py"
        )
    others = "hostfile min_hosts devices_per_node cleanup".split()
    wrong = [name for name in others if getattr(given, name) is not None]
    if wrong:
        raise ValueError(
            f"{_spelled(wrong[0])} cannot be used together with --ray, which chooses the nodes and "
            "leaves nothing behind; --min-devices says on how few devices to start."
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
    devices = parser.add_argument_group("devices")
    devices.add_argument(
        "-n",
        dest="num_processes",
        type=_at_least(1),
        metavar="N",
        help="devices to use on this host, or with --ray in the cluster, one process each",
    )
    hosts = parser.add_argument_group("hosts")
    add_options(devices, "devices_per_node processes_per_node use_gpus pin_to_socket")
    add_options(devices, "pin_memory_to_socket")
    add_options(hosts, "hostfile ssh_args port min_hosts")
    hosts.add_argument(
        "--ray",
        action="store_true",
        help="start -n processes wherever a Ray cluster has room for them",
    )
    add_options(hosts, "ray_address min_devices cleanup force")
    output = parser.add_argument_group("output")
    add_options(output, "log_level log_on_all_devices output_on_all_devices log_dir dry_run")
    processes = parser.add_argument_group("processes")
    processes.add_argument(
        "-x",
        dest="exports",
        nargs="+",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="set variables in every process; $OTHER in a value is expanded there",
    )
    add_options(processes, "fusion_threshold_kb timeline checkpoint_dir checkpoint_every")
    add_options(processes, "interpreter compilation_cache grace_period_s max_restarts elastic")
    add_options(processes, "min_processes")
    if command in _RUNS:
        title = {"scale": "scaling", "verify": "verification", "explain": "explanation"}[command]
        names = " ".join(each.name for each in fields(_RUNS[command]))
        add_options(parser.add_argument_group(title), names, _RUNS[command])
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


def add_options(group: Any, names: str, table: type = Options) -> None:
    """Adds the options that set these fields of a table to a parser, or to a group of one."""
    for name in names.split():
        found, place = table.__dataclass_fields__[name], group
        settings = {"default": found.default, **found.metadata}
        flags = settings.pop("flags", [_spelled(name)])
        for flag, text in settings.pop("opposite", {}).items():
            place = group.add_mutually_exclusive_group()
            place.add_argument(flag, dest=name, action="store_false", default=False, help=text)
        place.add_argument(*flags, dest=name, **settings)


def _spelled(name: str) -> str:
    return f"--{name.replace('_', '-')}"
