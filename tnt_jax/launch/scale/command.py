"""Runs a script on several numbers of devices, in turns, and reports how its speed grows."""

import os
import re
import signal
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path

from tnt_jax.launch.planning.hostfile import HostEntry
from tnt_jax.launch.planning.options import Options, Scale
from tnt_jax.launch.planning.plan import choose_devices
from tnt_jax.launch.planning.preflight import find_obstacles
from tnt_jax.launch.remote.connection import Lines
from tnt_jax.launch.remote.ray_nodes import RayNodes
from tnt_jax.launch.remote.screen import Screen, say
from tnt_jax.launch.remote.session import HostError
from tnt_jax.launch.run import (
    Attempt,
    ask_facts,
    check,
    hosts_of,
    job_hosts,
    new_job_id,
    open_session,
    run_attempt,
)
from tnt_jax.launch.scale.projection import why_not_projected
from tnt_jax.launch.scale.runs import MARK, Run, read_line
from tnt_jax.launch.scale.scaling import RESULTS, Scaling, continue_curve

_PICTURE = "scaling.png"
_LONGEST_LINE_BYTES = 1 << 20
_TRIALS = re.compile(rb"\d+ rank\(s\) on \w+, \d+ rounds of \d+ steps each$")


class _Stopped(Exception):
    """A signal has ended a run, with this exit code, and all that would follow."""

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code


class _Listener:
    """Replaces the screen: keeps the line that tells what was measured, and a table of trials.

    The screen shows what else the processes print; None keeps it from the user.
    """

    def __init__(self, screen: Screen | None) -> None:
        self.found: str | None = None
        self.trials: list[str] = []
        self._screen = screen
        self._lines = Lines(_LONGEST_LINE_BYTES)

    def write(self, rank: int, name: str, data: bytes) -> None:
        """Takes a piece of output of a rank."""
        if rank == 0 and name == "stdout":
            for line in self._lines.feed(data):
                self._note(line)
        if self._screen is not None:
            self._screen.write(rank, name, data)

    def _note(self, line: bytes) -> None:
        if line.startswith(MARK.encode()):
            self.found = line.decode()
        # The table of trials is the last that a process of them prints.
        if self.trials or _TRIALS.match(line):
            self.trials.append(line.decode(errors="replace").rstrip())


def run_scale(options: Options, scale: Scale, environ: Mapping[str, str]) -> int:
    """Measures, prints a table, and writes the results to the folder that the user asked for.

    Returns:
        0; 1 if the script did not run on a number of ranks; 128 + signal number after a signal.

    Raises:
        ValueError, FileNotFoundError, HostError: If nothing can be measured.
    """
    if scale.output is not None:
        check_folder(Path(scale.output))
    if options.ray_address is None:
        entries = job_hosts(options, environ)
        layouts = choose_layouts(entries, options, scale, environ)
        hosts = {ranks: len(layout.entries) for ranks, layout in layouts.items()}
        reason = why_not_projected(hosts, link_gbit=scale.link_gbit)
        if scale.project is not None and reason:
            raise ValueError(f"--project: {reason}.")
    else:
        layouts = {}
    measure = _Measuring(layouts, options, scale, environ)
    if options.dry_run:
        for ranks in scale.ranks:
            measure.run_once(ranks)
        return 0
    try:
        runs, failures = _take_turns(measure, scale)
        remarks = _try_sums(measure, scale, failures)
    except _Stopped as stopped:
        return stopped.code
    if not runs:
        say("error: nothing was measured.")
        return 1
    scaling = Scaling(options.script_name, scale.is_weak, runs, failures, remarks)
    if scale.project is not None:
        scaling = _with_projection(scaling, scale.project, scale.link_gbit)
    print(scaling.table, flush=True)
    has_written = scale.output is None or _write(scaling, Path(scale.output))
    return int(not has_written or bool(failures))


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


