"""Trainings that use every callback, for Keras in one process and for tnt_jax in any number of
them.
"""

import json
import os
import sys
from pathlib import Path

import keras
import numpy as np
from flax import nnx
from keras_beside import Net, Recorder, compile_linen, data, keras_model, linen_model

import tnt_jax as tnt
from tnt_jax import callbacks as ours

NUM_EPOCHS = 3
# Uneven on 2 and 4 ranks: batches of 8, 8 and 5 rows, validated by 8 and 1.
TRAIN, VALIDATION = data(21), data(9, seed=1)


class Interruption(Exception):
    """What a run is interrupted with."""


class InterruptAt(keras.callbacks.Callback):
    """Interrupts the run before an epoch, once."""

    def __init__(self, epoch):
        super().__init__()
        self.epoch = epoch

    def on_epoch_begin(self, epoch, logs=None):
        if epoch == self.epoch:
            self.epoch = None
            raise Interruption


class StopByLoss(keras.callbacks.Callback):
    """Ends training in the middle of an epoch, by what a user's own callback reads in the logs."""

    def __init__(self, below):
        super().__init__()
        self.below = below

    def on_train_batch_end(self, batch, logs=None):
        if logs["loss"] < self.below:
            self.model.stop_training = True


def writers(module, folder, *, rank, url, with_keras_tensorboard):
    """Returns callbacks that write, each to a path that names the process that wrote it."""
    path = lambda name: os.path.join(folder, f"{rank}-{name}")  # noqa: E731
    weights = {"save_weights_only": True}
    made = [
        module.CSVLogger(path("log.csv")),
        module.ModelCheckpoint(path("e{epoch:02d}-{val_loss:.1f}.weights.h5"), **weights),
        module.ModelCheckpoint(path("b{epoch}-{batch:02d}.weights.h5"), save_freq=4, **weights),
        module.ModelCheckpoint(
            path("best{epoch}.weights.h5"), monitor="val_accuracy", save_best_only=True, **weights
        ),
        module.RemoteMonitor(url, send_as_json=True),
    ]
    if module is ours or with_keras_tensorboard:
        made.append(module.TensorBoard(path("tensorboard"), update_freq=1))
    if module is ours:
        made += [
            ours.OnAllRanks(ours.CSVLogger(path("everywhere.csv"))),
            ours.OnMaster(ours.CSVLogger(path("master.csv"))),
            ours.RuntimeProfiler(8, path("profile.txt"), logging_freq=2, print_freq=2),
            ours.PlotHistory(path("curves.png")),
            ours.ModelCheckpoint(os.path.join(folder, "together")),
            ours.LambdaCallback(
                on_epoch_end=lambda epoch, logs: print(f"epoch {epoch} on rank {rank}", flush=True)
            ),
            ours.ProgbarLogger(2),
        ]
    return made


class NnxNet(nnx.Module):
    def __init__(self):
        self.dense_0, self.dense_1 = (
            nnx.Linear(4, 8, rngs=nnx.Rngs(0)),
            nnx.Linear(8, 3, rngs=nnx.Rngs(0)),
        )

    def __call__(self, x):
        return self.dense_1(nnx.relu(self.dense_0(x)))


def make_linen(theirs, **sgd):
    return linen_model(theirs, **sgd)


def make_nnx(theirs, **sgd):
    net = NnxNet()
    for layer, like in ((net.dense_0, theirs.layers[0]), (net.dense_1, theirs.layers[1])):
        layer.kernel[...], layer.bias[...] = (weight.value for weight in like.weights)
    model = tnt.Model(net)
    compile_linen(model, **sgd)
    return model


def make_wrapped(theirs, **sgd):
    model = tnt.Model(theirs)
    model.compile(
        keras.optimizers.SGD(**{"learning_rate": 0.1, **sgd}),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=[keras.metrics.SparseCategoricalAccuracy(name="accuracy")],
    )
    return model


