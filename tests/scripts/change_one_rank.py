"""Callbacks change the learning rate, and later stop training, on the second process only."""

import flax.linen as nn
import numpy as np

import tnt_jax as tnt


class ChangeOneRank(tnt.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        if tnt.get_rank() == 1 and epoch == 0:
            self.model.optimizer.learning_rate = 0.5
        if tnt.get_rank() == 1 and epoch == 1:
            self.model.stop_training = True


def main():
    model = tnt.Model(nn.Dense(1), reproducible=True, virtual_ranks=2)
    model.compile(tnt.optimizers.SGD(0.1), loss="mse")
    x = np.ones((8, 3), np.float32)
    try:
        model.fit(x, x[:, :1], batch_size=8, epochs=3, verbose=0, callbacks=[ChangeOneRank()])
    except RuntimeError as error:
        tnt.barrier()
        if tnt.is_master_rank():
            print(error, flush=True)


main()
