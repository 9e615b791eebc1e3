"""Trains with backups, and kills the ranks that it is told to kill.

Arguments: the file for the weights, the directory of the backups, and for each start of the job
"rank:step" or "-" for none. The step is counted from the start of the process.
"""

import os
import signal
import sys

import flax.linen as nn
import numpy as np

import tnt_jax as tnt
from tnt_jax.settings import read_settings

weights_file, backup_dir, *deaths = sys.argv[1:]
death = dict(enumerate(deaths)).get(read_settings().restart_count, "-")


class Net(nn.Module):
    @nn.compact
    def __call__(self, x, train: bool):
        return nn.Dense(3)(nn.Dropout(0.2, deterministic=not train)(nn.relu(nn.Dense(16)(x))))


class Die(tnt.callbacks.Callback):
    def __init__(self):
        super().__init__()
        self.step = 0

    def on_train_batch_end(self, batch, logs=None):
        self.step += 1
        if death == f"{tnt.get_rank()}:{self.step}":
            print("The last words.", file=sys.stderr, flush=True)
            os.kill(os.getpid(), signal.SIGKILL)


random = np.random.default_rng(0)
x, y = random.normal(size=(48, 8)).astype(np.float32), random.integers(0, 3, 48)
model = tnt.Model(Net(), seed=1)
loss = tnt.losses.SparseCategoricalCrossentropy(from_logits=True)
model.compile(optimizer="adam", loss=loss)
# An epoch of six steps.
backup = tnt.callbacks.BackupAndRestore(backup_dir, save_freq=2)
model.fit(x, y, batch_size=8, epochs=2, verbose=0, callbacks=[Die(), backup])
if tnt.is_master_rank():
    np.savez(weights_file, *model.get_weights())