def _write(scaling: Scaling, folder: Path) -> bool:
    """Writes the results, and a picture if Matplotlib is installed; returns whether it could."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / RESULTS).write_text(scaling.to_json() + "\n")
        if find_spec("matplotlib") is None:
            say(
                f"Wrote {folder / RESULTS}; a picture needs Matplotlib: pip install "
                "'tnt-jax[plots]'."
            )
        else:
            scaling.plot(folder / _PICTURE)
            say(f"Wrote {folder / RESULTS} and {folder / _PICTURE}.")
    except OSError as error:
        say(f"error: the results could not be written: {error}")
        return False
    return True


@dataclass(frozen=True)
class Layout:
    """Where a number of ranks runs: on these hosts, with so many devices each."""

    entries: tuple[HostEntry, ...]
    per_host: int


def choose_layouts(
    entries: Sequence[HostEntry], options: Options, scale: Scale, environ: Mapping[str, str]
) -> dict[int, Layout]:
    """Returns where each number of ranks runs; connects to all hosts once to find out."""
    if len(entries) == 1 and entries[0].slots is None and options.devices_per_node is None:
        options = replace(options, devices_per_node=scale.ranks[-1])
    with open_session(entries, options) as session:
        facts = ask_facts(session, options, environ)
        check(find_obstacles(facts))
    devices = choose_devices(hosts_of(entries, facts), options)
    found = {host: have.num_gpus for host, have in facts.items() if have.num_gpus}
    if options.use_gpus and devices.kind == "cpu" and found:
        listed = ", ".join(f"{name} has {number}" for name, number in found.items())
        raise ValueError(
            f"There are too few GPUs for the numbers of ranks ({listed}, as far as JAX can use "
            "them). Name smaller numbers, or measure CPUs with --no-gpu."
        )
    return {ranks: lay_out(ranks, entries, devices.per_host) for ranks in scale.ranks}


def lay_out(ranks: int, entries: Sequence[HostEntry], per_host: Sequence[int]) -> Layout:
    """Returns the first hosts, with equally many devices each, that have so many devices."""
    total, most = sum(per_host), per_host[0]
    if ranks > total:
        raise ValueError(
            f"--ranks {ranks} needs as many devices, but the {len(entries)} host(s) have {total} "
            "together. Name more hosts, say how many each has with slots=N in the hostfile or with "
            "--devices-per-node, or leave the number out."
        )
    if ranks <= most:
        return Layout((replace(entries[0], slots=None),), ranks)
    used = -(-ranks // most)
    if ranks % most or any(number != most for number in per_host[:used]):
        raise ValueError(
            f"--ranks {ranks} cannot be shared evenly by hosts with "
            f"{', '.join(map(str, per_host))} device(s): above {most}, name multiples of {most} "
            "that whole hosts have."
        )
    return Layout(tuple(replace(entry, slots=None) for entry in entries[:used]), most)


@dataclass(frozen=True)
class _Measuring:
    """Runs the script on a number of ranks; `layouts` are empty with Ray, which chooses."""

    layouts: Mapping[int, Layout]
    options: Options
    scale: Scale
    environ: Mapping[str, str]

    def run_once(self, ranks: int, *, tune_steps: int | None = None) -> tuple[_Listener, int, str]:
        """Runs the script to the end of its first `fit`.

        Returns:
            What it has told, the number of hosts, and why it has told nothing; empty if it has.
        """
        options = replace(self.options, tune_steps=tune_steps)
        layout, limit_s = self.layouts.get(ranks), self.scale.run_timeout_s
        with ExitStack() as held:
            if layout is None:
                options = replace(options, ray_devices=ranks)
                # It waits no longer than a run may take for room on the cluster.
                entries = held.enter_context(RayNodes(options, wait_s=limit_s)).take()
            else:
                per_host = layout.per_host
                options = replace(options, devices_per_node=per_host, processes_per_node=None)
                entries = list(layout.entries)
            listener = _Listener(Screen([]) if options.output_on_all_devices else None)
            ending = run_attempt(
                Attempt(new_job_id(options.script_name), entries),
                options,
                self.environ,
                write=listener.write,
                timeout_s=limit_s,
            )
        if ending.was_signalled:
            raise _Stopped(ending.code or 128 + signal.SIGINT)
        because = ending.because if ending.code else ""
        if not (because or listener.found or listener.trials):
            because = (
                f"{options.script_name} has ended without a call of fit, of which there must be "
                "one to measure."
            )
        return listener, len(entries), because


def _take_turns(measure: _Measuring, scale: Scale) -> tuple[list[Run], dict[int, str]]:
    """Returns all runs, round after round, and why numbers of ranks have none."""
    runs: list[Run] = []
    failures: dict[int, str] = {}
    for round in range(scale.rounds):
        for ranks in (number for number in scale.ranks if number not in failures):
            say(f"Round {round + 1} of {scale.rounds}: {ranks} rank(s).")
            try:
                listener, num_hosts, because = measure.run_once(ranks)
            except (HostError, OSError) as error:
                if not runs:
                    raise
                because = str(error)
            if not because and listener.found is not None:
                runs.append(read_line(listener.found, round=round, hosts=num_hosts))
                continue
            failures[ranks] = because
            say(f"{ranks} rank(s) are left out: {because}")
    return [run for run in runs if run.ranks not in failures], failures


def _try_sums(measure: _Measuring, scale: Scale, failures: Mapping[int, str]) -> list[str]:
    """Returns a table of ways to sum gradients on the highest number of ranks, if it is wanted."""
    ranks = scale.ranks[-1]
    if not scale.tune or ranks in failures:
        return []
    say(f"Ways to sum gradients: {ranks} rank(s).")
    try:
        listener, _, because = measure.run_once(ranks, tune_steps=scale.steps)
    except (HostError, OSError) as error:
        # What was measured before is not to be lost.
        because = str(error)
    if because:
        return [f"Ways to sum gradients were not compared: {because}"]
    return ["Ways to sum gradients, by tnt-jax tune:", *listener.trials]


def _with_projection(scaling: Scaling, to_ranks: int, link_gbit: float | None) -> Scaling:
    """Returns a scaling with the curve continued, or with the reason why it is not."""
    try:
        projection = continue_curve(scaling, to_ranks, link_gbit=link_gbit)
    except ValueError as error:
        return replace(scaling, remarks=[*scaling.remarks, str(error)])
    return replace(scaling, projection=projection)
