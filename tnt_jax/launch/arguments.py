"""The arguments of `tnt-jax`, as argparse reads them."""

import argparse
from collections.abc import Callable

from tnt_jax.launch.scale_arguments import add_scale_arguments
from tnt_jax.settings import LOG_LEVELS, parse_save_freq

# Defaults that `options.Options` has, too.
GRACE_PERIOD_S = 30.0
MAX_RESTARTS = 0

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


def make_parser(version: str, command: str) -> argparse.ArgumentParser:
    """Returns the parser of the command line up to the script.

    Args:
        version: What `--version` prints.
        command: The first word, one of `COMMANDS`; empty to train.
    """
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
        add_scale_arguments(parser.add_argument_group("scaling"), _at_least)
    if command == "tune":
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
        action="store_true",
        help="do not keep compiled programs for the next run",
    )
    add(
        "--grace-period",
        type=float,
        default=GRACE_PERIOD_S,
        metavar="S",
        help="seconds that processes get to end after Ctrl-C or SIGTERM (default: %(default)g)",
    )
    add(
        "--max-restarts",
        type=_at_least(0),
        default=MAX_RESTARTS,
        metavar="K",
        help="start a job that failed again, at most K times; the script goes on from its own last "
        "checkpoint",
    )
