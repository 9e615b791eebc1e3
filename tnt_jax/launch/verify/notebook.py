"""`tnt-jax verify` from Python, as in a notebook."""

import os
from collections.abc import Sequence

from tnt_jax.launch.scale.notebook import run_for_result
from tnt_jax.launch.verify.receipt import Receipt


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
    line = [os.fspath(script), *arguments]
    text = run_for_result("verify", words, line, what="compared", option="--receipt")
    return Receipt.from_json(text)
