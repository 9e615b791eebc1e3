"""Starts scripts in processes of their own, through the launcher or alone."""

import contextlib
import os
import secrets
import socket
import subprocess
import sys
from pathlib import Path

SCRIPTS = Path(__file__).parents[1] / "scripts"


def environment(**extra):
    """Returns an environment without this process's virtual devices."""
    kept = {
        k: v
        for k, v in os.environ.items()
        if k not in ("XLA_FLAGS", "PJRT_NPROC") and not k.startswith("TNT_")
    }
    return kept | {"JAX_PLATFORMS": "cpu"} | extra


def launch(num_processes, *words, command="run", flags=(), timeout_s=240, **extra):
    """Runs a script in `num_processes` processes by a command of the launcher; 0 runs it with
    Python alone.
    """
    ranks = ["-n", str(num_processes), "--no-gpu", *map(str, flags), "--"]
    launcher = ["-m", "tnt_jax.launch", *([command] if command != "run" else []), *ranks]
    starter = [sys.executable, *launcher] if num_processes else [sys.executable]
    return subprocess.run(
        [*starter, *map(str, words)],
        capture_output=True,
        text=True,
        timeout=timeout_s,
        env=environment(**extra),
    )


def free_address():
    """Returns an address at which a job's coordinator can listen.

    Linux gives no connection a port below 32768, and Ray's workers take none above 19999. A port
    that the system chose may be taken again before the job listens, when other tests open many.
    """
    while True:
        port = secrets.randbelow(12_000) + 20_000
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return f"127.0.0.1:{port}"
