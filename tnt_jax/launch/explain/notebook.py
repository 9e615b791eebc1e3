"""`tnt-jax explain` from Python, as in a notebook."""

import os
from collections.abc import Sequence

from tnt_jax.launch.explain.command import RESULTS
from tnt_jax.launch.explain.explanation import Explanation
from tnt_jax.launch.scale.notebook import run_for_result


def explain(
    script: str | os.PathLike[str],
    *,
    arguments: Sequence[str] = (),
    steps: int = 20,
    rounds: int = 5,
    options: Sequence[str] = (),
) -> Explanation:
    """Finds out where the time of a script's steps goes, and tries what may help.

    It is `tnt-jax explain`: the script runs in processes of its own, up to its first `fit`, or its
    first loop with `tnt.distributed_step`, whose steps are timed. See docs/explanation.md.

    Args:
        script: The script.
        arguments: Arguments of the script.
        steps: Steps of each kind that are timed in a round.
        rounds: Rounds, each of which takes all kinds in turn.
        options: Further options of the command, such as `["-n", "4"]`.

    Returns:
        The explanation: `sentence`, `parts`, `findings`, `text`, `to_html()`, `to_json()`.

    Raises:
        RuntimeError: If nothing was measured; the message has the end of what the command said.
    """
    words = ["--steps", str(steps), "--rounds", str(rounds), *options]
    line = [os.fspath(script), *arguments]
    return Explanation.from_json(run_for_result("explain", words, line, RESULTS, what="measured"))
