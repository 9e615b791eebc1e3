"""Runs a program on a host until it ends or a file has gone, then kills all that it has started.

    python run_on_host.py FILE PROGRAM...

A connection does not tell: a host that is cut off never learns that the other side has closed it.
"""

import os
import subprocess
import sys
import time

from tnt_jax.launch.processtree import adopt_orphans, kill_descendants

path, *command = sys.argv[1:]
adopt_orphans()
program = subprocess.Popen(command)
while program.poll() is None and os.path.exists(path):
    time.sleep(0.1)
while kill_descendants(os.getpid()):
    continue
sys.exit(program.poll())
