"""The job that `benchmarks/faults.py` disturbs, in Keras 3 on JAX with its own distribution."""

import os

os.environ["KERAS_BACKEND"] = "jax"

import jax

jax.distributed.initialize(
    os.environ["COORDINATOR"], int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"])
)

import keras
from injected import BATCH, EPOCHS, NUM_ROWS, Disturbance, dataset, finish, folder, record_step

disturbance = Disturbance(jax.process_index())
keras.distribution.set_distribution(keras.distribution.DataParallel(auto_shard_dataset=False))
keras.utils.set_random_seed(0)


class Progress(keras.callbacks.Callback):
    """Records each step, and meets what disturbs it."""

    def on_train_batch_end(self, batch, logs=None):
        """Records the step on the first process."""
        step = int(self.model.optimizer.iterations.value)
        if jax.process_index() == 0:
            record_step(step)
        disturbance.meet("callback", step)


class Batches(keras.utils.PyDataset):
    """This process's rows of each global batch."""

    def __init__(self):
        super().__init__()
        self.ids, self.x, self.y = dataset()

    def __len__(self):
        return NUM_ROWS // BATCH

    def __getitem__(self, index):
        disturbance.meet("loader", index)
        share = BATCH // jax.process_count()
        first = index * BATCH + jax.process_index() * share
        rows = slice(first, first + share)
        x = self.x[rows].copy()
        for number in range(share):
            x[number] = disturbance.spoil(x[number], first + number)
        return (self.ids[rows], x), self.y[rows]


class Seen(keras.layers.Layer):
    """Counts, as a parameter, how often each row was trained on."""

    def build(self, shape):
        """Creates the counts."""
        self.counts = self.add_weight(shape=(NUM_ROWS,), initializer="zeros", name="counts")

    def call(self, ids):
        """Returns the counts of the rows."""
        return keras.ops.take(self.counts, ids, axis=0)[:, None]


ids, x = keras.Input((), dtype="int32"), keras.Input((8,))
outputs = keras.layers.Dense(1)(keras.layers.Dense(32, "tanh")(x))
seen = Seen()
model = keras.Model([ids, x], keras.layers.Concatenate()([outputs, seen(ids)]))


def loss(targets, outputs):
    """Returns `[batch]`: the squared error, and what makes SGD add to the counts.

    One rate serves all parameters, so the counts grow by the rate for each row.
    """
    return (outputs[:, 0] - targets[:, 0]) ** 2 - BATCH * outputs[:, 1]


RATE = 2.0**-5
model.compile(keras.optimizers.SGD(RATE), loss=loss)
# One directory for both processes makes them wait for each other's file without end.
directory = folder() / "backup" / str(jax.process_index())
backup = keras.callbacks.BackupAndRestore(str(directory), delete_checkpoint=False)
model.fit(Batches(), epochs=EPOCHS, verbose=0, shuffle=False, callbacks=[Progress(), backup])
if jax.process_index() == 0:
    finish(seen.counts.numpy() / RATE, [weight.numpy() for weight in model.weights])
