"""Runs a script on several numbers of devices, in turns, and reports how its speed grows."""

import re
import signal
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from tnt_jax.cluster.job import Job
from tnt_jax.launch.planning.hostfile import HostEntry
from tnt_jax.launch.planning.options import Options, Scale
from tnt_jax.launch.remote.messages import Lines
from tnt_jax.launch.remote.ray_nodes import RayNodes
from tnt_jax.launch.remote.screen import Screen, say
from tnt_jax.launch.remote.session import HostError
from tnt_jax.launch.run import Attempt, job_hosts, new_job_id, run_attempt
from tnt_jax.launch.scale.curve import continue_curve
from tnt_jax.launch.scale.hosts import Layout, choose_layouts
from tnt_jax.launch.scale.projection import why_not_projected
from tnt_jax.launch.scale.report import check_folder, write_report
from tnt_jax.launch.scale.runs import MARK, Run, read_line
from tnt_jax.launch.scale.scaling import Scaling

_LONGEST_LINE_BYTES = 1 << 20
_TRIALS = re.compile(rb"\d+ rank\(s\) on \w+, \d+ rounds of \d+ steps each$")


class _Stopped(Exception):
    """A signal has ended a run, and all that would follow.

    Attributes:
        code: The exit code of the run.
    """

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code


class _Listener:
    """Replaces the screen: keeps the line that tells what was measured.

    Args:
        screen: Shows what else the processes print; None to keep it from the user.

    Attributes:
        found: That line; None as long as it has not come.
        trials: The table of `tnt-jax tune`, if that runs.
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

    def finish(self, rank: int) -> None:
        """Takes the end of a rank's output: the line that matters is complete."""

    def shows(self, rank: int) -> bool:
        """Returns False: a report on a failure is to have the end of the process's output."""
        return False


def refuse_tasks(job: Job | None) -> None:
    """Raises a ValueError if this launcher is one task among many, which cannot start others."""
    if job is not None:
        raise ValueError(
            f"tnt-jax scale starts jobs of several sizes one after the other, but this program is "
            f"one of {job.num_processes} that {job.source} has started. Run it once, in the batch "
            "script without srun or mpirun."
        )


def run_scale(options: Options, scale: Scale, environ: Mapping[str, str]) -> int:
    """Measures, prints a table, and writes the results to the folder that the user asked for.

    Args:
        options: The options of the command line.
        scale: What to measure.
        environ: The launcher's environment.

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
        _check_projection(layouts, scale)
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
    scaling = _with_projection(scaling, scale)
    print(scaling.table, flush=True)
    return int(not _write(scaling, scale) or bool(failures))


def _write(scaling: Scaling, scale: Scale) -> bool:
    """Writes the results if the user named a folder; returns whether that went well."""
    if scale.output is None:
        return True
    try:
        for line in write_report(scaling, Path(scale.output)):
            say(line)
    except OSError as error:
        say(f"error: the results could not be written: {error}")
        return False
    return True


@dataclass(frozen=True)
class _Measuring:
    """Runs the script on a number of ranks.

    Attributes:
        layouts: Where each number runs; empty with Ray, which chooses.
        options: The options of the command line.
        scale: What to measure.
        environ: The launcher's environment.
    """

    layouts: Mapping[int, Layout]
    options: Options
    scale: Scale
    environ: Mapping[str, str]

    def run_once(self, ranks: int, *, tune_steps: int | None = None) -> "_Result":
        """Runs the script to the end of its first `fit`."""
        options = replace(self.options, tune_steps=tune_steps)
        limit_s = self.scale.run_timeout_s
        with _hosts(ranks, self.layouts.get(ranks), options, limit_s) as (entries, options):
            listener = _Listener(Screen([]) if options.output_on_all_devices else None)
            ending = run_attempt(
                Attempt(new_job_id(options.script_name), entries),
                options,
                self.environ,
                screen=listener,
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
        return _Result(listener, len(entries), because)


class _Result(NamedTuple):
    """What a run has told, and why it has told nothing; empty if it has."""

    listener: _Listener
    num_hosts: int
    because: str


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


def _check_projection(layouts: Mapping[int, Layout], scale: Scale) -> None:
    """Raises a ValueError, before anything runs, if there will be no projection."""
    if scale.project is None:
        return
    hosts = {ranks: len(layout.entries) for ranks, layout in layouts.items()}
    if reason := why_not_projected(hosts, link_gbit=scale.link_gbit):
        raise ValueError(f"--project: {reason}.")


def _with_projection(scaling: Scaling, scale: Scale) -> Scaling:
    """Returns a scaling with the curve continued, or with the reason why it is not."""
    if scale.project is None:
        return scaling
    try:
        projection = continue_curve(scaling, scale.project, link_gbit=scale.link_gbit)
    except ValueError as error:
        return replace(scaling, remarks=[*scaling.remarks, str(error)])
    return replace(scaling, projection=projection)


@contextmanager
def _hosts(
    ranks: int, layout: Layout | None, options: Options, wait_s: float
) -> Iterator[tuple[list[HostEntry], Options]]:
    """Yields the hosts of a run, and the options for it; waits so long for room on a cluster."""
    if layout is not None:
        yield (
            list(layout.entries),
            replace(options, devices_per_node=layout.per_host, processes_per_node=None),
        )
        return
    options = replace(options, ray_devices=ranks)
    with RayNodes(options, wait_s=wait_s) as nodes:
        yield nodes.take(), options
