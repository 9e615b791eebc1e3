"""The job that `benchmarks/faults.py` disturbs, in tnt_jax.

It says nothing of checkpoints or restarts: `tnt-jax --checkpoint-dir` and `--max-restarts` do.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import traverse_util
from injected import (
    BATCH,
    NUM_ROWS,
    Disturbance,
    change,
    dataset,
    differs,
    finish,
    plan,
    record_epoch,
    say_begun,
    say_refused,
)

import tnt_jax as tnt


class Net(nn.Module):
    """A regression whose parameter `seen` counts how often each row was trained on."""

    @nn.compact
    def __call__(self, ids, x):
        """Returns `[batch, 2]`: the prediction, and what `seen` holds for the row."""
        disturbance.meet("compilation")
        seen = self.param("seen", nn.initializers.zeros, (NUM_ROWS,))
        y = nn.Dense(1)(nn.tanh(nn.Dense(32)(x)))
        return jnp.stack([y[:, 0], seen[ids]], axis=1)


def loss(targets, outputs):
    """Returns `[batch]`: the squared error, and what makes SGD add one to `seen` for each row."""
    return (outputs[:, 0] - targets[:, 0]) ** 2 - outputs[:, 1]


class Progress(tnt.callbacks.Callback):
    """Records steps and epochs, and meets what disturbs it."""

    def on_train_begin(self, logs=None):
        """Notes where training begins."""
        disturbance.step = int(self.model.optimizer.iterations)

    def on_train_batch_end(self, batch, logs=None):
        """Records the step on the master."""
        if disturbance.after_step(int(self.model.optimizer.iterations)):
            self.model.stop_training = True

    def on_test_batch_end(self, batch, logs=None):
        """Meets what disturbs the validation."""
        disturbance.meet("validation")

    def on_epoch_end(self, epoch, logs=None):
        """Records what the weights hold."""
        if process == 0:
            seen = np.asarray(self.model.state.params["seen"])
            record_epoch(epoch + 1, seen, leaves())


class Reader:
    """Rows by index, which meet what disturbs the loader."""

    def __init__(self):
        self.ids, self.x, self.y = dataset()

    def __len__(self):
        return NUM_ROWS

    def __getitem__(self, index):
        disturbance.meet("data")
        return (self.ids[index], disturbance.spoil(self.x[index])), self.y[index]


def leaves():
    """Returns all arrays that training changes, on the host."""
    state = model.state
    return [np.asarray(leaf) for leaf in jax.tree.leaves((state.params, state.opt_state))]


def make_model(batch):
    """Returns the compiled model."""
    model = tnt.Model(Net())
    rate = 0.1 if differs("learning rate", process) else 0.05
    # The rate of `seen` makes the mean over the batch a count.
    optimizer = optax.multi_transform(
        {"count": optax.sgd(float(batch)), "learn": optax.sgd(rate, momentum=0.9)},
        lambda params: {name: "count" if name == "seen" else "learn" for name in params},
    )
    model.compile(optimizer, loss=loss, on_nan="raise")
    return model


def train(batch, epochs):
    """Trains on rows that are read one by one."""
    data = tnt.data.RandomAccess(Reader(), batch_size=batch, shuffle=True, num_workers=0)
    ids, x, y = (array[:32] for array in dataset())
    validation = {"validation_data": ((ids, x), y), "validation_batch_size": batch}
    model.fit(data, epochs=epochs, verbose=0, callbacks=[Progress()], **validation)


def train_differently():
    """Trains on arrays, of which one process may have others."""
    ids, x, y = dataset()
    num_rows = NUM_ROWS - BATCH if differs("number of rows", process) else NUM_ROWS
    x = x + 1 if differs("data", process) else x
    model.build((ids[:BATCH], x[:BATCH]))
    if differs("weights", process):
        params = traverse_util.flatten_dict(model.state.params, sep="/")
        others = {f"params/{name}": np.asarray(array) + 1 for name, array in params.items()}
        model.training_state.replace_variables(others)
    model.fit(
        (ids[:num_rows], x[:num_rows]), y[:num_rows], verbose=0, callbacks=[Progress()],
        batch_size=BATCH // 2 if differs("batch size", process) else BATCH,
        epochs=epochs + 1 if differs("number of epochs", process) else epochs,
    )  # fmt: skip


process = tnt.get_process_index()
tnt.set_seed(change("seed", 1 if differs("seed", process) else 0))
disturbance = Disturbance(process)
epochs = plan()["epochs"]
batch = change("batch size", BATCH)
model = make_model(batch)
say_begun(process)
try:
    if plan()["differs"]:
        train_differently()
    else:
        train(batch, epochs)
except (ValueError, RuntimeError, OSError) as error:
    say_refused(process, error)
    raise
if process == 0:
    finish(leaves())
