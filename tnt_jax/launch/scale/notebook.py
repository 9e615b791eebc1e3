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
    line = [os.fspath(script), *arguments]
    return Scaling.from_json(run_for_result("scale", words, line, RESULTS, what="measured"))


def run_for_result(
    command: str,
    words: Sequence[str],
    script: Sequence[str],
    name: str = "",
    *,
    what: str,
    option: str = "--output",
) -> str:
    """Runs a command of `tnt-jax`, and returns the text of the file that it writes.

    Args:
        command: Its name.
        words: Its options, without the one that says where it writes.
        script: The script and its arguments.
        name: Name of the file in the folder that `option` names; empty if that names the file.
        what: What was not done if there is no file, for the error.
        option: The option that says where it writes.
    """
    with tempfile.TemporaryDirectory(prefix=f"tnt-jax-{command}-") as folder:
        place = Path(folder, "results")
        launcher = [sys.executable, "-m", "tnt_jax.launch", command, option, str(place)]
        errors = _run([*launcher, *words, "--", *script])
        if not (place / name).exists():
            raise RuntimeError(f"Nothing was {what}:\n{errors[-_LAST_CHARACTERS:].strip()}")
        return (place / name).read_text()


def _run(command: Sequence[str]) -> str:
    """Runs a command to its end, and returns its standard error; an interruption ends it."""
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
