"""Runs a script as it is started, up to the explanation of its steps, and tries fewer processes."""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from tnt_jax.launch.explain.explanation import EXPLANATION, Explanation
from tnt_jax.launch.planning.options import Explain, Options, Scale
from tnt_jax.launch.remote.hosts import job_hosts
from tnt_jax.launch.remote.screen import say
from tnt_jax.launch.remote.session import HostError
from tnt_jax.launch.scale.command import take_turns
from tnt_jax.launch.trials import (
    Trials,
    check_folder,
    choose_layouts,
    marked,
    run_listening,
    write_results,
)
from tnt_jax.settings import EXPLAIN_MARK

_PAGE = "explain.html"
_ROUNDS = 3
_TOO_SHORT = (
    "it has ended without a call of fit, or of a distributed step, or before its steps were timed: "
    "let a custom training loop train for longer, or name fewer --steps."
)


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
