"""Runs that end in the middle, for the tests of what goes on afterwards."""

from tnt_jax import callbacks


class Crash(Exception):
    pass


class CrashAt(callbacks.Callback):
    """Ends the run after a number of steps, which it counts down."""

    def __init__(self, steps):
        super().__init__()
        self.steps = steps

    def on_train_batch_end(self, batch, logs=None):
        self.steps -= 1
        if self.steps == 0:
            raise Crash
