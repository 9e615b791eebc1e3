"""Trains, evaluates and predicts single batches, also of fewer rows than ranks, and writes what
each process saw.
"""

import sys

import flax.linen as nn
import jax
import numpy as np

import tnt_jax as tnt


def run(**options):
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(12, 4)).astype("float32"), rng.integers(0, 3, 12)
    model = tnt.Model(nn.Dense(3), seed=3, **options)
    model.compile(
        tnt.optimizers.Adam(0.05),
        loss=tnt.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    found = {}
    for index, rows in enumerate((slice(0, 8), slice(8, 11), slice(11, 12))):
        found[f"train{index}"] = model.train_on_batch(
            x[rows], y[rows], sample_weight=np.linspace(1, 2, 12)[rows]
        )
        found[f"test{index}"] = model.test_on_batch(x[rows], y[rows])
        found[f"predict{index}"] = model.predict_on_batch(x[rows])
    found["call"] = np.asarray(model(x[:1]))
    kernel = next(variable for variable in model.trainable_weights if variable.name == "kernel")
    kernel.assign(kernel.numpy() + 1)
    found["assigned"] = model.predict_on_batch(x)
    # Every process asks for what is sharded over several.
    found |= {variable.path: variable.numpy() for variable in model.optimizer.variables}
    return found


if __name__ == "__main__":
    for form, options in (("whole", {}), ("sharded", {"shard_optimizer_state": True})):
        np.savez(f"{sys.argv[1]}/{form}{jax.process_index()}.npz", **run(**options))
