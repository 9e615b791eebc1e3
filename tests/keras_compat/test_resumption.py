"""Where `fit` begins after callbacks have spoken: once, and with the sums that were there."""

import flax.linen as nn
import jax
import numpy as np
import pytest

import tnt_jax as tnt
from tnt_jax.keras_compat.resumption import Resumption, Start
from tnt_jax.train.checkpoint import Position

X = np.arange(24, dtype=np.float32).reshape(12, 2) / 24
Y = X.sum(axis=1, keepdims=True)


@pytest.mark.parametrize(("by_keras", "epoch"), [(None, 3), (5, 5)])
def test_fit_begins_at_its_argument_unless_keras_says_otherwise_once(by_keras, epoch):
    resumption = Resumption(core=None)
    resumption.initial_epoch = by_keras
    assert resumption.take(3, None) == Start(epoch, 0, None)
    assert resumption.take(3, None) == Start(3, 0, None)


def test_a_position_counts_once_and_before_every_other_word():
    resumption = Resumption(core=None)
    resumption.initial_epoch = 1
    resumption.resume_at(Position(4, 2), [])
    assert resumption.take(0, None) == Start(4, 2, None)
    assert resumption.take(0, None) == Start(0, 0, None)


class Interrupted(tnt.callbacks.Callback):
    """Keeps the sums and the weights after two batches of the first epoch."""

    def on_train_batch_end(self, batch, logs=None):
        if batch == 1:
            self.sums = [np.asarray(leaf) for leaf in jax.tree.leaves(self.model.epoch_sums)]
            self.weights = self.model.get_weights()
            self.model.stop_training = True


class Resuming(tnt.callbacks.Callback):
    def __init__(self, interrupted):
        super().__init__()
        self.interrupted = interrupted

    def on_train_begin(self, logs=None):
        self.model.set_weights(self.interrupted.weights)
        self.model.resumption.resume_at(Position(0, 2), self.interrupted.sums)


def losses(*callbacks):
    model = tnt.Model(nn.Dense(1))
    model.compile("sgd", loss="mse")
    fitted = model.fit(X, Y, batch_size=4, epochs=2, shuffle=False, verbose=0, callbacks=callbacks)
    return fitted.history["loss"]


def test_the_logs_of_a_resumed_epoch_count_the_batches_before(use_ranks):
    use_ranks(2)
    interrupted = Interrupted()
    losses(interrupted)
    # Gradient descent has no other state, so the run must go on as if nothing had happened.
    assert losses(Resuming(interrupted)) == losses()
