"""The job that `benchmarks/faults.py` disturbs, in tnt_jax.

It says nothing of checkpoints or restarts: `tnt-jax --checkpoint-dir` and `--max-restarts` do.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from injected import BATCH, EPOCHS, NUM_ROWS, Disturbance, dataset, finish, record_step

import tnt_jax as tnt


class Net(nn.Module):
    """A regression whose parameter `seen` counts how often each row was trained on."""

    @nn.compact
    def __call__(self, ids, x):
        """Returns `[batch, 2]`: the prediction, and what `seen` holds for the row."""
        seen = self.param("seen", nn.initializers.zeros, (NUM_ROWS,))
        y = nn.Dense(1)(nn.tanh(nn.Dense(32)(x)))
        return jnp.stack([y[:, 0], seen[ids]], axis=1)


def loss(targets, outputs):
    """Returns `[batch]`: the squared error, and what makes SGD add one to `seen` for each row."""
    return (outputs[:, 0] - targets[:, 0]) ** 2 - outputs[:, 1]


class Progress(tnt.callbacks.Callback):
    """Records each step, and meets what disturbs it."""

    def __init__(self, disturbance):
        super().__init__()
        self.disturbance = disturbance

    def on_train_batch_end(self, batch, logs=None):
        """Records the step on the master."""
        step = int(self.model.optimizer.iterations)
        if tnt.is_master_rank():
            record_step(step)
        self.disturbance.meet("callback", step)


class Reader:
    """Rows by index, which meet what disturbs the loader."""

    def __init__(self, disturbance):
        self.disturbance = disturbance
        self.ids, self.x, self.y = dataset()
        self.read = 0

    def __len__(self):
        return NUM_ROWS

    def __getitem__(self, index):
        self.read += 1
        self.disturbance.meet("loader", self.read * tnt.get_process_count() // BATCH)
        x = self.disturbance.spoil(self.x[index], index)
        return (self.ids[index], x), self.y[index]


tnt.set_seed(0)
tnt.init()
disturbance = Disturbance(tnt.get_process_index())
model = tnt.Model(Net())
# The rate of `seen` makes the mean over the batch a count.
optimizer = optax.multi_transform(
    {"count": optax.sgd(float(BATCH)), "learn": optax.sgd(0.05, momentum=0.9)},
    lambda params: {name: "count" if name == "seen" else "learn" for name in params},
)
model.compile(optimizer, loss=loss, on_nan="raise")
data = tnt.data.RandomAccess(Reader(disturbance), batch_size=BATCH, shuffle=True, num_workers=0)
model.fit(data, epochs=EPOCHS, verbose=0, callbacks=[Progress(disturbance)])
if tnt.is_master_rank():
    params = model.state.params
    leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(params)]
    finish(np.asarray(params["seen"]), leaves)