class Runs:
    """Runs one model again and again from the same weights, and writes down what came out.

    Attributes:
        results: For each run its calls, history, number of epochs and final weights.
    """

    def __init__(self, module, folder, *, rank=0, url, with_keras_tensorboard=True, make=None):
        self.module, self.folder, self._make = module, str(folder), make
        self._has_keras_order = make in (None, make_wrapped)
        self.results = {}
        self._writers = writers(
            module, self.folder, rank=rank, url=url, with_keras_tensorboard=with_keras_tensorboard
        )
        self._use_model()
        self._rank = rank

    def run_all(self):
        """Runs every training of this file and returns the results."""
        module = self.module
        self.run("writers", self._writers)
        bad_rate = module.LearningRateScheduler(lambda epoch, rate: 0.1 if epoch < 2 else -0.1)
        stopping = module.EarlyStopping(
            "val_loss", patience=1, restore_best_weights=True, verbose=1
        )
        self.run("stopping", [bad_rate, stopping], epochs=6)
        self.results["stopping"] |= {"stopped": stopping.stopped_epoch, "best": stopping.best_epoch}
        plateau = module.ReduceLROnPlateau("val_loss", factor=0.8, patience=1, min_delta=10.0)
        self.run("plateau", [plateau], epochs=4)
        self.run("nan", [module.TerminateOnNaN()], rate=1e30)
        self.run("own", [StopByLoss(1.0)], epochs=6, rate=0.3)
        self.run_interrupted()
        if module is ours:
            self.run(
                "warmup", [ours.LearningRateWarmup(0.4, initial_learning_rate=0.1, epochs=1.5)]
            )
        self._use_model(use_ema=True, ema_momentum=0.8)
        self.run("average", [module.SwapEMAWeights(swap_on_epoch=True)])
        return self.results

    def run(self, name, callbacks, *, epochs=NUM_EPOCHS, rate=0.1):
        """Trains from the first weights and records the run."""
        self._start_again(rate)
        recorder = Recorder()
        self._record(name, self._fit([*callbacks, recorder], epochs), recorder)

    def run_interrupted(self):
        """Trains, is interrupted, and goes on from a backup."""
        self._start_again(0.1)
        recorder, interrupt = Recorder(), InterruptAt(1)
        # All processes share one folder, but for Keras's callback, which runs on the master.
        path = os.path.join(self.folder, "backup")
        others = [recorder, interrupt]
        try:
            self._fit([self.module.BackupAndRestore(path), *others], NUM_EPOCHS)
        except Interruption:
            self._start_again(0.7)
        assert interrupt.epoch is None, "It must be interrupted."
        history = self._fit([self.module.BackupAndRestore(path), *others], NUM_EPOCHS)
        self._record("interrupted", history, recorder)

    def _record(self, name, history, recorder):
        self.results[name] = {
            "calls": [
                [*call, {name: float(value) for name, value in logs.items()}]
                for *call, logs in recorder.calls
            ],
            "history": {
                key: [float(value) for value in values] for key, values in history.history.items()
            },
            "epochs": history.epoch,
            "weights": [weight.tolist() for weight in self._weights()],
            "rate": float(self.model.optimizer.learning_rate),
        }

    def _use_model(self, **sgd):
        theirs = keras_model(**sgd)
        self.model = theirs if self._make is None else self._make(theirs, **sgd)
        self.model.build((None, 4))
        self._first = self.model.get_weights()

    def _start_again(self, rate):
        self.model.set_weights(self._first)
        self.model.optimizer.learning_rate = rate

    def _fit(self, callbacks, epochs):
        return self.model.fit(
            *TRAIN,
            batch_size=8,
            epochs=epochs,
            shuffle=False,
            verbose=0,
            callbacks=callbacks,
            validation_data=VALIDATION,
        )

    def _weights(self):
        weights = self.model.get_weights()
        return [weights[i] for i in (1, 0, 3, 2)] if self._has_keras_order else weights


def check_saving(model, folder, weights):
    """Reads back what all processes wrote together."""
    loaded = tnt.models.load_model(f"{folder}/together", custom_objects={"Net": Net})
    assert loaded.optimizer.iterations == 9
    for mine, theirs in zip(loaded.get_weights(), weights, strict=True):
        np.testing.assert_array_equal(mine, np.array(theirs, np.float32))
    model.save_weights(f"{folder}/own.weights.h5")
    loaded.load_weights(f"{folder}/own.weights.h5")
    for mine, theirs in zip(loaded.get_weights(), model.get_weights(), strict=True):
        np.testing.assert_array_equal(mine, theirs)


def check_saving_of_parts(folder):
    """Saves an optimizer's state that is sharded over the processes to one file, and goes on
    from it with whole ones.
    """

    def make(**options):
        model = tnt.Model(Net(), **options)
        model.compile(
            tnt.optimizers.Adam(0.05),
            loss=tnt.losses.SparseCategoricalCrossentropy(from_logits=True),
        )
        model.build((None, 4))
        return model

    sharded, whole = make(shard_optimizer_state=True), make()
    path = f"{folder}/sharded.weights.h5"
    sharded.fit(
        *TRAIN,
        batch_size=8,
        verbose=0,
        callbacks=[ours.ModelCheckpoint(path, save_weights_only=True)],
    )
    whole.load_weights(path)
    losses = [
        model.fit(*TRAIN, batch_size=8, shuffle=False, verbose=0).history["loss"]
        for model in (sharded, whole)
    ]
    np.testing.assert_allclose(*losses, rtol=1e-5)


def main():
    folder, url, *tensorboard = sys.argv[1:]
    tnt.init()
    rank, found = tnt.get_rank(), {}
    for label, module in (("ours", ours), ("mixed", keras.callbacks)):
        place = os.path.join(folder, label)
        runs = Runs(
            module,
            place,
            rank=rank,
            url=f"{url}/{label}",
            with_keras_tensorboard=bool(tensorboard),
            make=make_linen,
        )
        found[label] = runs.run_all()
        if module is ours:
            check_saving(runs.model, place, found[label]["writers"]["weights"])
            check_saving_of_parts(place)
    (Path(folder) / f"process{rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
