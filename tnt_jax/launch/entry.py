"""The entry of a process that measures or records a script's first training, instead of finishing.

    python -m tnt_jax.launch.entry script.py [arguments]
    python -m tnt_jax.launch.entry -m module [arguments]

It imports neither JAX nor a library on it: the script may set their variables first.
"""

import contextlib
import os
import runpy
import sys
from collections.abc import Sequence

from tnt_jax.settings import TrialsDone


def run(words: Sequence[str]) -> None:
    """Runs a script as Python's own command line does, up to the end of its trials."""
    with contextlib.suppress(TrialsDone):
        if words[0] == "-m":
            sys.argv = [*words[1:]]
            runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = [*words]
            if not sys.flags.safe_path:
                sys.path[0] = os.path.dirname(os.path.realpath(words[0]))
            runpy.run_path(words[0], run_name="__main__")


if __name__ == "__main__":
    run(sys.argv[1:])
