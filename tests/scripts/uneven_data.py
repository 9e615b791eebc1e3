"""Each case gives process 1 data that ends sooner, fails or differs; every process must raise an
error, within seconds, and go on. With the word `packages`, data of Keras and TensorFlow, too.
"""

import sys
import time

import flax.linen as nn
import numpy as np
import pytest

import tnt_jax as tnt

STEPS, ROWS = 5, 4
process = tnt.get_process_index()
is_other = process == 1


def batch(step, rows=ROWS, columns=3):
    return np.full((rows, columns), step, np.float32), np.zeros((rows, 1), np.float32)


def shorter():
    for step in range(STEPS - 2 * is_other):
        yield batch(step)


def empty():
    for step in range(STEPS * (not is_other)):
        yield batch(step)


def failing():
    for step in range(STEPS):
        if is_other and step == 3:
            raise OSError("record 3 is corrupt")
        yield batch(step)


def fewer_rows():
    for step in range(STEPS):
        yield batch(step, rows=ROWS - (is_other and step == 2))


def wider():
    for step in range(STEPS):
        yield batch(step, columns=3 + (is_other and step == 2))


class Again:
    """Gives the same batches in each epoch, without a length."""

    def __iter__(self):
        return shorter()


class NoLength(Again):
    def __len__(self):
        if is_other:
            raise OSError("the index is missing")
        return STEPS


class Stop(tnt.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        self.model.stop_training = is_other and batch == 2


class StopAtEnd(tnt.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        self.model.stop_training = is_other and epoch == 1


class Exchanges(tnt.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        assert tnt.all_reduce(np.full(1000, batch)).tolist() == [2 * batch] * 1000
        assert tnt.all_reduce(batch) == 2 * batch


class PredictsAlone(tnt.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        if is_other:
            self.model.predict(good, verbose=0)


model = tnt.Model(nn.Dense(1))
model.compile("sgd", loss="mse", metrics=["mae"])
good = [batch(step) for step in range(STEPS)]


def endless():
    while True:
        yield batch(0)


CASES = {
    "ends sooner": (lambda: model.fit(shorter(), epochs=1, verbose=0), "process 1 has ended after 3 batch(es) of epoch 1"),
    "ends in a later epoch": (
        lambda: model.fit((batch(0) for _ in range(8 - is_other)), epochs=3, steps_per_epoch=3, verbose=0),
        "process 1 has ended after 1 batch(es) of epoch 3",
    ),
    "no length": (lambda: model.fit(Again(), epochs=2, verbose=0), "process 1 has ended after 3 batch(es) of epoch 1"),
    "empty": (lambda: model.fit(empty(), verbose=0), "The dataset is empty"),
    "fails": (lambda: model.fit(failing(), verbose=0), "OSError: record 3 is corrupt" if not is_other else "record 3"),
    "fewer rows": (lambda: model.fit(fewer_rows(), verbose=0), "Batch 3 of epoch 1 has 4 rows of float32[3], float32[1] on process 0"),
    "wider": (lambda: model.predict(wider(), verbose=0), "float32[4]"),
    "list": (lambda: model.fit(good[: STEPS - is_other], verbose=0), "steps of an epoch: 5 on process 0, 4 on process 1"),
    "arrays": (
        lambda: model.fit(*batch(0, rows=40 - is_other), batch_size=8, verbose=0),
        "number of examples: 40 on process 0, 39 on process 1"
    ),
    "evaluate": (lambda: model.evaluate(shorter(), verbose=0), "process 1 has ended after 3 batch(es) of the data to evaluate"),
    "predict": (lambda: model.predict(shorter(), verbose=0), "process 1 has ended after 3 "
                                                             "batch(es) of the data to predict"),
    "fewer steps": (lambda: model.predict(endless(), steps=3 - is_other, verbose=0), "steps: 3 on process 0, 2 on process 1"),
    "fewer epochs": (lambda: model.fit(good, epochs=3 - is_other, verbose=0), "epochs: 3 on process 0, 2 on process 1"),
    "validation": (lambda: model.fit(good, validation_data=Again(), verbose=0), "process 1 has ended after 3 batch(es)"),
    "own shards fail": (
        lambda: model.fit(failing(), tnt_distribute_dataset=False, verbose=0), "record 3 is corrupt"
    ),
    "own shards without a length": (
        lambda: model.fit(NoLength(), tnt_distribute_dataset=False, verbose=0), "the index is missing"
    ),
    "own shards to evaluate": (
        lambda: model.evaluate(NoLength(), tnt_distribute_dataset=False, verbose=0), "the index is missing"
    ),
    "other calls": (
        lambda: (model.predict if is_other else model.evaluate)(good, verbose=0),
        "The processes came to different calls"
    ),
    "callback on one process": (
        lambda: model.fit(good, callbacks=[PredictsAlone()], verbose=0),
        "process(es) 0: end of epoch 1 in Model.fit; process(es) 1: Model.predict in Model.fit"
    ),
    "wrong arguments": (lambda: model.fit(good, batch_size=3 if is_other else None, verbose=0), "batch_size: None on process 0, 3 on process 1"),
}  # fmt: skip


def of_packages():
    """Returns cases of data that Keras and TensorFlow hold."""
    import keras
    import tensorflow as tf

    class Sequence(keras.utils.PyDataset):
        def __len__(self):
            return STEPS - is_other

        def __getitem__(self, index):
            return batch(index)

    rows = tf.data.Dataset.from_tensor_slices(batch(0, rows=20 - 4 * is_other)).batch(ROWS)
    shard = rows.map(lambda x, y: (tf.strings.as_string(x) if is_other else x, y))
    text = "steps of an epoch: 5 on process 0, 4 on process 1"
    return {
        "PyDataset": (lambda: model.fit(Sequence(), verbose=0), text),
        "tf.data": (lambda: model.fit(rows, verbose=0), text),
        "own shards of text": (
            lambda: model.fit(shard, tnt_distribute_dataset=False, verbose=0),
            "component 0 is text",
        ),
    }


if "packages" in sys.argv:
    CASES |= of_packages()
for name, (call, text) in CASES.items():
    start = time.monotonic()
    with pytest.raises((TypeError, ValueError, RuntimeError, OSError)) as raised:
        call()
    assert text in str(raised.value), (name, raised.value)
    assert time.monotonic() - start < 15, name
    print("refused", name, flush=True)
    # Whatever was refused, training goes on with equal data.
    model.fit(good, callbacks=[Exchanges()], verbose=0)
history = model.fit(good, epochs=5, callbacks=[StopAtEnd()], verbose=0)
assert len(history.epoch) == 2, "One process that stops stops all."
assert model.predict(good, verbose=0).shape == (STEPS * ROWS, 1)
weights = tnt.all_gather(model.get_weights())
for gathered in weights:
    np.testing.assert_array_equal(gathered[0], gathered[1])
print("all cases", len(CASES), flush=True)
steps = model.optimizer.iterations
model.fit(good, callbacks=[Stop()], epochs=2, verbose=0)
assert model.optimizer.iterations == steps + STEPS, "Asked for in the middle of an epoch, too."
print("stopped together", flush=True)
