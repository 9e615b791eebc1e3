"""Callbacks change the learning rate, or stop training, on the second process only."""

import flax.linen as nn
import numpy as np

import tnt_jax as tnt

is_other = tnt.get_process_index() == 1


class ChangeRate(tnt.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        if is_other:
            self.model.optimizer.learning_rate = 0.5


class Stop(tnt.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        self.model.stop_training = is_other


x = np.ones((8, 3), np.float32)
for callback in (ChangeRate(), Stop()):
    model = tnt.Model(nn.Dense(1), reproducible=True, virtual_ranks=2)
    model.compile(tnt.optimizers.SGD(0.1), loss="mse")
    try:
        model.fit(x, x[:, :1], batch_size=8, epochs=3, verbose=0, callbacks=[callback])
    except RuntimeError as error:
        print(error, flush=True)
    tnt.barrier()
