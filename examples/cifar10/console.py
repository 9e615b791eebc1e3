"""A Python console on the user's terminal after a training, also in a process of `tnt-jax`, whose
standard input is empty.
"""

import code
import os
import sys
from pathlib import Path

import tnt_jax as tnt


def interact(names):
    """Lets the user look at `names` on the master; the other processes return at once.

    IPython is used where it is installed. Ctrl-D ends the console; where there is no terminal, as
    in a batch job, a line says so.
    """
    if not tnt.is_master_rank():
        return
    path = terminal()
    if path is None:
        print("--interactive: there is no terminal to talk to.")
        return
    _use(path)
    banner = f"The names are {', '.join(names)}. Ctrl-D ends the console."
    try:
        import IPython
    except ImportError:
        code.interact(banner, local=dict(names), exitmsg="")
    else:
        print(banner)
        IPython.start_ipython(argv=["--no-banner"], user_ns=dict(names))


def terminal():
    """Returns the path of the terminal from which this process reads, or the launcher that started
    it on this host; None if there is none.
    """
    # The launcher starts a supervisor, which starts this process.
    generations = 3 if "TNT_JOB_ID" in os.environ else 1
    pid = os.getpid()
    for _ in range(generations):
        process = Path("/proc") / str(pid)
        try:
            path = os.readlink(process / "fd" / "0")
            # The name of the program, in parentheses, may hold any character.
            pid = int((process / "stat").read_text().rpartition(")")[2].split()[1])
        except OSError:  # A process of somebody else, or no Linux.
            return None
        if path.startswith(("/dev/pts/", "/dev/tty")):
            return path
    return None


def _use(path):
    """Lets standard input, output and errors be the terminal."""
    sys.stdout.flush()
    opened = os.open(path, os.O_RDWR | os.O_NOCTTY)
    for standard in (0, 1, 2):
        os.dup2(opened, standard)
    os.close(opened)
