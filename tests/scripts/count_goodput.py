"""Trains 20 steps with backups every 4 of them; dies in the tenth if told so.

python count_goodput.py BACKUP_DIR kill|end
"""

import os
import signal
import sys

import flax.linen as nn
import numpy as np

import tnt_jax as tnt
from tnt_jax.distributed import goodput

goodput._WRITE_NS = 0  # Each step is written.


class Die(tnt.callbacks.Callback):
    has_begun = False

    def on_train_batch_begin(self, batch, logs=None):
        if not self.has_begun and sys.argv[2] == "end":
            print(batch, flush=True)
        self.has_begun = True

    def on_train_batch_end(self, batch, logs=None):
        if batch == 9 and sys.argv[2] == "kill":
            os.kill(os.getpid(), signal.SIGKILL)


def main():
    x = np.ones((160, 3), np.float32)
    model = tnt.Model(nn.Dense(1))
    model.compile("sgd", loss="mse")
    backup = tnt.callbacks.BackupAndRestore(sys.argv[1], save_freq=4)
    model.fit(x, x[:, :1], batch_size=8, verbose=0, callbacks=[Die(), backup])


main()
