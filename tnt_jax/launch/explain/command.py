"""Runs a script as it is started, up to the explanation of its steps, and tries fewer processes."""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from tnt_jax.launch.explain.explanation import Explanation
from tnt_jax.launch.planning.options import Explain, Options, Scale
from tnt_jax.launch.remote.screen import Screen, say
from tnt_jax.launch.remote.session import HostError
from tnt_jax.launch.run import Attempt, job_hosts, new_job_id, run_attempt
from tnt_jax.launch.scale.command import take_turns
from tnt_jax.launch.trials import Listener, Stopped, Trials, check_folder, choose_layouts
from tnt_jax.settings import EXPLAIN_MARK

RESULTS = "explain.json"
"""Name of the file with the results."""
_PAGE = "explain.html"
_ROUNDS = 3
_TOO_SHORT = (
    "it has ended without a call of fit, or of a distributed step, or before its steps were timed: "
    "let a custom training loop train for longer, or name fewer --steps."
)


def run_explain(options: Options, explain: Explain, environ: Mapping[str, str]) -> int:
    """Measures, prints what was found, and writes it to the folder that the user asked for.

    Returns:
        0; 1 if nothing was measured; 128 + signal number after a signal.

    Raises:
        ValueError, FileNotFoundError, HostError: If nothing can be measured.
    """
    if explain.output is not None:
        check_folder(Path(explain.output))
    screen = Screen([]) if options.output_on_all_devices else None
    listener = Listener(lambda line: line.startswith(EXPLAIN_MARK.encode()), screen)
    ending = run_attempt(
        Attempt(new_job_id(options.script_name), job_hosts(options, environ)),
        options,
        environ,
        write=listener.write,
        timeout_s=explain.run_timeout_s,
    )
    if ending.was_signalled or options.dry_run:
        return ending.code
    if not listener.kept:
        because = ending.because if ending.code else _TOO_SHORT
        say(f"error: nothing was measured: {because}")
        return 1
    measured = json.loads(listener.kept[-1].removeprefix(EXPLAIN_MARK))
    explanation = Explanation(options.script_name, measured)
    if any(finding.cause == "sharing" for finding in explanation.findings):
        try:
            explanation = replace(
                explanation, fewer=_with_fewer(options, explain, measured, environ)
            )
        except Stopped as stopped:
            return stopped.code
    print(explanation.text, flush=True)
    return 0 if explain.output is None else _write(explanation, Path(explain.output))


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
        layouts = choose_layouts(job_hosts(options, environ), options, numbers, environ)
        trials = Trials(layouts, options, environ, explain.run_timeout_s, "a call of fit")
        runs, failures = take_turns(trials, scale)
    except (HostError, OSError, ValueError) as error:
        say(f"{numbers[0]} rank(s) could not be tried: {error}")
        return {}
    if failures:
        return {}
    names = dict(zip(numbers, ("half", "all"), strict=True))
    return {
        name: [run.examples_per_s for run in runs if run.ranks == number]
        for number, name in names.items()
    }


def _write(explanation: Explanation, folder: Path) -> int:
    """Writes the results and the page; returns 1 if they could not be written."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / RESULTS).write_text(explanation.to_json() + "\n")
        (folder / _PAGE).write_text(explanation.to_html())
    except OSError as error:
        say(f"error: the results could not be written: {error}")
        return 1
    say(f"Wrote {folder / RESULTS} and {folder / _PAGE}.")
    return 0
