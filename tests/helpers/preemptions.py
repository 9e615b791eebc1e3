"""Runs `scripts/preempted.py`, and sends it signals in the phase where it pauses."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from processes import SCRIPTS, environment

PREEMPTED = 75
LAUNCHER = "launcher"


class Run:
    """A job of two processes that pauses in a phase of training.

    Args:
        folder: Where its backups and marks are.
        pause: Where it pauses; empty for nowhere.
        variables: Further variables.
    """

    def __init__(self, folder, pause="", *, variables=()):
        self.folder, self.pause = Path(folder), pause
        self.folder.mkdir(exist_ok=True)
        for kind in ("at", "pid", "ended"):
            for mark in self.folder.glob(f"{kind}-*"):
                mark.unlink()
        command = [sys.executable, "-m", "tnt_jax.launch", "-n", "2", "--no-gpu", "--"]
        self.began_at = time.monotonic()
        self.launcher = subprocess.Popen(
            [*command, str(SCRIPTS / "preempted.py"), str(folder)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment(PAUSE=pause, **dict(variables)),
        )

    def wait_for_pause(self, *, timeout_s=120.0):
        """Waits until both processes have come to the phase."""
        self.wait_for([self.folder / f"at-{self.pause}-{process}" for process in (0, 1)], timeout_s)

    def wait_for(self, files, timeout_s=120.0):
        """Waits until all of the files are there."""
        deadline = time.monotonic() + timeout_s
        while not all(file.exists() for file in files):
            if self.launcher.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"{self.pause} was not reached: {self.end()}")
            time.sleep(0.02)

    def send(self, signum, to):
        """Sends a signal to the launcher or to a process of the job."""
        mark = f"at-{self.pause}-{to}" if self.pause else f"pid-{to}"
        pid = self.launcher.pid if to == LAUNCHER else int((self.folder / mark).read_text())
        os.kill(pid, signum)

    def end(self, *, timeout_s=90.0):
        """Returns exit code, output and errors at its end; kills it if it does not come."""
        try:
            out, err = self.launcher.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            self.launcher.kill()
            raise
        return self.launcher.returncode, out, err

    def ended_at(self):
        """Returns the number of updates in `on_train_end` of each process."""
        return [int(file.read_text()) for file in sorted(self.folder.glob("ended-*"))]


def preempt(folder, pause, signum=signal.SIGTERM, to=LAUNCHER):
    """Sends a signal in a phase; returns exit code, updates at the end by process, and errors."""
    run = Run(folder, pause)
    run.wait_for_pause()
    run.send(signum, to)
    code, _, err = run.end()
    return code, run.ended_at(), err


def digests(folder, **variables):
    """Returns the digests of a run that nobody interrupts."""
    code, out, err = Run(folder, variables=variables).end()
    if code != 0:
        raise RuntimeError(f"It ended with {code}: {err}")
    return [line.split()[1] for line in out.splitlines() if line.startswith("digest")]
