"""Trains a model that compares rows in a way that a trace does not tell, and that only process 1 of
two can see in its own rows: arguments are a folder for the losses of each process.
"""

import os
import sys
from pathlib import Path

os.environ["TNT_LOG_LEVEL"] = "INFO"

import flax.linen as nn
import numpy as np

import tnt_jax as tnt


class Centred(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(3)(x - sum(x[row : row + 1] for row in range(len(x))) / len(x))


x = np.ones((16, 4), np.float32)
x[8:] = np.random.default_rng(0).normal(size=(8, 4))
model = tnt.Model(Centred())
model.compile("sgd", tnt.losses.SparseCategoricalCrossentropy(from_logits=True))
history = model.fit(x, np.zeros(16, int), batch_size=16, epochs=3, shuffle=False, verbose=0).history
name = f"{tnt.get_process_index()} of {tnt.get_process_count()}"
np.savetxt(Path(sys.argv[1], name), history["loss"])
