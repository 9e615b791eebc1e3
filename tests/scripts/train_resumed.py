"""Trains a model whose weights count how often each row was seen, with `fit(resume=...)`, and may
kill its own process between two steps.

Run by tests/faults/test_resume.py with a JSON object of options; the last fit's history, the counts
and the bits of all weights go to the file `out`.
"""

import json
import os
import signal
import sys

import flax.linen as nn
import jax.numpy as jnp
import numpy as np

import tnt_jax as tnt

NUM_ROWS, RATE = 96, 0.125


class Counting(nn.Module):
    """A small network with dropout, and a weight for each row, of which the loss is a sum."""

    @nn.compact
    def __call__(self, inputs, train):
        seen = self.param("seen", nn.initializers.zeros, (NUM_ROWS,))
        x = nn.Dropout(0.5, deterministic=not train)(nn.Dense(4)(inputs["x"]))
        return jnp.stack([nn.Dense(1)(x)[:, 0], seen[inputs["row"]]], axis=1)


class SquaresAndSeen(tnt.losses.Loss):
    """Small squared errors of the first output, plus the second: every row adds 1 to a gradient."""

    def call(self, y_true, y_pred):
        return 1e-3 * (y_pred[:, 0] - y_true) ** 2 + y_pred[:, 1]


class KillAt(tnt.callbacks.Callback):
    """Kills this process, as `kill -9` does, after a number of steps, counted over all fits."""

    steps_left = 0

    def on_train_batch_end(self, batch, logs=None):
        KillAt.steps_left -= 1
        if KillAt.steps_left == 0:
            os.kill(os.getpid(), signal.SIGKILL)


class Rows:
    """The rows, for random access."""

    def __init__(self, x, y):
        self.x, self.y = x, y

    def __len__(self):
        return len(self.y)

    def __getitem__(self, index):
        return {"x": self.x[index], "row": np.int32(index)}, self.y[index]


def data_of(options, x, y):
    """Returns the arguments of `fit` for the data."""
    batch, seed = options.get("batch", 8), options.get("seed", 0)
    sizes = {"tnt_micro_batch_size": options["micro"]} if "micro" in options else {}
    inputs = {"x": x, "row": np.arange(NUM_ROWS, dtype=np.int32)}
    if options["data"] == "arrays":
        return {"x": inputs, "y": y} | (sizes or {"batch_size": batch})
    if options["data"] == "random_access":
        size = None if sizes else batch
        return {"x": tnt.data.RandomAccess(Rows(x, y), size, shuffle=True, seed=seed)} | sizes
    if options["data"] == "generator":
        order = np.random.default_rng(seed).permutation(NUM_ROWS).reshape(-1, batch)
        pick = lambda rows: ({name: part[rows] for name, part in inputs.items()}, y[rows])  # noqa: E731
        epochs = options.get("epochs", 3)
        batches = (pick(rows) for _ in range(epochs) for rows in order)
        return {"x": batches, "steps_per_epoch": len(order)}
    import tensorflow as tf

    dataset = tf.data.Dataset.from_tensor_slices((inputs, y)).shuffle(NUM_ROWS, seed=seed or None)
    return {"x": dataset} | sizes if sizes else {"x": dataset.batch(batch)}


def train(options):
    """Returns what came out of `fit`."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((NUM_ROWS, 3)).astype(np.float32)
    y = rng.standard_normal(NUM_ROWS).astype(np.float32)
    model = tnt.Model(Counting(), seed=options.get("seed", 0))
    steps = options.get("accumulation_steps")
    optimizer = tnt.optimizers.SGD(options.get("rate", RATE), gradient_accumulation_steps=steps)
    model.compile(optimizer, loss=SquaresAndSeen(reduction="sum"))
    history = model.fit(
        **data_of(options, x, y),
        epochs=options.get("epochs", 3),
        verbose=2,
        callbacks=[
            KillAt(),
            # The loss falls by what "seen" is: no epoch improves enough, and the count goes on.
            (early := tnt.callbacks.EarlyStopping("loss", min_delta=1e9, patience=50)),
        ],
        **({"resume": options["resume"]} if "resume" in options else {}),
    )
    records = tnt.all_gather(np.array([early.wait, *history.epoch]))
    weights = model.weights_by_path()
    seen = next(np.asarray(value) for path, value in weights.items() if "seen" in path)
    return {
        "history": history.history,
        "epochs": history.epoch,
        "seen": (-seen / RATE * (steps or 1)).tolist(),
        "bits": {path: np.asarray(value).tobytes().hex() for path, value in weights.items()},
        "early_stopping": early.state(),
        # Each process keeps its own record.
        "processes_agree": bool((records == records[0]).all()),
    }


def main():
    options = {"data": "arrays"} | json.loads(sys.argv[1])
    KillAt.steps_left = options.get("kill_after", {}).get(os.environ.get("TNT_PROCESS_ID", "0"), 0)
    before = [train(options) for _ in range(options.get("fits_before", 0))]
    found = train(options) | {"before": before}
    found["steps"] = -KillAt.steps_left
    if tnt.is_master_rank():
        with open(options["out"], "w") as file:
            json.dump(found, file)


if __name__ == "__main__":
    main()
