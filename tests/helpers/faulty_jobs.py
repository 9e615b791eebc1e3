"""Runs jobs in which one process has a fault, by the launcher and by hand."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass

from processes import SCRIPTS, environment, free_address, launch

SCRIPT = SCRIPTS / "fault_on_one_rank.py"
STOP = "os.kill(os.getpid(), 19)"


@dataclass(frozen=True)
class Ended:
    """How a job ended.

    Attributes:
        codes: Exit codes of the processes, or that of the launcher alone.
        outputs: What they wrote to standard error.
        seconds: From the fault to the end of the last of them.
    """

    codes: list[int]
    outputs: list[str]
    seconds: float

    @property
    def output(self):
        return "\n".join(self.outputs)


def run_faulty(tmp_path, num_processes, what, where, who, *, mode="fit", by="launcher", **extra):
    """Returns how a job ended in which process `who` runs the line `what` at the place `where`."""
    words = [SCRIPT, what, where, str(who), mode]
    fault = tmp_path / "fault"
    extra["FAULT_FILE"] = str(fault)
    if by == "launcher":
        result = launch(num_processes, *words, timeout_s=150, **extra)
        codes, outputs, ended_at = [result.returncode], [result.stderr], time.time()
    else:
        codes, outputs, ended_at = _run_by_hand(tmp_path, num_processes, words, who, extra)
    assert fault.exists(), f"There was no fault: {codes} {outputs}"
    return Ended(codes, outputs, ended_at - float(fault.read_text()))


def _run_by_hand(tmp_path, num_processes, words, who, extra):
    job = {"TNT_COORDINATOR_ADDRESS": free_address(), "TNT_NUM_PROCESSES": str(num_processes)}
    files = [tmp_path / f"{process}.txt" for process in range(num_processes)]
    with contextlib.ExitStack() as opened:
        started = [
            subprocess.Popen(
                [sys.executable, *map(str, words)], stdout=subprocess.DEVNULL,
                stderr=opened.enter_context(file.open("w")),
                env=environment(**job, **extra, TNT_PROCESS_ID=str(process)),
            )
            for process, file in enumerate(files)
        ]  # fmt: skip
        # Nobody ends a process that is stopped.
        awaited = [
            popen for number, popen in enumerate(started) if words[1] != STOP or number != who
        ]
        try:
            deadline = time.monotonic() + 120
            for popen in awaited:
                popen.wait(max(0.1, deadline - time.monotonic()))
        finally:
            ended_at = time.time()
            for popen in started:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(popen.pid, signal.SIGKILL)
                popen.wait()
    return [popen.returncode for popen in awaited], [file.read_text() for file in files], ended_at
