"""Runs examples whose input is wrong, one after another: `refuse_input.py COMMANDS`, a list of lists
of words as JSON. Prints exit code and last words of each, as a list of pairs.
"""

import contextlib
import io
import json
import runpy
import sys
import traceback
from pathlib import Path


def run(command):
    """Returns exit code and standard error of one command, as Python would leave them."""
    sys.argv, errors, code = command, io.StringIO(), 0
    sys.path.insert(0, str(Path(command[0]).parent))
    with contextlib.redirect_stderr(errors), contextlib.redirect_stdout(io.StringIO()):
        try:
            runpy.run_path(command[0], run_name="__main__")
        except SystemExit as end:
            code = end.code
        except BaseException:
            code = traceback.format_exc()
    if isinstance(code, str):
        return 1, errors.getvalue() + code
    return code or 0, errors.getvalue()


if __name__ == "__main__":
    print(json.dumps([run(command) for command in json.loads(sys.argv[1])]))
