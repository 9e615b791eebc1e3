"""`tnt-jax scale`, `verify` and `explain` from Python, as in a notebook."""

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from tnt_jax.launch.explanation import EXPLANATION, Explanation
from tnt_jax.launch.scale.scaling import RESULTS, Scaling
from tnt_jax.launch.verify.command import Receipt

# The virtual devices of this process: the processes that are measured get devices of their own.
_VIRTUAL_DEVICES = re.compile(r"--xla_force_host_platform_device_count=\d+")
# Of the standard error of a command, in an error.
_LAST_CHARACTERS = 4000


def scaling(
    script: str | os.PathLike[str],
    *,
    ranks: Sequence[int],
    arguments: Sequence[str] = (),
    steps: int = 20,
    rounds: int = 3,
    weak: bool = False,
    options: Sequence[str] = (),
) -> Scaling:
    """Measures how the speed of a script grows with the ranks, by `tnt-jax scale`.

    The script runs in processes of their own, up to the end of its first `fit`, which times steps
    instead of training. See docs/scaling.md.

    Args:
        script: The script, which calls `fit`.
        ranks: Numbers of ranks; others are compared with the lowest.
        arguments: Arguments of the script.
        steps: Timed steps of a run.
        rounds: Runs on each number of ranks, in turns.
        weak: Whether the global batch grows with the ranks.
        options: Further options of the command, such as `["--hostfile", "hosts"]`.

    Returns:
        The results: `table`, `plot()`, `points`, `failures`, `to_json()`.

    Raises:
        RuntimeError: If nothing was measured; the message has the end of what the command said.
    """
    words = [
        *("--ranks", *map(str, ranks), "--steps", str(steps), "--rounds", str(rounds)),
        *(["--weak"] if weak else []),
        *options,
    ]
    line = [*words, "--", os.fspath(script), *arguments]
    return Scaling.from_json(_result_of("scale", line, RESULTS, what="measured"))


def verify(
    script: str | os.PathLike[str],
    *,
    ranks: Sequence[int] = (1, 2, 4),
    arguments: Sequence[str] = (),
    steps: int = 8,
    options: Sequence[str] = (),
) -> Receipt:
    """Checks that a script trains the same on any number of ranks, by `tnt-jax verify`.

    The script runs in processes of their own, up to a few steps of its first `fit`, or of a loop
    with `tnt.distributed_step`. See docs/verification.md.

    Args:
        script: The script.
        ranks: Numbers of ranks; others are compared with the lowest.
        arguments: Arguments of the script.
        steps: Training steps that are compared.
        options: Further options of the command, such as `["--processes-per-node", "1"]`.

    Returns:
        The receipt: `text`, `checks`, `is_good`, `to_json()`.

    Raises:
        RuntimeError: If nothing was compared; the message has the end of what the command said.
    """
    words = ["--ranks", *map(str, ranks), "--steps", str(steps), *options]
    line = [*words, "--", os.fspath(script), *arguments]
    return Receipt.from_json(_result_of("verify", line, what="compared", option="--receipt"))


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
    line = [*words, "--", os.fspath(script), *arguments]
    return Explanation.from_json(_result_of("explain", line, EXPLANATION, what="measured"))


def _result_of(
    command: str, words: Sequence[str], name: str = "", *, what: str, option: str = "--output"
) -> str:
    """Runs a command of `tnt-jax` on a script, and returns the text of the file that it writes."""
    # A folder with a file of that name, or the file itself.
    with tempfile.TemporaryDirectory(prefix=f"tnt-jax-{command}-") as folder:
        place = Path(folder, "results")
        launcher = [sys.executable, "-m", "tnt_jax.launch", command, option, str(place)]
        process = subprocess.Popen(
            [*launcher, *words],
            env=_environment(os.environ),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
        )
        try:
            errors = process.communicate()[1]
        except BaseException:
            process.terminate()
            process.communicate()
            raise
        if not (place / name).exists():
            raise RuntimeError(f"Nothing was {what}:\n{errors[-_LAST_CHARACTERS:].strip()}")
        return (place / name).read_text()


def _environment(environ: Mapping[str, str]) -> dict[str, str]:
    flags = _VIRTUAL_DEVICES.sub("", environ.get("XLA_FLAGS", "")).strip()
    kept = {name: value for name, value in environ.items() if name != "XLA_FLAGS"}
    return kept | ({"XLA_FLAGS": flags} if flags else {})
