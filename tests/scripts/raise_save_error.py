"""Trains with `on_save_error="raise"` where process 0 cannot write its first backup."""

import sys
import time
from unittest import mock

import flax.linen as nn
import numpy as np

import tnt_jax as tnt
from tnt_jax.train.checkpoints import checkpoint

FOLDER, STEPS = sys.argv[1], 100


def batches():
    """Yields quick batches in the first epoch, and slow ones in the second."""
    x = np.ones((8, 4), np.float32)
    for index in range(2 * STEPS):
        if index > STEPS:
            time.sleep(0.15)
        yield x, x[:, :1]


class Place(tnt.callbacks.Callback):
    saved_at, batch = 0.0, 0

    def on_epoch_begin(self, epoch, logs=None):
        self.saved_at = time.monotonic()

    def on_train_batch_begin(self, batch, logs=None):
        self.batch = batch


tnt.init()
model = tnt.Model(nn.Dense(1))
model.compile("sgd", loss="mse")
place = Place()
backup = tnt.callbacks.BackupAndRestore(FOLDER, save_freq="epoch", on_save_error="raise")
full = OSError(28, "No space left on device")
with mock.patch.object(checkpoint, "write_part", side_effect=full):
    try:
        model.fit(batches(), steps_per_epoch=STEPS, epochs=2, verbose=0, callbacks=[place, backup])
    except OSError as error:
        took_s = time.monotonic() - place.saved_at
        print(f"raised after batch {place.batch}, {took_s:.1f} s: {error}", flush=True)
