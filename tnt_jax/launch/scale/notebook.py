"""`tnt-jax scale` from Python, as in a notebook."""

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from tnt_jax.launch.scale.scaling import RESULTS, Scaling

# The virtual devices of this process: the processes that are measured get devices of their own.
_VIRTUAL_DEVICES = re.compile(r"--xla_force_host_platform_device_count=\d+")
LAST_CHARACTERS = 4000
"""Of what a command said, in an error."""


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
    with tempfile.TemporaryDirectory(prefix="tnt-jax-scale-") as folder:
        command = [
            *(sys.executable, "-m", "tnt_jax.launch", "scale"),
            *("--ranks", *map(str, ranks), "--steps", str(steps), "--rounds", str(rounds)),
            *(["--weak"] if weak else []),
            *("--output", folder, *options, "--", os.fspath(script), *arguments),
        ]
        said = run_command(command)
        results = Path(folder, RESULTS)
        if not results.exists():
            raise RuntimeError(f"Nothing was measured:\n{said[-LAST_CHARACTERS:].strip()}")
        return Scaling.from_json(results.read_text())


def run_command(command: Sequence[str]) -> str:
    """Runs a command to its end, and returns what it said; an interruption ends it."""
    process = subprocess.Popen(
        command,
        env=_environment(os.environ),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
    )
    try:
        return process.communicate()[1]
    except BaseException:
        process.terminate()
        process.communicate()
        raise


def _environment(environ: Mapping[str, str]) -> dict[str, str]:
    flags = _VIRTUAL_DEVICES.sub("", environ.get("XLA_FLAGS", "")).strip()
    kept = {name: value for name, value in environ.items() if name != "XLA_FLAGS"}
    return kept | ({"XLA_FLAGS": flags} if flags else {})
