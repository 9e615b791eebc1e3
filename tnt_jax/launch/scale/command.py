"""Runs a script on several numbers of devices, in turns, and reports how its speed grows."""

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

from tnt_jax.launch.planning.options import Options, Scale
from tnt_jax.launch.remote.screen import say
from tnt_jax.launch.remote.session import HostError
from tnt_jax.launch.scale.projection import why_not_projected
from tnt_jax.launch.scale.scaling import MARK, RESULTS, Run, Scaling, continue_curve, read_line
from tnt_jax.launch.trials import (
    Report,
    Trials,
    check_folder,
    choose_layouts,
    marked,
    write_results,
)

_PICTURE = "scaling.png"
_TRIALS = re.compile(rb"\d+ rank\(s\) on \w+, \d+ rounds of \d+ steps each$")


class _Table:
    """Finds the table of trials of a tuning, the last that process 0 prints."""

    def __init__(self) -> None:
        self._has_begun = False

    def __call__(self, line: bytes) -> bool:
        self._has_begun = self._has_begun or _TRIALS.match(line) is not None
        return self._has_begun


def run_scale(options: Options, scale: Scale, environ: Mapping[str, str]) -> int:
    """Measures, prints a table, and writes the results to the folder that the user asked for.

    Returns the exit code: 1 if the script did not run on a number of ranks. Raises `Stopped` after
    a signal.
    """
    if scale.output is not None:
        check_folder(Path(scale.output))
    if options.ray_address is None:
        options = replace(options, processes_per_node=None)
    layouts = choose_layouts(options, scale.ranks, environ)
    wanted = "a call of fit, of which there must be one to measure"
    trials = Trials(layouts, options, environ, scale.run_timeout_s, wanted)
    if scale.project is not None and layouts:
        hosts = {ranks: len(layout.entries) for ranks, layout in layouts.items()}
        if reason := why_not_projected(hosts, link_gbit=scale.link_gbit):
            raise ValueError(f"--project: {reason}.")
    if options.dry_run:
        for ranks in scale.ranks:
            trials.run(ranks, marked(MARK))
        return 0
    runs, failures = take_turns(trials, scale)
    remarks = _try_sums(trials, scale, failures)
    if not runs:
        say("error: nothing was measured.")
        return 1
    scaling = Scaling(options.script_name, scale.is_weak, runs, failures, remarks)
    if scale.project is not None:
        try:
            projection = continue_curve(scaling, scale.project, link_gbit=scale.link_gbit)
            scaling = replace(scaling, projection=projection)
        except ValueError as error:
            scaling = replace(scaling, remarks=[*scaling.remarks, str(error)])
    print(scaling.table, flush=True)
    has_written = scale.output is None or _write(scaling, Path(scale.output))
    return int(not has_written or bool(failures))


def _write(scaling: Scaling, folder: Path) -> bool:
    """Writes the results, and a picture if Matplotlib is installed; returns whether it could."""
    files: dict[Path, Callable[[], str | bytes]] = {
        folder / RESULTS: lambda: scaling.to_json() + "\n"
    }
    if find_spec("matplotlib") is None:
        note = "; a picture needs Matplotlib: pip install 'tnt-jax[plots]'"
        return write_results(files, what="results", note=note)
    return write_results(files | {folder / _PICTURE: scaling.to_png}, what="results")


def take_turns(trials: Trials, scale: Scale) -> tuple[list[Run], dict[int, str]]:
    """Returns all runs, round after round, and why numbers of ranks have none."""
    runs: list[Run] = []
    failures: dict[int, str] = {}
    for round in range(scale.rounds):
        for ranks in (number for number in scale.ranks if number not in failures):
            say(f"Round {round + 1} of {scale.rounds}: {ranks} rank(s).")
            try:
                report = trials.run(ranks, marked(MARK))
            except (HostError, OSError) as error:
                if not runs:
                    raise
                report = Report([], 0, str(error))
            if report.because:
                failures[ranks] = report.because
                say(f"{ranks} rank(s) are left out: {report.because}")
            else:
                runs.append(read_line(report.lines[-1], round=round, hosts=report.num_hosts))
    return [run for run in runs if run.ranks not in failures], failures


def _try_sums(trials: Trials, scale: Scale, failures: Mapping[int, str]) -> list[str]:
    """Returns a table of ways to sum gradients on the highest number of ranks, if it is wanted."""
    ranks = scale.ranks[-1]
    if not scale.tune or ranks in failures:
        return []
    say(f"Ways to sum gradients: {ranks} rank(s).")
    try:
        report = trials.run(ranks, _Table(), tune_steps=scale.steps)
    except (HostError, OSError) as error:
        # What was measured before is not to be lost.
        report = Report([], 0, str(error))
    if report.because:
        return [f"Ways to sum gradients were not compared: {report.because}"]
    return ["Ways to sum gradients, by tnt-jax tune:", *report.lines]
