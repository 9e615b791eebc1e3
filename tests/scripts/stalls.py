"""Process 1 or process 0 comes late to one call after another; who waits must say so.

TNT_STALL_WARNING_S is 1.
"""

import time

import flax.linen as nn
import numpy as np

import tnt_jax as tnt

LATE_S = 1.8
process = tnt.get_process_index()
x, y = np.zeros((32, 3), np.float32), np.zeros((32, 1), np.float32)


def late(number):
    print(flush=True)
    if process == number:
        time.sleep(LATE_S)


class Late(tnt.callbacks.Callback):
    def on_train_batch_begin(self, batch, logs=None):
        if batch == 1:
            late(1)


class SlowSave(tnt.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        late(0)


def slow_data():
    for step in range(4):
        if step == 2:
            late(1)
        yield x[:4], y[:4]


def make_model(**choices):
    model = tnt.Model(nn.Dense(1), **choices)
    model.compile("sgd", loss="mse")
    model.fit(x, y, batch_size=4, verbose=0)
    return model


model, by_xla = make_model(), make_model(fusion_threshold="xla")
late(1)
model.predict(x, verbose=0)
late(0)
tnt.barrier()
model.fit(x, y, batch_size=4, callbacks=[Late()], verbose=0)
by_xla.fit(x, y, batch_size=4, callbacks=[Late()], epochs=2, initial_epoch=1, verbose=0)
model.fit(x, y, batch_size=4, callbacks=[SlowSave()], verbose=0)
model.fit(slow_data(), verbose=0)
print("all came", flush=True)
if tnt.is_master_rank():
    model.predict(x, verbose=0)
