"""Trains by recipes given as JSON and writes what came out of each to a folder of its name:
history, weights, predictions. `train_parity.py RECIPES FOLDER DEVICES`, with so many devices of
each process.

Run by the multi-process tests.
"""

import json
import sys
from pathlib import Path

import jax
import numpy as np
import optax

sys.path.insert(0, str(Path(__file__).parents[1] / "helpers"))
from reference_trainer import Net, make_data

import tnt_jax as tnt


def main():
    jax.config.update("jax_num_cpu_devices", int(sys.argv[3]))
    for name, recipe in json.loads(sys.argv[1]).items():
        train(recipe, Path(sys.argv[2]) / name)


def train(recipe, folder):
    x, y, weight = make_data(recipe["num_examples"])
    model = tnt.Model(
        Net(batch_norm=True, dropout=0.3, axis_name=recipe.get("axis_name", "data")), seed=4
    )
    every = recipe.get("accumulation", 1)
    model.compile(
        optax.sgd(0.1, momentum=0.9)
        if every == 1
        else tnt.optimizers.SGD(0.1, gradient_accumulation_steps=every),
        loss=tnt.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
        weighted_metrics=["accuracy"],
    )
    if recipe["source"] == "arrays":
        history = model.fit(
            x,
            y,
            batch_size=recipe["size"],
            epochs=2,
            sample_weight=weight,
            verbose=2,
        )
        others = {"predictions": model.predict(x, batch_size=recipe["size"], verbose=0)}
    else:
        size = recipe["size"]
        batches = [
            (x[i : i + size], y[i : i + size], weight[i : i + size]) for i in range(0, len(x), size)
        ]
        history = model.fit(
            batches, epochs=2, validation_data=batches, validation_freq=2, verbose=2
        )
        others = {}
    leaves = {
        jax.tree_util.keystr(path): leaf
        for path, leaf in jax.tree_util.tree_leaves_with_path(model.variables)
    }
    # Every process writes, because every process must have the full result.
    out = folder / f"process{tnt.get_process_index()}.npz"
    logs = {f"history {name}": values for name, values in history.history.items()}
    np.savez(out, size=tnt.get_size(), rank=tnt.get_rank(), **leaves, **logs, **others)


if __name__ == "__main__":
    main()
