"""The command line of `tnt-jax`, read into one frozen, validated `Options`."""

import argparse
import os
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from tnt_jax.launch.arguments import COMMANDS, GRACE_PERIOD_S, MAX_RESTARTS, make_parser
from tnt_jax.launch.scale_arguments import Scale, read_scale


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
        scale: What `tnt-jax scale` measures; None for other commands.
        is_plan: Whether `tnt-jax plan` shows what a step needs instead of training.
        pin_to_socket: Whether each process is bound to the processors of one NUMA node.
        pin_memory_to_socket: Whether its memory is, too.
        compilation_cache: Whether compiled programs are kept between runs.
        hostfile: File that lists the hosts; None for this one.
        ssh_args: Words to add to the ssh command.
        log_dir: Directory for one log file per process; None for none.
        port: Port of the coordinator; None for any free one.
        grace_period_s: Seconds that processes get to end by themselves after Ctrl-C or SIGTERM.
        max_restarts: How many times a job that failed is started again.
        min_hosts: Fewest hosts to start on, leaving out those that cannot take part; None for all.
        ray_address: Address of the Ray cluster to run on; None for hosts.
        ray_devices: Devices to use there.
        min_devices: Fewest devices to start on there, if there is no room for all; None for all.
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
    scale: Scale | None = None
    is_plan: bool = False
    pin_to_socket: bool = False
    pin_memory_to_socket: bool = False
    compilation_cache: bool = True
    hostfile: str | None = None
    ssh_args: tuple[str, ...] = ()
    log_dir: str | None = None
    port: int | None = None
    grace_period_s: float = GRACE_PERIOD_S
    max_restarts: int = MAX_RESTARTS
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
    is_tuning, is_plan = command == "tune", command == "plan"
    ours, script = _split(argv[1:] if command else argv)
    parser = make_parser(version, command)
    given = parser.parse_args(ours)
    exports = tuple(_export(text) for texts in given.exports for text in texts)
    # If a script is named before the first `--`, this `--` belongs to its arguments.
    script = [*given.script, *(["--"] if given.script and "--" in argv else []), *script]
    _check(given, script, command)
    return Options(
        script=script[0] if script else "",
        script_args=tuple(script[1:]),
        interpreter=(sys.executable,)
        if given.python_interpreter is None
        else tuple(shlex.split(given.python_interpreter)),
        devices_per_node=None if given.ray else given.num_processes or given.devices_per_node,
        this_host_only=given.num_processes is not None and given.hostfile is None,
        processes_per_node=1 if is_plan else given.processes_per_node,
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
        scale=read_scale(given) if command == "scale" else None,
        is_plan=is_plan,
        pin_to_socket=given.pin_to_socket or given.pin_memory_to_socket,
        pin_memory_to_socket=given.pin_memory_to_socket,
        compilation_cache=not given.no_compilation_cache,
        hostfile=given.hostfile,
        ssh_args=tuple(shlex.split(given.ssh_args)),
        log_dir=given.log_dir,
        port=given.port,
        grace_period_s=given.grace_period,
        max_restarts=given.max_restarts,
        min_hosts=given.min_hosts,
        ray_address=_ray_address(given) if given.ray else None,
        ray_devices=given.num_processes if given.ray else None,
        min_devices=given.min_devices,
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


def _ray_address(given: argparse.Namespace) -> str:
    return given.ray_address or os.environ.get("RAY_ADDRESS") or "auto"


def _export(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or not name.isidentifier():
        raise ValueError(
            f"-x must be followed by NAME=VALUE, but got {text!r}. If that is the script, put -- "
            "before it."
        )
    return name, value
