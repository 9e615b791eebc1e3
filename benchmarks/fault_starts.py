"""Faults that need starts of their own: processes that disagree, and networks that break."""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from fault_contenders import (
    CONTENDERS,
    TNT_JAX,
    Command,
    RunningJob,
    free_port,
    tnt_jax_words,
)
from fault_damage import is_being_written
from fault_jobs.injected import BATCH
from fault_kinds import Kind
from fault_verdicts import Trial

_INIT_TIMEOUT_S = 10
# The job is left in the middle of its second epoch, after a checkpoint at its 25th step.
_LEFT_AT_STEP, _EPOCHS = 28, 3
# Long enough for another job to start meanwhile.
_MANY_EPOCHS = 100
_TICK_S = 0.02
# A batch of which the 144 rows, or more, that are done then are no multiple.
_CHANGES: dict[str, tuple[Mapping[str, int], int]] = {
    "half the batch": ({"batch size": BATCH // 2}, 2),
    "a batch that does not fit": ({"batch size": 160}, 2),
    "another seed": ({"seed": 1}, 2),
    "one process": ({}, 1),
    "three processes": ({}, 3),
}
_ONE_NETWORK = threading.Lock()
_NETCLUSTER = os.environ.get("TNT_TEST_NETCLUSTER", "")


def has_hosts() -> bool:
    """Returns whether networks can be cut: `TNT_TEST_NETCLUSTER` names a program for it."""
    return bool(_NETCLUSTER)


def run_alone(trial: Trial, scratch: Path, hang_s: float, weights: np.ndarray) -> dict[str, Any]:
    """Runs a trial that needs a job of its own, and returns its record.

    Args:
        trial: The trial.
        scratch: Folder in which the job gets one of its own.
        hang_s: Seconds after which it hangs.
        weights: All numbers of the undisturbed job after three epochs.
    """
    start = _Starts(trial, scratch, hang_s)
    try:
        family = trial.kind.family
        if family == "differs":
            start.differ()
        elif family == "changes":
            start.change(trial.kind.fault.removeprefix("resume with "))
        else:
            _OTHERS[trial.kind.fault](start)
        return start.record(weights)
    finally:
        shutil.rmtree(start.folder)


def verdict_alone(record: Mapping[str, Any], kind: Kind) -> str:
    """Returns what is wrong with the record of such a trial, in words; empty for nothing."""
    if record["hung"]:
        return "hung"
    if record["left"]:
        return "left processes"
    if kind.promise == "is refused":
        if record["ended"]:
            return "not refused"
        if not record["refused"]:
            return "not refused by all alike"
        return "" if record["named"] in (True, None) else "did not name the process"
    if not record["ended"]:
        return "did not go on"
    if kind.promise == "ends":
        return ""
    if record["lost"] or record["doubled"]:
        return "rows lost or doubled"
    # Another batch makes other updates.
    is_same = record["same"] or kind.fault.endswith("half the batch")
    return "" if is_same else "other weights"


class _Starts:
    """The starts of one trial.

    Attributes:
        folder: Folder of the job.
    """

    def __init__(self, trial: Trial, scratch: Path, hang_s: float) -> None:
        self.trial, self._hang_s = trial, hang_s
        self.folder = Path(tempfile.mkdtemp(prefix="start-", dir=scratch))
        (self.folder / "disk").mkdir()
        self._contender = CONTENDERS[trial.contender]
        self._codes: list[list[int]] = []
        self._hung = self._left = False
        self._at: float | None = None
        self._back: float | None = None
        self._started_at = self._ended_at = 0.0
        self._lines: list[tuple[float, str]] = []
        self._is_by_hand, self._num_processes = False, 2

    def plan(
        self,
        *,
        differs: Sequence[Any] = (),
        changes: Mapping[str, int] = {},
        epochs: int = _EPOCHS,
    ) -> None:
        """Writes the plan that the job reads."""
        plan = {"epochs": epochs, "faults": [], "differs": list(differs), "changes": changes}
        (self.folder / "plan.json").write_text(json.dumps(plan))

    def start(
        self, num_processes: int = 2, commands: Sequence[Command] | None = None
    ) -> RunningJob:
        """Starts the job, which nobody starts again."""
        self._num_processes, self._started_at = num_processes, time.time()
        return RunningJob(
            self._contender, self.folder, num_processes, restarts=0, commands=commands
        )

    def await_end(self, job: RunningJob, during: Callable[[], None] = lambda: None) -> None:
        """Waits until a job has ended, or hangs, and takes down how."""
        moved_at, before = time.monotonic(), None
        try:
            while (codes := job.poll()) is None and time.monotonic() < moved_at + self._hang_s:
                during()
                state = len(list(self.folder.iterdir())), self.num_steps(), len(job.lines)
                if state != before:
                    moved_at, before = time.monotonic(), state
                time.sleep(_TICK_S)
            if codes is not None:
                job.await_rest()
        finally:
            job.end()
        self._hung, self._left = codes is None, job.left
        self._codes.append(codes or [])
        self._lines += job.lines
        self._ended_at = job.ended_at or time.time()

    def differ(self) -> None:
        """Starts a job of which one process is told otherwise."""
        self.plan(differs=[self.trial.kind.fault, self.trial.process])
        self.await_end(self.start())

    def change(self, what: str) -> None:
        """Kills a job in the middle of an epoch, and resumes it with something changed."""
        self.plan()
        self.kill_at_step(self.start())
        changes, num_processes = _CHANGES[what]
        self.plan(changes=changes)
        (self.folder / "begun-0").unlink()
        self.await_end(self.start(num_processes))

    def kill_at_step(self, job: RunningJob) -> None:
        """Kills launcher and processes once a step is made and no checkpoint is being written."""
        root = self.folder / self._contender.checkpoints
        while self.num_steps() < _LEFT_AT_STEP or is_being_written(root, self._contender.partial):
            if job.poll() is not None:
                raise RuntimeError(f"The job has ended too early: {job.lines}")
            time.sleep(_TICK_S)
        job.send(signal.SIGKILL, None)
        job.end()

    def share_directory(self) -> None:
        """Starts a second job with the directory of a running one."""
        self.plan(epochs=_MANY_EPOCHS)
        first = self.folder / "first"
        (first / "disk").mkdir(parents=True)
        shutil.copy(self.folder / "plan.json", first)
        running = RunningJob(self._contender, first, restarts=0)
        try:
            while not (first / "steps").exists():
                if running.poll() is not None:
                    raise RuntimeError(f"The first job has ended too early: {running.lines}")
                time.sleep(_TICK_S)
            words = [sys.executable, "-m", "tnt_jax.launch", "-n", "2", "--no-gpu"]
            words += tnt_jax_words(self.folder, first / self._contender.checkpoints)
            self.await_end(self.start(commands=[(words, TNT_JAX)]))
            while running.poll() is None:
                time.sleep(_TICK_S)
        finally:
            running.end()
        # The first job goes on undisturbed.
        if not (first / "result").exists():
            raise RuntimeError(f"The first job has failed: {running.lines}")

    def start_by_hand(self, ids: Sequence[int], num_processes: int) -> None:
        """Starts processes without the launcher, with numbers that do not fit."""
        self.plan()
        self._is_by_hand = True
        job = {
            "TNT_COORDINATOR_ADDRESS": f"127.0.0.1:{free_port()}",
            "TNT_NUM_PROCESSES": str(num_processes),
            "TNT_INIT_TIMEOUT_S": str(_INIT_TIMEOUT_S),
        }
        script = [sys.executable, *tnt_jax_words(self.folder)[-2:]]
        commands = [(script, {**job, "TNT_PROCESS_ID": str(number)}) for number in ids]
        self.await_end(self.start(len(ids), commands))

    def cut_off(self, node: str) -> None:
        """Cuts a host of a job over two hosts off its network, and puts it back.

        With the launcher's host cut off, the job is that of the other host, which must end.
        """
        self.plan()
        state = self.folder / "hosts"
        os.environ["NETCLUSTER_PREFIX"] = "faults"
        subprocess.run(
            [_NETCLUSTER, "up", "2", "--dir", str(state)], check=True, capture_output=True
        )
        try:
            words = [_NETCLUSTER, "exec", "node1", "--", sys.executable, "-m", "tnt_jax.launch"]
            words += ["--hostfile", str(state / "hostfile"), "-n", "1", "--no-gpu"]
            words += ["--ssh-args", f"-F {state / 'ssh_config'}", "--max-restarts", "3"]
            job = self.start(commands=[([*words, *tnt_jax_words(self.folder)], TNT_JAX)])
            self.await_end(job, lambda: self._cut_and_mend(node, job))
        finally:
            subprocess.run([_NETCLUSTER, "down"], check=True, capture_output=True)

    def num_steps(self) -> int:
        """Returns the number of steps that are recorded."""
        path = self.folder / "steps"
        return path.read_text().count("\n") if path.exists() else 0

    def _cut_and_mend(self, node: str, job: RunningJob) -> None:
        """Cuts the host off after some steps, and mends it when the job has noticed."""
        if self._at is None and self.num_steps() >= _LEFT_AT_STEP:
            self._at = time.time()
            subprocess.run([_NETCLUSTER, "cut", node], check=True)
        elif self._at is not None and self._back is None:
            has_noticed = any(moment > self._at for moment, _ in job.lines)
            if has_noticed and time.time() > self._at + 12:
                self._back = time.time()
                subprocess.run([_NETCLUSTER, "mend", node], check=True)

    def record(self, weights: np.ndarray) -> dict[str, Any]:
        """Returns what is recorded of the trial."""
        told = [path.read_text() for path in sorted(self.folder.glob("refused-*"))]
        texts = {text.partition(" ")[2] for text in told}
        last = "".join(line for _, line in self._lines)[-600:]
        checkout = f"{Path(__file__).parents[1]}{os.sep}"
        epochs = _json_lines(self.folder / "epochs")
        begun = [float(path.read_text()) for path in self.folder.glob("begun-*")]
        noticed = [float(text.split()[0]) for text in told]
        if self._at is not None:
            begun, noticed = [self._at], [at for at, _ in self._lines if at > self._at][:1]
        if self._is_by_hand:  # The processes end before they begin to train.
            begun, noticed = [self._started_at], [self._ended_at]
        return self.trial.record(
            ended=(self.folder / "result").exists(),
            refused=all(self._codes[-1])
            if self._is_by_hand
            else len(told) == self._num_processes and len(texts) == 1,
            told=next(iter(texts), last).replace(checkout, "")[:600],
            named=self._names(texts),
            codes=self._codes,
            hung=self._hung,
            left=self._left,
            lost=epochs[-1]["lost"] if epochs else None,
            doubled=epochs[-1]["doubled"] if epochs else None,
            same=_is_close(self.folder / "weights.npy", weights),
            noticed_s=round(max(noticed) - max(begun), 3) if begun and noticed else None,
            load=os.getloadavg()[0],
        )

    def _names(self, texts: set[str]) -> bool | None:
        if not self.trial.kind.is_named:
            return None
        words = f"process {self.trial.process}", f"rank {self.trial.process}"
        return bool(texts) and all(any(word in text for word in words) for text in texts)


_OTHERS: dict[str, Callable[[_Starts], None]] = {
    "two jobs, one directory": _Starts.share_directory,
    "wrong number of processes": lambda start: start.start_by_hand([0, 1], 3),
    "two processes with one number": lambda start: start.start_by_hand([0, 1, 1], 2),
    "host cut off": lambda start: _cut_off(start, "node2"),
    "host of the launcher cut off": lambda start: _cut_off(start, "node1"),
}


def _cut_off(start: _Starts, node: str) -> None:
    with _ONE_NETWORK:
        start.cut_off(node)


def _is_close(path: Path, weights: np.ndarray) -> bool | None:
    """Returns whether weights are those of the undisturbed job, up to the rounding of sums."""
    return (
        bool(np.allclose(np.load(path), weights, rtol=1e-5, atol=1e-6)) if path.exists() else None
    )


def _json_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
