"""Runs a script, as jobs that end early, keeps what each run reports, and writes the results."""

import os
import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tnt_jax.launch.planning.facts import find_obstacles
from tnt_jax.launch.planning.options import Options
from tnt_jax.launch.planning.plan import choose_devices
from tnt_jax.launch.remote.connection import Lines
from tnt_jax.launch.remote.hosts import HostEntry, job_hosts, taking_hosts
from tnt_jax.launch.remote.screen import Screen, say
from tnt_jax.launch.run import (
    Attempt,
    Ending,
    ask_facts,
    check,
    hosts_of,
    new_job_id,
    open_session,
    run_attempt,
)

# A line may hold the report of thousands of arrays.
_LONGEST_LINE_BYTES = 1 << 24


class Stopped(Exception):
    """A signal has ended a run, and all that would follow, with the exit code of the argument."""


IsKept = Callable[[bytes], bool]
"""Returns whether a line is one in which process 0 reports something."""


def marked(mark: str) -> IsKept:
    """Returns whether a line begins with a mark, as a function of the line."""
    return lambda line: line.startswith(mark.encode())


class Listener:
    """Replaces the screen: what process 0 reports is `kept`; `shows` says if the rest is shown."""

    def __init__(self, is_kept: IsKept, *, shows: bool) -> None:
        self.kept: list[str] = []
        self._is_kept = is_kept
        self._screen = Screen([]) if shows else None
        self._lines = Lines(_LONGEST_LINE_BYTES)

    def write(self, rank: int, name: str, data: bytes) -> None:
        """Takes a piece of output of a rank."""
        if rank == 0 and name == "stdout":
            for line in filter(self._is_kept, self._lines.feed(data)):
                self.kept.append(line.decode(errors="replace").rstrip())
        if self._screen is not None:
            self._screen.write(rank, name, data)


@dataclass(frozen=True)
class Report:
    """What a run has reported, on how many hosts, and why it has failed; empty if it has not."""

    lines: list[str]
    num_hosts: int
    because: str


def run_listening(
    entries: Sequence[HostEntry],
    options: Options,
    environ: Mapping[str, str],
    is_kept: IsKept,
    limit_s: float,
) -> tuple[Ending, list[str]]:
    """Runs a job for some seconds at most; returns how it ended, and what it has reported."""
    listener = Listener(is_kept, shows=options.output_on_all_devices)
    attempt = Attempt(new_job_id(options.script_name), entries)
    ending = run_attempt(attempt, options, environ, write=listener.write, timeout_s=limit_s)
    return ending, listener.kept


def write_results(
    files: Mapping[Path, Callable[[], str | bytes]], *, what: str, note: str = ""
) -> bool:
    """Writes what functions return, and says so, or why it could not; returns whether it could."""
    try:
        for path, make in files.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            content = make()
            path.write_bytes(content.encode() if isinstance(content, str) else content)
    except OSError as error:
        say(f"error: the {what} could not be written: {error}")
        return False
    say(f"Wrote {' and '.join(map(str, files))}{note}.")
    return True


def check_folder(folder: Path) -> None:
    """Raises a ValueError unless results can be written to a folder without touching others."""
    if folder.is_dir() and not any(folder.iterdir()):
        return
    if folder.exists() or folder.is_symlink():
        raise ValueError(
            f"--output {folder} exists already, and what it holds is kept. Name a new folder, or "
            "an empty one."
        )
    parent = next(parent for parent in folder.absolute().parents if parent.exists())
    if not parent.is_dir() or not os.access(parent, os.W_OK):
        raise ValueError(f"--output {folder} cannot be made: {parent} cannot be written to.")


@dataclass(frozen=True)
class Layout:
    """Where a number of ranks runs: on these hosts, with so many devices each."""

    entries: tuple[HostEntry, ...]
    per_host: int


def choose_layouts(
    options: Options, ranks: Sequence[int], environ: Mapping[str, str]
) -> dict[int, Layout]:
    """Returns where each number of ranks runs, unless Ray chooses; connects to all hosts once."""
    if options.ray_address is not None:
        return {}
    entries = job_hosts(options, environ)
    if len(entries) == 1 and entries[0].slots is None and options.devices_per_node is None:
        options = replace(options, devices_per_node=max(ranks))
    with open_session(entries, options) as session:
        facts = ask_facts(session, options, environ)
        check(find_obstacles(facts))
    devices = choose_devices(hosts_of(entries, facts), options)
    found = {host: len(have.gpus) for host, have in facts.items() if have.gpus}
    if options.use_gpus and devices.kind == "cpu" and found:
        listed = ", ".join(f"{name} has {number}" for name, number in found.items())
        raise ValueError(
            f"There are too few GPUs for the numbers of ranks ({listed}, as far as JAX can use "
            "them). Name smaller numbers, or measure CPUs with --no-gpu."
        )
    return {number: lay_out(number, entries, devices.per_host) for number in ranks}


def lay_out(ranks: int, entries: Sequence[HostEntry], per_host: Sequence[int]) -> Layout:
    """Returns the first hosts, with equally many devices each, that have so many devices."""
    total, most = sum(per_host), per_host[0]
    if ranks > total:
        raise ValueError(
            f"--ranks {ranks} needs as many devices, but the {len(entries)} host(s) have {total} "
            "together. Name more hosts, say how many each has with slots=N in the hostfile or with "
            "--devices-per-node, or leave the number out."
        )
    used, each = -(-ranks // most), min(ranks, most)
    if ranks % each or any(number != most for number in per_host[:used]):
        raise ValueError(
            f"--ranks {ranks} cannot be shared evenly by hosts with "
            f"{', '.join(map(str, per_host))} device(s): above {most}, name multiples of {most} "
            "that whole hosts have."
        )
    return Layout(tuple(replace(entry, slots=None) for entry in entries[:used]), each)


@dataclass(frozen=True)
class Trials:
    """Runs of a script on numbers of ranks.

    Attributes:
        layouts: Where each number runs, as of `choose_layouts`.
        limit_s: Seconds that a run may take.
        wanted: What the script must call.
    """

    layouts: Mapping[int, Layout]
    options: Options
    environ: Mapping[str, str]
    limit_s: float
    wanted: str

    def run(self, ranks: int, is_kept: IsKept, **changes: Any) -> Report:
        """Runs the script once, with changes of the options, and keeps the lines that are reported.

        Raises:
            Stopped: If a signal has ended it.
            ValueError, HostError, OSError: If it cannot be started.
        """
        layout = self.layouts.get(ranks)
        size = {"ray_devices": ranks} if layout is None else {"devices_per_node": layout.per_host}
        options = replace(self.options, **changes, **size)
        # It waits no longer than a run may take for room on a cluster of Ray.
        with taking_hosts(options, self.environ, wait_s=self.limit_s) as take:
            entries = take() if layout is None else list(layout.entries)
            ending, kept = run_listening(entries, options, self.environ, is_kept, self.limit_s)
        if ending.was_signalled:
            raise Stopped(ending.code or 128 + signal.SIGINT)
        because = ending.because if ending.code else ""
        if not (because or kept):
            because = f"{options.script_name} has ended without {self.wanted}."
        return Report(kept, len(entries), because)
