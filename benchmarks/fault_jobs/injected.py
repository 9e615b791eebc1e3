"""What the disturbed jobs share: data, the plan of their faults, and the record of their steps."""

import hashlib
import json
import os
import signal
import sys
import time
from pathlib import Path

import numpy as np

NUM_ROWS, FEATURES, BATCH = 256, 8, 16
STEPS_PER_EPOCH = NUM_ROWS // BATCH
STEP_S = 0.02
# So long a job stays where a fault from outside is to meet it.
PAUSE_S = 0.5
SLOW_S, SLOW_STEPS = 0.3, 40
# Where one process alone ends training.
STOP_STEP = 20


def folder():
    """Returns the folder of the job."""
    return Path(sys.argv[1])


def plan():
    """Returns what the driver has planned: `epochs`, `faults`, `differs` and `changes`."""
    return json.loads((folder() / "plan.json").read_text())


def dataset():
    """Returns ids `[rows]`, inputs `[rows, features]` and targets `[rows, 1]`."""
    random = np.random.default_rng(0)
    x = random.normal(size=(NUM_ROWS, FEATURES)).astype(np.float32)
    return np.arange(NUM_ROWS), x, np.sin(x.sum(axis=1, keepdims=True))


def differs(what, process):
    """Returns whether this process shall have another `what` than the others."""
    difference = plan()["differs"]
    return difference == [what, process]


def change(what, value):
    """Returns what the plan says in place of a value that all processes share."""
    return plan()["changes"].get(what, value)


def record_step(step):
    """Appends a step, its time and this process to the record that the driver reads."""
    with open(folder() / "steps", "a") as file:
        file.write(f"{step} {time.time()} {os.getpid()}\n")


def record_epoch(epoch, seen, leaves):
    """Appends what the weights hold at the end of an epoch.

    Args:
        epoch: Number of epochs that are done.
        seen: How often each row was trained on, `[rows]`.
        leaves: All arrays that training changes.
    """
    found = np.asarray(seen, np.float64) - epoch
    record = {
        "epoch": epoch,
        "time": time.time(),
        "lost": round(float(np.maximum(-found, 0).sum())),
        "doubled": round(float(np.maximum(found, 0).sum())),
        "digest": _digest(leaves),
    }
    with open(folder() / "epochs", "a") as file:
        file.write(json.dumps(record) + "\n")


def finish(leaves):
    """Writes the weights at the end of training, and then that it has come to its end."""
    np.save(folder() / "weights.npy", np.concatenate([np.ravel(leaf) for leaf in leaves]))
    (folder() / "result").write_text(_digest(leaves))


def say_begun(process):
    """Writes that this process begins to train."""
    (folder() / f"begun-{process}").write_text(str(time.time()))


def say_refused(process, error):
    """Writes the error with which this process ends its training."""
    (folder() / f"refused-{process}").write_text(f"{time.time()} {error}")


def _digest(leaves):
    parts = [np.ascontiguousarray(leaf).tobytes() for leaf in leaves]
    return hashlib.sha256(b"".join(parts)).hexdigest()


class Disturbance:
    """The faults of the plan, one after the other, each of which happens once.

    A fault is due at its place, on its process, from its step on, once all faults before it have
    happened. The process makes those of its own kind itself; for others it says where it is, and
    stays there for a moment.

    Args:
        process: Number of this process.

    Attributes:
        step: Steps that are done.
    """

    def __init__(self, process):
        self._faults, self._process = plan()["faults"], process
        self._next, self._slow_until = 0, 0
        self._skip_past()
        self._pending_at_start = self._next
        self.step = 0

    def after_step(self, step):
        """Notes a number of steps that are done, which the first process records.

        Returns:
            Whether this process shall end training alone.
        """
        self.step = step
        if self._process == 0:
            record_step(step)
        time.sleep(STEP_S)
        self.meet("training")
        return differs("stop_training", self._process) and step == STOP_STEP

    def meet(self, where):
        """Does what the plan says if this is the place, the process and the step."""
        if where == "training" and self.step < self._slow_until:
            time.sleep(SLOW_S)
        fault = self._due(where)
        if fault is None:
            return
        if fault["action"] == "outside":
            if self._mark("at"):
                time.sleep(PAUSE_S)
        elif self._mark("fault"):
            if fault["action"] == "slow":
                self._slow_until = self.step + SLOW_STEPS
            elif fault["action"] != "nan":
                _ACTIONS[fault["action"]]()

    def spoil(self, x):
        """Returns a row, which is NaN if the plan says so."""
        fault = self._due("row")
        return np.full_like(x, np.nan) if fault is not None and self._mark("fault") else x

    def _skip_past(self):
        while (folder() / f"fault-{self._next}").exists():
            self._next += 1

    def _due(self, where):
        self._skip_past()
        if self._next >= len(self._faults):
            return None
        fault = self._faults[self._next]
        is_here = fault["where"] == where and fault["process"] == self._process
        # Programs are compiled at the start alone, which is before the step, and for one fault:
        # what another has begun shall come to its end.
        is_first = self._next == self._pending_at_start
        is_time = is_first if where == "compilation" else self.step + 1 >= fault["step"]
        return fault if is_here and is_time else None

    def _mark(self, kind):
        """Records that a fault happens, or that its place is reached; False if that was before."""
        try:
            with open(folder() / f"{kind}-{self._next}", "x") as file:
                file.write(str(time.time()))
        except FileExistsError:
            return False
        return True


def _raise(error):
    raise error


# A fault that is not here happens from outside.
_ACTIONS = {
    "exception": lambda: _raise(KeyError("broken on one rank")),
    "memory": lambda: _raise(MemoryError("no memory is left for this batch")),
    "sys_exit": lambda: sys.exit(3),
    "os_exit": lambda: os._exit(5),
    "stuck": lambda: time.sleep(100_000),
    "segfault": lambda: os.kill(os.getpid(), signal.SIGSEGV),
}
