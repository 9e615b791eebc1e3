"""Trains by recipes given as JSON, with local steps or without, and writes what came out of each to
a folder of its name. `train_local.py RECIPES FOLDER DEVICES`, with so many devices of each process.

Run by the tests of local steps.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path

import jax
import numpy as np
import optax

sys.path.insert(0, str(Path(__file__).parents[1] / "helpers"))
from reference_trainer import Net, make_data

import tnt_jax as tnt

OUTER = {"mean": optax.sgd(1.0), "nesterov": optax.sgd(0.7, momentum=0.9, nesterov=True)}


class KillAt(tnt.callbacks.Callback):
    """Kills this process after some steps, and after the time that a backup takes."""

    def __init__(self, steps):
        super().__init__()
        self._steps_left = steps

    def on_train_batch_end(self, batch, logs=None):
        self._steps_left -= 1
        if not self._steps_left:
            time.sleep(2)
            os.kill(os.getpid(), signal.SIGKILL)


class Weights(tnt.callbacks.Callback):
    """Keeps the outer weights after each epoch."""

    def __init__(self):
        super().__init__()
        self.found = []

    def on_epoch_end(self, epoch, logs=None):
        self.found.append(np.concatenate([x.ravel() for x in self.model.get_weights()]))


def main():
    jax.config.update("jax_num_cpu_devices", int(sys.argv[3]))
    for name, recipe in json.loads(sys.argv[1]).items():
        train(recipe, Path(sys.argv[2]) / name)


def sync_of(recipe):
    if (given := recipe.get("sync")) is None:
        return None
    return tnt.LocalSteps(**{"groups": "process"} | given | {"outer": OUTER[given["outer"]]})


def train(recipe, folder):
    x, y, weight = make_data(recipe["rows"])
    x[recipe.get("bad_rows", [])] = np.nan
    net = Net(
        batch_norm=recipe.get("batch_norm", False),
        dropout=recipe.get("dropout", 0.0),
        axis_name=recipe.get("axis_name"),
    )
    model = tnt.Model(net, seed=4, sync=sync_of(recipe))
    falls = recipe.get("rate_falls", False)
    model.compile(
        tnt.optimizers.SGD(0.1) if falls else optax.sgd(0.1, momentum=recipe.get("momentum")),
        loss=tnt.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
        on_nan=recipe.get("on_nan", "skip" if "bad_rows" in recipe else None),
    )
    weights = Weights()
    callbacks = [weights]
    if falls:
        callbacks += [
            tnt.callbacks.LearningRateScheduler(lambda epoch: 0.1 / (1 + epoch)),
            tnt.callbacks.ModelCheckpoint(folder / "kept.weights.h5", save_weights_only=True),
        ]
    if "resume" in recipe:
        callbacks.append(
            tnt.callbacks.BackupAndRestore(
                folder.parent / recipe["resume"], recipe["save_freq"], delete_checkpoint=False
            )
        )
    if "kill_after" in recipe:
        callbacks.append(KillAt(recipe["kill_after"]))
    history = model.fit(
        x,
        y,
        sample_weight=weight if recipe.get("weights", False) else None,
        batch_size=recipe["size"],
        epochs=recipe.get("epochs", 2),
        validation_data=(x, y) if recipe.get("evaluates", False) else None,
        callbacks=callbacks,
        verbose=0,
        shuffle=recipe.get("shuffle", True),
    )
    if recipe.get("evaluates", False):
        others = {"predictions": model.predict(x, batch_size=recipe["size"], verbose=0)}
    else:
        others = {}
    leaves = {
        jax.tree_util.keystr(path): leaf
        for path, leaf in jax.tree_util.tree_leaves_with_path(model.variables)
    }
    logs = {f"history {name}": values for name, values in history.history.items()}
    np.savez(
        folder / f"process{tnt.get_process_index()}.npz",
        by_epoch=np.stack(weights.found) if weights.found else np.zeros(0),
        **leaves,
        **logs,
        **others,
    )


if __name__ == "__main__":
    main()
