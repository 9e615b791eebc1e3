"""The options of `tnt-jax scale`, beside those that each job has."""

import argparse
from collections.abc import Callable
from dataclasses import dataclass

# Options that say how a single job runs, or goes on.
_NOT_WITH_SCALE = {
    "num_processes": "-n", "max_restarts": "--max-restarts", "min_hosts": "--min-hosts",
    "min_devices": "--min-devices", "checkpoint_dir": "--checkpoint-dir",
    "checkpoint_every": "--checkpoint-every", "timeline": "--timeline", "cleanup": "--cleanup",
}  # fmt: skip


@dataclass(frozen=True)
class Scale:
    """What `tnt-jax scale` measures.

    Attributes:
        ranks: Numbers of ranks, increasing.
        steps: Timed steps of a run.
        rounds: Runs on each number of ranks.
        is_weak: Whether the global batch grows with the ranks.
        output: Folder for the results; None to print alone.
        run_timeout_s: Seconds after which a run is ended.
        project: Number of ranks up to which the curve is continued; None to leave it.
        link_gbit: Rate of a host's link in Gbit/s, for this; None to find it.
        tune: Whether ways to sum gradients are compared on the highest number of ranks, too.
    """

    ranks: tuple[int, ...]
    steps: int = 20
    rounds: int = 3
    is_weak: bool = False
    output: str | None = None
    run_timeout_s: float = 1800.0
    project: int | None = None
    link_gbit: float | None = None
    tune: bool = False


def add_scale_arguments(
    group: argparse._ArgumentGroup, at_least: Callable[[int], Callable[[str], int]]
) -> None:
    """Adds the options of `tnt-jax scale` to a group of a parser.

    Args:
        group: The group.
        at_least: Maps the lowest integer that is allowed to what reads one.
    """
    add = group.add_argument
    add(
        "--ranks",
        nargs="+",
        type=at_least(1),
        required=True,
        metavar="N",
        help="numbers of devices to run on, one process each; others are compared with the lowest",
    )
    add(
        "--steps",
        type=at_least(1),
        default=Scale.steps,
        metavar="N",
        help="timed steps of a run, after those that compile and warm up (default: %(default)s)",
    )
    add(
        "--rounds",
        type=at_least(1),
        default=Scale.rounds,
        metavar="R",
        help="runs on each number of ranks; each round takes all numbers in turn "
        "(default: %(default)s)",
    )
    kind = group.add_mutually_exclusive_group()
    kind.add_argument(
        "--strong",
        action="store_true",
        help="keep the script's global batch on all numbers of ranks (default)",
    )
    kind.add_argument(
        "--weak",
        action="store_true",
        help="multiply the global batch with the ranks: the script's own is that of the lowest "
        "number",
    )
    add("--output", metavar="DIR", help="new folder for scaling.json and scaling.png")
    add(
        "--project",
        type=at_least(2),
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
        type=float,
        default=Scale.run_timeout_s,
        metavar="S",
        help="seconds after which a run that has not ended is given up (default: %(default)g)",
    )


def read_scale(given: argparse.Namespace) -> Scale:
    """Returns what to measure.

    Raises:
        ValueError: If an option has no meaning with `scale`, or numbers of ranks are repeated.
    """
    defaults = {"max_restarts": 0}
    for name, option in _NOT_WITH_SCALE.items():
        if getattr(given, name) != defaults.get(name):
            raise ValueError(
                f"{option} cannot be used with tnt-jax scale, which runs a script several times "
                "for a few steps, on the devices that --ranks says. Leave it out."
            )
    if len(set(given.ranks)) < len(given.ranks):
        raise ValueError(f"--ranks must name each number once, but got {_words(given.ranks)}.")
    if given.project is not None and given.project <= max(given.ranks):
        raise ValueError(
            f"--project ({given.project}) must be above the numbers of ranks that are measured "
            f"({_words(given.ranks)})."
        )
    if given.link_gbit is not None and (given.project is None or given.link_gbit <= 0):
        raise ValueError("--link-gbit is only valid together with --project, and must be above 0.")
    if given.tune and max(given.ranks) == 1:
        raise ValueError("--tune needs a number of ranks above 1: one rank sends nothing.")
    if given.run_timeout <= 0:
        raise ValueError(f"--run-timeout must be above 0, but is {given.run_timeout:g}.")
    return Scale(
        ranks=tuple(sorted(given.ranks)),
        steps=given.steps,
        rounds=given.rounds,
        is_weak=given.weak,
        output=given.output,
        run_timeout_s=given.run_timeout,
        project=given.project,
        link_gbit=given.link_gbit,
        tune=given.tune,
    )


def _words(numbers: list[int]) -> str:
    return " ".join(map(str, numbers))
