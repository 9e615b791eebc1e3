"""Needs more memory than any machine has, in the phase that the argument names."""

import sys

import flax.linen as nn
import jax.numpy as jnp
import numpy as np

import tnt_jax as tnt

# A table of 1 TiB in float32.
NUM_ROWS, NUM_COLUMNS = 1 << 20, 1 << 18
phase = sys.argv[1]


class LargeTable(nn.Module):
    """Takes and returns little, by way of a table that fits in no memory."""

    @nn.compact
    def __call__(self, x):
        return nn.Embed(NUM_ROWS, NUM_COLUMNS)(x)[:, :2]


class LargeOutputs(nn.Module):
    """Returns arrays that fit in no memory."""

    @nn.compact
    def __call__(self, x):
        outputs = nn.Dense(1)(x.astype(jnp.float32)[:, None])
        return jnp.broadcast_to(outputs[..., None], (len(x), NUM_ROWS, NUM_COLUMNS)) + 0 * x[0]


x, y = np.ones(8, np.int32), np.ones((8, 2), np.float32)
if phase == "fit":
    model = tnt.Model(LargeTable())
    model.compile("sgd", loss="mse")
    model.fit(x, y, batch_size=8, verbose=0)
else:
    tnt.Model(LargeOutputs()).predict(x, batch_size=8, verbose=0)
