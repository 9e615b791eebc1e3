"""The entry of a process of `tnt-jax tune`: runs a script, whose first `fit` runs the trials.

    python -m tnt_jax.keras_compat.fit.tune_script script.py [arguments]
    python -m tnt_jax.keras_compat.fit.tune_script -m module [arguments]

It imports neither JAX nor a library on it: the script may set their variables first.
"""

import contextlib
import os
import runpy
import sys
from collections.abc import Sequence


class TrialsDone(BaseException):
    """Ends the script after the trials: its further lines count on a trained model.

    Not an `Exception`, so that the script's own handlers of errors let it pass.
    """


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
    # `fit` imports `TrialsDone` by this name: it must be the class of this very module.
    sys.modules["tnt_jax.keras_compat.fit.tune_script"] = sys.modules[__name__]
    run(sys.argv[1:])
