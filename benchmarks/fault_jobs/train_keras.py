"""The job that `benchmarks/faults.py` disturbs, in Keras 3 on JAX with its own distribution.

It saves after every epoch, as `BackupAndRestore` does by default. JAX gives up a process that has
died after the time that the other jobs are given for one that is stuck; the default is 100 s.
"""

import os

os.environ["KERAS_BACKEND"] = "jax"

import jax

jax.distributed.initialize(
    os.environ["COORDINATOR"],
    int(os.environ["WORLD_SIZE"]),
    int(os.environ["RANK"]),
    heartbeat_timeout_seconds=8,
)

import keras
import numpy as np
from injected import (
    BATCH,
    FEATURES,
    NUM_ROWS,
    Disturbance,
    dataset,
    differs,
    finish,
    folder,
    plan,
    record_epoch,
    say_begun,
)

process = jax.process_index()
disturbance = Disturbance(process)
keras.distribution.set_distribution(keras.distribution.DataParallel(auto_shard_dataset=False))
keras.utils.set_random_seed(int(differs("seed", process)))
# One rate serves all parameters, so the counts grow by the rate for each row.
RATE = 2.0**-5


class Progress(keras.callbacks.Callback):
    """Records steps and epochs, and meets what disturbs it."""

    def on_train_begin(self, logs=None):
        """Notes where training begins."""
        disturbance.step = int(self.model.optimizer.iterations.value)

    def on_train_batch_end(self, batch, logs=None):
        """Records the step on the first process."""
        if disturbance.after_step(int(self.model.optimizer.iterations.value)):
            self.model.stop_training = True

    def on_test_batch_end(self, batch, logs=None):
        """Meets what disturbs the validation."""
        disturbance.meet("validation")

    def on_epoch_end(self, epoch, logs=None):
        """Records what the weights hold."""
        if process == 0:
            record_epoch(epoch + 1, seen.counts.numpy() / RATE, leaves())


class Batches(keras.utils.PyDataset):
    """This process's rows of each global batch."""

    def __init__(self):
        super().__init__()
        self.ids, self.x, self.y = dataset()
        if differs("data", process):
            self.x = self.x + 1

    def __len__(self):
        num_rows = NUM_ROWS - BATCH if differs("number of rows", process) else NUM_ROWS
        return num_rows // BATCH

    def __getitem__(self, index):
        disturbance.meet("data")
        share = BATCH // jax.process_count() // (2 if differs("batch size", process) else 1)
        first = index * BATCH + process * share
        rows = slice(first, first + share)
        x = np.stack([disturbance.spoil(row) for row in self.x[rows]])
        return (self.ids[rows], x), self.y[rows]


class Validation(keras.utils.PyDataset):
    """Two batches of this process's rows."""

    def __len__(self):
        return 2

    def __getitem__(self, index):
        ids, x, y = (array[:BATCH] for array in dataset())
        return (ids, x), y


class Seen(keras.layers.Layer):
    """Counts, as a parameter, how often each row was trained on."""

    def build(self, shape):
        """Creates the counts."""
        self.counts = self.add_weight(shape=(NUM_ROWS,), initializer="zeros", name="counts")

    def call(self, ids):
        """Returns the counts of the rows."""
        return keras.ops.take(self.counts, ids, axis=0)[:, None]


def loss(targets, outputs):
    """Returns `[batch]`: the squared error, and what makes SGD add to the counts."""
    return (outputs[:, 0] - targets[:, 0]) ** 2 - BATCH * outputs[:, 1]


def leaves():
    """Returns all arrays that training changes, on the host."""
    return [variable.numpy() for variable in (*model.weights, *model.optimizer.variables)]


ids, x = keras.Input((), dtype="int32"), keras.Input((FEATURES,))
outputs = keras.layers.Dense(1, name="out")(keras.layers.Dense(32, "tanh")(x))
seen = Seen()
model = keras.Model([ids, x], keras.layers.Concatenate()([outputs, seen(ids)]))
if differs("weights", process):
    model.get_layer("out").bias.assign(np.ones(1))
rate = 2 * RATE if differs("learning rate", process) else RATE
model.compile(keras.optimizers.SGD(rate), loss=loss)
# One directory for both processes makes them wait for each other's file without end.
directory = folder() / "disk" / str(process)
backup = keras.callbacks.BackupAndRestore(str(directory), delete_checkpoint=False)
epochs = plan()["epochs"] + int(differs("number of epochs", process))
say_begun(process)
model.fit(
    Batches(), validation_data=Validation(), epochs=epochs, verbose=0, shuffle=False,
    callbacks=[Progress(), backup],
)  # fmt: skip
if process == 0:
    finish(leaves())
