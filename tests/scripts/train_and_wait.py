"""Trains a network with `fit`, and waits amid the first start of the job until it is told to go on.

    train_and_wait.py FOLDER STEP

After the update STEP each process writes `reached-RANK` with its host's name to the folder, and
waits for the file `go`. Process 0 writes the number of each update, and of the start that made it,
to `steps`, and at the end the weights to `weights.npz`.
"""

import os
import socket
import sys
import time
from pathlib import Path

import flax.linen as nn
import jax
import numpy as np

import tnt_jax as tnt


class Net(nn.Module):
    @nn.compact
    def __call__(self, x, train: bool):
        x = nn.Dropout(0.2, deterministic=not train)(nn.relu(nn.Dense(16)(x)))
        return nn.Dense(1)(x)


class Waits(tnt.callbacks.Callback):
    """Notes each update, and waits after one of them, in a process that was not started again."""

    def on_train_batch_end(self, batch, logs=None):
        step, rank = self.model.optimizer.iterations, tnt.get_process_index()
        start = os.environ.get("TNT_RESTART_COUNT", "0")
        if rank == 0:
            with open(folder / "steps", "a") as notes:
                notes.write(f"{step} {start}\n")
        if step == last and start == "0":
            (folder / f"reached-{rank}").write_text(socket.gethostname())
            while not (folder / "go").exists():
                time.sleep(0.05)


folder, last = Path(sys.argv[1]), int(sys.argv[2])
random = np.random.default_rng(0)
# 61 rows in batches of 8: the last batch of an epoch is smaller, and odd.
x = random.normal(size=(61, 8)).astype(np.float32)
y = (x @ random.normal(size=(8, 1))).astype(np.float32)
model = tnt.Model(Net(), seed=7)
model.compile(tnt.optimizers.SGD(0.01, momentum=0.9), loss="mse", steps_per_execution=1)
model.fit(x, y, batch_size=8, epochs=3, shuffle=True, verbose=0, callbacks=[Waits()])
if tnt.is_master_rank():
    leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(model.get_weights())]
    np.savez(folder / "weights.npz", *leaves)
    print("trained with", tnt.get_size(), "of", jax.process_count(), "processes", flush=True)
