"""What the disturbed jobs share: data, the record of their steps, and faults inside a process."""

import hashlib
import json
import os
import sys
import time
from pathlib import Path

import numpy as np

NUM_ROWS, FEATURES, BATCH, EPOCHS = 256, 8, 16, 4
STEPS = NUM_ROWS // BATCH * EPOCHS
STEP_S = 0.02


def folder():
    """Returns the folder of the trial."""
    return Path(os.environ["FAULTS_DIR"])


def dataset():
    """Returns ids `[rows]`, inputs `[rows, features]` and targets `[rows, 1]`."""
    random = np.random.default_rng(0)
    x = random.normal(size=(NUM_ROWS, FEATURES)).astype(np.float32)
    return np.arange(NUM_ROWS), x, np.sin(x.sum(axis=1, keepdims=True))


def record_step(step):
    """Appends a step and its time to the record that the driver reads."""
    with open(folder() / "steps", "a") as file:
        file.write(f"{step} {time.time()}\n")
    time.sleep(STEP_S)


def finish(seen, leaves):
    """Writes how often each row was trained on, and a digest of the weights."""
    digest = hashlib.sha256(b"".join(np.ascontiguousarray(leaf).tobytes() for leaf in leaves))
    result = {"seen": np.asarray(seen).tolist(), "digest": digest.hexdigest()}
    (folder() / "result").write_text(json.dumps(result))


class Disturbance:
    """The fault of `FAULT`: `what where process step`, which happens once in a trial.

    Args:
        process: Number of this process.
    """

    def __init__(self, process):
        words = os.environ.get("FAULT", "").split()
        self.what, self.where, who, step = words if words else ("", "", -1, 0)
        self.step, self.is_mine = int(step), process == int(who)

    def meet(self, where, step):
        """Does what the fault says if this is the place, the process and the step."""
        if not self._is_due(where, step):
            return
        if self.what == "slow":
            time.sleep(0.1)
        elif self._happens_now():
            _FAULTS[self.what]()

    def spoil(self, x, index):
        """Returns a row, which is NaN if the fault says so."""
        is_hit = self.what == "nan" and self._is_due("row", index) and self._happens_now()
        return np.full_like(x, np.nan) if is_hit else x

    def _is_due(self, where, step):
        return self.is_mine and self.where == where and step >= self.step

    def _happens_now(self):
        """Returns whether it has not happened before, and records when it does."""
        try:
            with open(folder() / "fault", "x") as file:
                file.write(str(time.time()))
        except FileExistsError:
            return False
        return True


def _raise(error):
    raise error


def _fill_memory():
    raise MemoryError("no memory is left for this batch")


# A fault that is not here happens from outside.
_FAULTS = {
    "exception": lambda: _raise(KeyError("broken on one rank")),
    "memory": _fill_memory,
    "sys_exit": lambda: sys.exit(3),
    "os_exit": lambda: os._exit(5),
    "stuck": lambda: time.sleep(100_000),
}
