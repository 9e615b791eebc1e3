"""Runs a script, as jobs that end early, keeps what each run reports, and writes the results.

`tnt-jax scale` does so on several numbers of devices in turns, and `tnt-jax explain` with the
script as it is started. `tnt-jax verify` (`verify/command.py`) compares what the runs report.
"""

import json
import os
import re
import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tnt_jax.launch.explanation import EXPLANATION, Explanation
from tnt_jax.launch.planning.facts import find_obstacles
from tnt_jax.launch.planning.options import Explain, Options, Scale
from tnt_jax.launch.planning.plan import choose_devices
from tnt_jax.launch.remote.connection import Lines
from tnt_jax.launch.remote.hosts import HostEntry, job_hosts, taking_hosts
from tnt_jax.launch.remote.screen import Screen, say
from tnt_jax.launch.remote.session import Ending, HostError
from tnt_jax.launch.run import (
    Attempt,
    ask_facts,
    check,
    hosts_of,
    new_job_id,
    open_session,
    run_attempt,
)
from tnt_jax.launch.scale.projection import why_not_projected
from tnt_jax.launch.scale.scaling import MARK, RESULTS, Run, Scaling, continue_curve, read_line
from tnt_jax.settings import EXPLAIN_MARK

# A line may hold the report of thousands of arrays.
_LONGEST_LINE_BYTES = 1 << 24
_PICTURE = "scaling.png"
_TRIALS = re.compile(rb"\d+ rank\(s\) on \w+, \d+ rounds of \d+ steps each$")
_PAGE = "explain.html"
# In which `tnt-jax explain` tries fewer processes.
_ROUNDS = 3
_TOO_SHORT = (
    "it has ended without a call of fit, or of a distributed step, or before its steps were timed: "
    "let a custom training loop train for longer, or name fewer --steps."
)


class Stopped(Exception):
    """A signal has ended a run, and all that would follow, with the exit code of the argument."""


IsKept = Callable[[bytes], bool]
"""Returns whether a line is one in which process 0 reports something."""


def marked(mark: str) -> IsKept:
    """Returns whether a line begins with a mark, as a function of the line."""
    return lambda line: line.startswith(mark.encode())


class _Table:
    """Finds the table of trials of a tuning, the last that process 0 prints."""

    def __init__(self) -> None:
        self._has_begun = False

    def __call__(self, line: bytes) -> bool:
        self._has_begun = self._has_begun or _TRIALS.match(line) is not None
        return self._has_begun


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
    """Runs of a script on numbers of ranks."""

    layouts: Mapping[int, Layout]  # Where each number runs, as of `choose_layouts`.
    options: Options
    environ: Mapping[str, str]
    limit_s: float  # Seconds that a run may take.
    wanted: str  # What the script must call.

    def run(self, ranks: int, is_kept: IsKept, **changes: Any) -> Report:
        """Runs the script once, with changes of the options, and keeps the lines that are reported.

        Raises `Stopped` if a signal has ended it; a ValueError, `HostError` or OSError if it cannot
        be started.
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
    has_written = scale.output is None or _write_scaling(scaling, Path(scale.output))
    return int(not has_written or bool(failures))


def _write_scaling(scaling: Scaling, folder: Path) -> bool:
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


def run_explain(options: Options, explain: Explain, environ: Mapping[str, str]) -> int:
    """Measures, prints what was found, and writes it to the folder that the user asked for.

    Returns the exit code: 1 if nothing was measured. Raises `Stopped` after a signal.
    """
    if explain.output is not None:
        check_folder(Path(explain.output))
    entries, is_kept = job_hosts(options, environ), marked(EXPLAIN_MARK)
    ending, kept = run_listening(entries, options, environ, is_kept, explain.run_timeout_s)
    if ending.was_signalled or options.dry_run:
        return ending.code
    if not kept:
        because = ending.because if ending.code else _TOO_SHORT
        say(f"error: nothing was measured: {because}")
        return 1
    measured = json.loads(kept[-1].removeprefix(EXPLAIN_MARK))
    explanation = Explanation(options.script_name, measured)
    if any(finding.cause == "sharing" for finding in explanation.findings):
        fewer = _with_fewer(options, explain, measured, environ)
        explanation = replace(explanation, fewer=fewer)
    print(explanation.text, flush=True)
    if explain.output is None:
        return 0
    folder = Path(explain.output)
    files = {
        folder / EXPLANATION: lambda: explanation.to_json() + "\n",
        folder / _PAGE: explanation.to_html,
    }
    return int(not write_results(files, what="results"))


def _with_fewer(
    options: Options, explain: Explain, measured: Mapping, environ: Mapping[str, str]
) -> dict[str, list[float]]:
    """Returns examples a second on all ranks and on half of them, in turns; empty without both."""
    ranks = measured["ranks"]
    numbers = (ranks // 2, ranks)
    if ranks != measured["processes"] or ranks % 2 or options.ray_address is not None:
        return {}
    say(f"{numbers[0]} rank(s) are tried, too.")
    scale = Scale(numbers, steps=explain.steps, rounds=_ROUNDS)
    options = replace(options, explain=None, scale=scale)
    try:
        layouts = choose_layouts(options, numbers, environ)
        trials = Trials(layouts, options, environ, explain.run_timeout_s, "a call of fit")
        runs, failures = take_turns(trials, scale)
    except (HostError, OSError, ValueError) as error:
        say(f"{numbers[0]} rank(s) could not be tried: {error}")
        return {}
    if failures:
        return {}
    return {
        name: [run.examples_per_s for run in runs if run.ranks == number]
        for name, number in zip(("half", "all"), numbers, strict=True)
    }
