"""Trains in two calls of fit, and pauses where `PAUSE` says, for a signal to come there.

`preempted.py FOLDER`: each process says in FOLDER that it pauses, and where training ended.
"""

import hashlib
import os
import sys
import time
from pathlib import Path

import flax.linen as nn
import jax
import numpy as np

import tnt_jax as tnt

FOLDER, PAUSE = Path(sys.argv[1]), os.environ.get("PAUSE", "")
PAUSE_S = float(os.environ.get("PAUSE_S", 1.5))
STEP_S = float(os.environ.get("STEP_S", 0))
EPOCHS = 3
process = tnt.get_process_index()
rng = np.random.default_rng(1)
x = rng.normal(size=(48, 6)).astype(np.float32)
y = rng.normal(size=(48, 1)).astype(np.float32)


def pause(phase):
    """Says once that this process has come to the phase, and stays there."""
    mark = f"at-{phase}-{process}"
    if phase == PAUSE and not (FOLDER / mark).exists():
        tell_pid(mark)
        time.sleep(PAUSE_S)


def tell_pid(name):
    """Writes the id of this process to a file that is complete as soon as it is there."""
    new = FOLDER / f"new-{process}"
    new.write_text(str(os.getpid()))
    new.rename(FOLDER / name)


class Module(nn.Module):
    @nn.compact
    def __call__(self, x, train=False):
        if train:
            pause("compile")  # While JAX traces the step.
        return nn.Dense(1)(nn.Dropout(0.5, deterministic=not train)(x))


class Rows:
    """Rows one by one, slowly in the second epoch."""

    def __init__(self):
        self.read = 0

    def __len__(self):
        return len(x)

    def __getitem__(self, index):
        self.read += 1
        if self.read > 30:
            pause("data")
        return x[index], y[index]


class Pauses(tnt.callbacks.Callback):
    def on_train_begin(self, logs=None):
        tell_pid(f"pid-{process}")
        pause("begin")

    def on_train_batch_end(self, batch, logs=None):
        time.sleep(STEP_S)
        if self.model.optimizer.iterations == 9:
            pause("callback")

    def on_test_batch_end(self, batch, logs=None):
        pause("validation")

    def on_epoch_end(self, epoch, logs=None):
        if epoch == 1:
            pause("epoch_end")

    def on_train_end(self, logs=None):
        (FOLDER / f"ended-{process}").write_text(str(int(self.model.optimizer.iterations)))


class Backup(tnt.callbacks.BackupAndRestore):
    def _save(self, *args, **kwargs):
        super()._save(*args, **kwargs)
        pause("save")  # While it is written.


def train(folder):
    """Trains in two calls of fit and returns a digest of the weights and the optimizer's state."""
    model = tnt.Model(Module(), seed=3)
    model.compile(tnt.optimizers.SGD(0.1, momentum=0.9), loss="mse")
    fit(model, (x, y), folder / "first", batch_size=8)
    pause("between")
    fit(model, (tnt.data.RandomAccess(Rows(), batch_size=8),), folder / "second")
    leaves = jax.tree.leaves((model.state.params, model.state.opt_state))
    digest = hashlib.sha256(b"".join(np.asarray(leaf).tobytes() for leaf in leaves))
    return digest.hexdigest()


def fit(model, data, folder, **options):
    backups = [] if "WITHOUT_BACKUP" in os.environ else [Backup(folder, delete_checkpoint=False)]
    if PAUSE == "validation":
        options["validation_data"] = x[:16], y[:16]
    model.fit(
        *data, epochs=EPOCHS,
        callbacks=[Pauses(), *backups], verbose=0, **options,
    )  # fmt: skip


print("digest", train(FOLDER), flush=True)
if "UNINTERRUPTED" in os.environ:
    print("digest", train(FOLDER / "uninterrupted"), flush=True)
